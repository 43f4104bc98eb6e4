"""The Redis tier on real servers: the contract of all tiers, and what only a server can do to one."""

from __future__ import annotations

import os
import shutil
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from fixtures.redis import running_redis, tell
from lamina.wiring.valkey import EmbeddedValkey
from lamina_kvtier.block_codec import HEADER_BYTES, BlockCodec
from lamina_kvtier.payload_codecs import EXACT_CODECS
from lamina_kvtier.redis_plane import Backoff, PlaneConfig, RedisAddress
from lamina_kvtier.redis_tier import RedisTier, RedisTierConfig
from lamina_kvtier.tier import Outcome, StoreTier, Tally
from support.fault_proxy import FaultProxy
from support.tier_contract import (
    BLOCK_BYTES,
    LAYOUT,
    PATIENCE_S,
    MakeTier,
    TierContract,
    blocks,
    ids,
    keys,
    load,
    lookup,
    put,
    room,
)

# Patient: the machine that runs tests is busy. What depends on deadlines sets its own.
CONFIG = RedisTierConfig(
    lookup_s=20, load_s=20, put_s=20, delete_s=20, plane=PlaneConfig(backoff=Backoff(first_s=0.02, limit_s=0.2))
)

Connect = Callable[..., RedisTier]


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Makes tiers and closes them."""
    with ExitStack() as made:

        def make(
            address: RedisAddress,
            config: RedisTierConfig = CONFIG,
            *,
            layout: bytes = LAYOUT,
            block_bytes: int = BLOCK_BYTES,
            codec: str = "raw",
        ) -> RedisTier:
            tier = RedisTier(address, BlockCodec(layout, block_bytes, codec=codec), config)
            made.callback(tier.close)
            return tier

        yield make


@pytest.fixture(scope="module")
def shared_server(redis_binary: Path) -> Iterator[EmbeddedValkey]:
    """One for all tests that name blocks of their own."""
    with running_redis(redis_binary) as server:
        yield server


class TestRedisTier(TierContract):
    @pytest.fixture
    def make_tier(self, shared_server: EmbeddedValkey, connect: Connect) -> MakeTier:
        def make(layout: bytes = LAYOUT, block_bytes: int = BLOCK_BYTES) -> StoreTier:
            return connect(shared_server.address, layout=layout, block_bytes=block_bytes)

        return make


@pytest.mark.skipif("zstd" not in EXACT_CODECS, reason="zstandard is not installed")
class TestRedisTierZstd(TierContract):
    @pytest.fixture
    def make_tier(self, shared_server: EmbeddedValkey, connect: Connect) -> MakeTier:
        def make(layout: bytes = LAYOUT, block_bytes: int = BLOCK_BYTES) -> StoreTier:
            return connect(shared_server.address, layout=layout, block_bytes=block_bytes, codec="zstd")

        return make


# Identity and life time


def test_deployments_share_nothing(shared_server: EmbeddedValkey, connect: Connect) -> None:
    """Equal identities under another deployment's name are other keys."""
    names = keys(2)
    put(connect(shared_server.address), names, blocks(2))
    assert lookup(connect(shared_server.address, replace(CONFIG, deployment="b")), names) == Tally(0, Outcome.MISSING)


def test_blocks_expire(shared_server: EmbeddedValkey, connect: Connect) -> None:
    tier = connect(shared_server.address, replace(CONFIG, ttl_s=0.2))
    names = keys(2)
    assert put(tier, names, blocks(2)) == (Outcome.OK,) * 2
    _until(lambda: lookup(tier, names) == Tally(0, Outcome.MISSING))
    assert load(tier, names, room(2)) == (Outcome.MISSING,) * 2


def test_all_keys_of_a_tier_share_a_cluster_slot(redis_server: EmbeddedValkey, connect: Connect) -> None:
    """They have one hash tag, so commands may name many of them."""
    put(connect(redis_server.address), keys(20), blocks(20))
    names = tell(redis_server, b"KEYS", b"lamina:*")
    assert isinstance(names, list)
    tags = {bytes(name).partition(b"{")[2].partition(b"}")[0] for name in names if isinstance(name, bytes)}
    assert len(names) == 20
    assert len(tags) == 1


# A full server


