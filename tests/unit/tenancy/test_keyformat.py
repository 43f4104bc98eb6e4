"""The written form of API keys."""

from __future__ import annotations

import pytest

from lamina.errors import ConfigurationInvalid, Unauthenticated
from lamina.tenancy.keyformat import INVALID_KEY, MAX_KEY_CHARS, ApiKey, check_environment

KEY = ApiKey("live", "abcdefgh234567ij", "k" * 26 + "7" * 26)  # fixed: parts of it name tests, in every worker alike


def test_round_trip() -> None:
    """A generated key reads back as itself and carries 256 secret bits."""
    key = ApiKey.generate("live")
    assert ApiKey.parse(key.raw) == key
    assert len(key.secret) * 5 >= 256
    assert len(key.raw) <= MAX_KEY_CHARS


def test_the_secret_is_not_in_the_repr() -> None:
    """Keys end up in tracebacks; their secrets must not."""
    assert KEY.secret not in repr(KEY)


@pytest.mark.parametrize(
    "raw",
    [
        "",
        "sk-1234",
        "lamina_live",
        KEY.raw[:-1],
        KEY.raw + "a",
        KEY.raw + "\n",
        " " + KEY.raw,
        KEY.raw.upper(),
        KEY.raw.replace("lamina_live", "lamina_"),
        KEY.raw.replace("_live_", "_l i_"),
        KEY.raw.replace("_live_", "_l_ive_"),
        KEY.raw[:-1] + "\u0661",
        KEY.raw[:-1] + "\0",
        KEY.raw[:-1] + "\ud800",
        "x" * 10_000_000,
        None,
        b"lamina_live",
        7,
    ],
    ids=lambda raw: repr(raw)[:24],
)
def test_whatever_is_not_a_key_gets_the_message_of_an_unknown_key(raw: object) -> None:
    """Nothing about the form leaks, and no input breaks the parser."""
    with pytest.raises(Unauthenticated) as caught:
        ApiKey.parse(raw)
    assert caught.value.message == INVALID_KEY


def test_the_mac_covers_every_part() -> None:
    """Environment, id, secret and pepper all change it."""
    other = ApiKey.generate("live")
    macs = {
        KEY.mac(b"p"),
        KEY.mac(b"q"),
        ApiKey("test", KEY.public_id, KEY.secret).mac(b"p"),
        ApiKey("live", other.public_id, KEY.secret).mac(b"p"),
        ApiKey("live", KEY.public_id, other.secret).mac(b"p"),
    }
    assert len(macs) == 5


@pytest.mark.parametrize("env", ["", "Live", "a_b", "x" * 17, "é"])
def test_an_environment_that_cannot_stand_in_a_key_is_refused(env: str) -> None:
    """At configuration time, not at the first key."""
    with pytest.raises(ConfigurationInvalid):
        check_environment(env)
