"""Addresses of Redis servers: what they mean, and clear words about what means nothing."""

from __future__ import annotations

import pytest

from lamina_kvtier.redis_plane.address import InvalidAddress, RedisAddress


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("redis://cache", RedisAddress(host="cache")),
        ("redis://cache:7000/3", RedisAddress(host="cache", port=7000, database=3)),
        ("redis://cache/?db=3", RedisAddress(host="cache", database=3)),
        ("redis://:p%40ss@[::1]:1", RedisAddress(host="::1", port=1, password="p@ss")),
        ("redis://me:pw@cache", RedisAddress(host="cache", user="me", password="pw")),
        ("rediss://cache?ssl_ca_certs=/ca.pem", RedisAddress(host="cache", tls=True, ca_file="/ca.pem")),
        ("unix:///run/redis.sock", RedisAddress(path="/run/redis.sock")),
        ("unix://:pw@/run/r%20s.sock?db=2", RedisAddress(path="/run/r s.sock", password="pw", database=2)),
    ],
)
def test_a_url_names_a_server(url: str, address: RedisAddress) -> None:
    assert RedisAddress.parse(url) == address


@pytest.mark.parametrize(
    "url",
    [
        *("", "cache:6379", "http://cache", "redis://", "redis:///3", "redis://cache:x", "redis://cache:99999"),
        *(
            "redis://cache/x",
            "redis://cache/-1",
            "redis://cache/1/2",
            "redis://cache/99999999999",
            "redis://cache/1?db=1",
        ),
        *("redis://me@cache", "redis://cache#1", "redis://cache?x=1", "redis://cache?db=", "redis://cache?db=1&db=2"),
        *("redis://cache?ssl_ca_certs=/x", "rediss://cache?ssl_keyfile=/x", "unix://run/redis.sock", "unix:///"),
        *("unix:///" + "x" * 104, "unix:///a%00b", "redis://[::1", "unix://host/sock"),
    ],
)
def test_a_url_that_names_none_is_refused(url: str) -> None:
    with pytest.raises(InvalidAddress):
        RedisAddress.parse(url)


@pytest.mark.parametrize("url", ["redis://me:s3cret@cache", "redis://:s3cret@cache:s3cret", "redis://me:s3cret@[cache"])
def test_no_message_and_no_description_repeats_a_password(url: str) -> None:
    try:
        address = RedisAddress.parse(url)
    except InvalidAddress as error:
        assert "s3cret" not in str(error)  # noqa: PT017 - both ends are fine
    else:
        assert "s3cret" not in str(address) + repr(address)


@pytest.mark.parametrize("url", ["redis://cache:7000/3", "rediss://[::1]:6379/0", "unix:///run/redis.sock"])
def test_an_address_without_secrets_is_described_by_its_url(url: str) -> None:
    assert str(RedisAddress.parse(url)) == url


def test_tls_files_that_cannot_be_read_are_the_callers_mistake() -> None:
    with pytest.raises(InvalidAddress, match="cannot be set up"):
        RedisAddress.parse("rediss://cache?ssl_ca_certs=/nowhere.pem").tls_context()