def test_a_server_that_evicts_costs_misses_and_nothing_else(redis_binary: Path, connect: Connect) -> None:
    """Three times of what fits: everything is stored, and what was evicted meanwhile is MISSING."""
    size = 512 * 1024
    with running_redis(redis_binary, 24 * 2**20) as server:
        tier = connect(server.address, block_bytes=size)
        names, values, into = keys(144), blocks(144, size), room(144, size)
        assert set(put(tier, names, values)) == {Outcome.OK}
        outcomes = load(tier, names, into)
        assert set(outcomes) == {Outcome.OK, Outcome.MISSING}
        assert all(a == b for outcome, a, b in zip(outcomes, into, values, strict=True) if outcome is Outcome.OK)
        usage = tier.usage()
        assert usage.limit == 24 * 2**20
        assert usage.bytes > 8 * 2**20


def test_a_server_that_does_not_evict_refuses(redis_binary: Path, connect: Connect) -> None:
    size = 512 * 1024
    with running_redis(redis_binary, 16 * 2**20) as server:
        tell(server, b"CONFIG", b"SET", b"maxmemory-policy", b"noeviction")
        tier = connect(server.address, block_bytes=size)
        names, values = keys(60), blocks(60, size)
        outcomes = put(tier, names, values)
        assert set(outcomes) == {Outcome.OK, Outcome.REFUSED}
        assert "OOM" in tier.trouble
        kept = [name for name, outcome in zip(names, outcomes, strict=True) if outcome is Outcome.OK]
        assert lookup(tier, kept) == Tally(len(kept), Outcome.OK)


# Who we are


def test_a_password_is_needed_where_there_is_one(redis_server: EmbeddedValkey, connect: Connect) -> None:
    """Without it, or with a wrong one, the tier is UNAVAILABLE and says why."""
    tell(redis_server, b"CONFIG", b"SET", b"requirepass", b"open sesame")
    names, values = keys(2), blocks(2)
    for wrong in (None, "shut"):
        tier = connect(replace(redis_server.address, password=wrong))
        assert put(tier, names, values) == (Outcome.UNAVAILABLE,) * 2
        assert lookup(tier, names).outcome is Outcome.UNAVAILABLE
        assert any(code in tier.trouble for code in ("NOAUTH", "WRONGPASS"))
    tier = connect(replace(redis_server.address, password="open sesame"))
    assert put(tier, names, values) == (Outcome.OK,) * 2


def test_a_user_with_the_rights_that_the_docs_name_is_enough(redis_server: EmbeddedValkey, connect: Connect) -> None:
    rights = b"+hello +ping +select +get +set +exists +unlink +info"
    tell(redis_server, b"ACL", b"SETUSER", b"kv", b"on", b">pw", b"~lamina:*", b"-@all", *rights.split())
    tier = connect(replace(redis_server.address, user="kv", password="pw"))
    names, into, values = keys(3), room(3), blocks(3)
    assert put(tier, names, values) == (Outcome.OK,) * 3
    assert load(tier, names, into) == (Outcome.OK,) * 3
    assert tier.delete(ids(names)).result(PATIENCE_S) == Tally(3, Outcome.OK)
    assert tier.usage().bytes > 0


def test_a_user_without_rights_is_unavailable_and_the_connection_stays(
    redis_server: EmbeddedValkey, connect: Connect
) -> None:
    tell(redis_server, b"ACL", b"SETUSER", b"ro", b"on", b">pw", b"~*", b"-@all", *b"+hello +ping +get".split())
    tier = connect(replace(redis_server.address, user="ro", password="pw"))
    assert put(tier, keys(4), blocks(4)) == (Outcome.UNAVAILABLE,) * 4
    assert load(tier, keys(4), room(4)) == (Outcome.MISSING,) * 4
    assert "NOPERM" in tier.trouble
    assert tier.plane.counters().lost == 0


def test_a_database_that_does_not_exist(redis_server: EmbeddedValkey, connect: Connect) -> None:
    tier = connect(replace(redis_server.address, database=7))
    assert lookup(tier, keys(1)).outcome is Outcome.UNAVAILABLE
    assert "refused SELECT" in tier.trouble


# TLS, through a proxy that speaks it: not every server can


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with cert.pem and key.pem for 127.0.0.1."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make a certificate with")
    folder = tmp_path_factory.mktemp("tls")
    options = "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=lamina -addext subjectAltName=IP:127.0.0.1"
    files = ["-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem")]
    subprocess.run(["openssl", *options.split(), *files], check=True, capture_output=True)
    return folder


def test_tls_is_verified_and_carries_blocks(shared_server: EmbeddedValkey, connect: Connect, certificate: Path) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate / "cert.pem", certificate / "key.pem")
    assert shared_server.address.path is not None
    with FaultProxy(shared_server.address.path, context) as proxy:
        url = f"rediss://127.0.0.1:{proxy.port}"
        stranger = connect(RedisAddress.parse(url))
        assert lookup(stranger, keys(1)).outcome is Outcome.UNAVAILABLE
        assert "certificate" in stranger.trouble
        size = 200_000
        tier = connect(RedisAddress.parse(f"{url}?ssl_ca_certs={certificate / 'cert.pem'}"), block_bytes=size)
        names, values, into = keys(12), blocks(12, size), room(12, size)
        assert put(tier, names, values) == (Outcome.OK,) * 12
        assert load(tier, names, into) == (Outcome.OK,) * 12
        assert into == values
        assert lookup(tier, [*names, *keys(1)]) == Tally(12, Outcome.MISSING)


# What others wrote under our keys


def _key_of(server: EmbeddedValkey, tier: RedisTier, block: bytes) -> bytes:
    found = tell(server, b"KEYS", b"*" + block.hex().encode())
    assert isinstance(found, list)
    (key,) = found
    assert isinstance(key, bytes)
    return key


@pytest.mark.parametrize(
    "damage", ["truncated", "longer", "much longer", "too long to read", "flipped", "header", "empty", "list"]
)
def test_a_damaged_value_is_corrupt_and_its_neighbours_are_not(
    redis_server: EmbeddedValkey, connect: Connect, damage: str
) -> None:
    tier = connect(redis_server.address)
    names, values, into = keys(9), blocks(9), room(9)
    put(tier, names, values)
    key = _key_of(redis_server, tier, names[4].id)
    stored = tell(redis_server, b"GET", key)
    assert isinstance(stored, bytes)
    flipped, header = bytearray(stored), bytearray(stored)
    flipped[HEADER_BYTES + 100] ^= 4
    header[60] ^= 4
    written = {
        "truncated": stored[:-1],
        "longer": stored + b"x",
        "much longer": stored * 40,
        "too long to read": bytes(6 * 2**20),
        "flipped": bytes(flipped),
        "header": bytes(header),
        "empty": b"",
    }
    tell(redis_server, b"DEL", key)
    tell(redis_server, b"RPUSH", key, b"x") if damage == "list" else tell(redis_server, b"SET", key, written[damage])
    expected = [Outcome.OK] * 4 + [Outcome.CORRUPT] + [Outcome.OK] * 4
    for _ in range(2):
        assert list(load(tier, names, into)) == expected
        assert into[:4] + into[5:] == values[:4] + values[5:]


def test_a_value_under_anothers_key_never_matches(redis_server: EmbeddedValkey, connect: Connect) -> None:
    tier = connect(redis_server.address)
    names = keys(2)
    put(tier, names, blocks(2))
    first, second = (_key_of(redis_server, tier, name.id) for name in names)
    tell(redis_server, b"RENAME", first, second)
    assert load(tier, names, room(2)) == (Outcome.MISSING, Outcome.CORRUPT)


# Nothing is left behind


def test_closing_leaves_no_thread_and_no_socket(shared_server: EmbeddedValkey) -> None:
    before = _open_files()
    tier = RedisTier(shared_server.address, BlockCodec(LAYOUT, BLOCK_BYTES), CONFIG, name="leak")
    names = keys(8)
    put(tier, names, blocks(8))
    lookup(tier, names)
    assert any(thread.name.startswith("lamina-leak") for thread in threading.enumerate())
    tier.close()
    assert not any(thread.name.startswith("lamina-leak") for thread in threading.enumerate())
    assert _open_files() <= before


def _open_files() -> int:
    return len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0


def _until(condition: Callable[[], bool], limit_s: float = 10.0) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.01)
