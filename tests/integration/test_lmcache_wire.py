"""LMCache's blocks on a real server, without LMCache: what stands there is what its own clients would write."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from fixtures.redis import running_redis, tell
from lamina.wiring.valkey import EmbeddedValkey
from lamina_kvtier.lmcache_wire import LmcacheNames, LmcacheWire
from lamina_kvtier.redis_plane import RedisAddress
from lamina_kvtier.tier import Outcome, Tally

SIZE = 3000
PATIENCE_S = 30.0
NAMES = LmcacheNames("model", salt="red")


@pytest.fixture(scope="module")
def server(redis_binary: Path) -> Iterator[EmbeddedValkey]:
    with running_redis(redis_binary) as running:
        yield running


@pytest.fixture
def wire(server: EmbeddedValkey) -> Iterator[LmcacheWire]:
    wire = LmcacheWire(server.address, NAMES, SIZE)
    yield wire
    wire.close()


def store(wire: LmcacheWire, ids: Sequence[bytes], values: Sequence[bytes]) -> list[Outcome]:
    told: list[Outcome] = []
    blocks = [(block, memoryview(value)) for block, value in zip(ids, values, strict=True)]
    wire.store(blocks, time.monotonic() + PATIENCE_S, told.extend).result(PATIENCE_S)
    return told


def fetch(wire: LmcacheWire, ids: Sequence[bytes]) -> tuple[list[Outcome], list[bytearray]]:
    told: list[Outcome] = []
    into = [bytearray(SIZE) for _ in ids]
    blocks = [(block, memoryview(place)) for block, place in zip(ids, into, strict=True)]
    wire.fetch(blocks, time.monotonic() + PATIENCE_S, told.extend).result(PATIENCE_S)
    return told, into


def test_a_value_is_the_block_and_nothing_else(server: EmbeddedValkey, wire: LmcacheWire) -> None:
    ids, values = [os.urandom(32) for _ in range(3)], [os.urandom(SIZE) for _ in range(3)]
    assert store(wire, ids, values) == [Outcome.OK] * 3
    assert [tell(server, b"GET", NAMES.key(block)) for block in ids] == values
    assert fetch(wire, ids) == ([Outcome.OK] * 3, [bytearray(value) for value in values])


def test_outcomes_are_by_block(server: EmbeddedValkey, wire: LmcacheWire) -> None:
    """Missing, of another length, no string at all: none of them spoils its neighbours, nor the connection."""
    ids, values = [os.urandom(32) for _ in range(6)], [os.urandom(SIZE) for _ in range(6)]
    store(wire, [*ids[:1], *ids[3:]], [*values[:1], *values[3:]])
    tell(server, b"SET", NAMES.key(ids[2]), bytes(SIZE - 1))
    tell(server, b"DEL", NAMES.key(ids[3]))
    tell(server, b"RPUSH", NAMES.key(ids[3]), b"x")
    told, into = fetch(wire, ids)
    expected = [Outcome.OK, Outcome.MISSING, Outcome.CORRUPT, Outcome.CORRUPT, Outcome.OK, Outcome.OK]
    assert told == expected
    assert [bytes(into[at]) for at in (0, 4, 5)] == [values[at] for at in (0, 4, 5)]


@pytest.mark.parametrize("count", [1, 200])
def test_looking_up_and_deleting(wire: LmcacheWire, count: int) -> None:
    ids = [os.urandom(32) for _ in range(count)]
    store(wire, ids, [bytes(SIZE)] * count)
    assert wire.lookup(ids, PATIENCE_S).result() == Tally(count, Outcome.OK)
    assert wire.lookup([*ids, os.urandom(32)], PATIENCE_S).result() == Tally(count, Outcome.MISSING)
    assert wire.delete(ids, PATIENCE_S).result() == Tally(count, Outcome.OK)
    assert wire.lookup(ids, PATIENCE_S).result() == Tally(0, Outcome.MISSING)
    assert wire.lookup([], PATIENCE_S).result() == wire.delete([], PATIENCE_S).result() == Tally(0, Outcome.OK)


def test_a_block_that_is_used_lives_on(server: EmbeddedValkey) -> None:
    """Its time to live starts anew with each load, not with a look-up."""
    wire = LmcacheWire(server.address, NAMES, SIZE, ttl_s=1000)
    try:
        block = os.urandom(32)
        store(wire, [block], [bytes(SIZE)])
        tell(server, b"PEXPIRE", NAMES.key(block), b"500000")
        assert wire.lookup([block], PATIENCE_S).result() == Tally(1, Outcome.OK)
        assert _lives_ms(server, block) <= 500_000
        fetch(wire, [block])
        end = time.monotonic() + PATIENCE_S
        while _lives_ms(server, block) <= 500_000:
            assert time.monotonic() < end
            time.sleep(0.01)
    finally:
        wire.close()


def _lives_ms(server: EmbeddedValkey, block: bytes) -> int:
    answer = tell(server, b"PTTL", NAMES.key(block))
    assert isinstance(answer, int)
    return answer


def test_the_servers_memory(wire: LmcacheWire) -> None:
    used, limit = wire.memory(PATIENCE_S)
    assert used > 0
    assert limit == 64 << 20
    assert wire.memory(PATIENCE_S) == (used, limit)  # asked once a second


def test_the_rights_that_the_docs_name_are_enough(redis_server: EmbeddedValkey) -> None:
    rights = b"+hello +ping +select +get +set +exists +unlink +info +pexpire"
    tell(redis_server, b"ACL", b"SETUSER", b"kv", b"on", b">pw", b"~lamina-kv1-*", b"-@all", *rights.split())
    address = replace(redis_server.address, user="kv", password="pw")
    wire = LmcacheWire(address, LmcacheNames.of_layout(bytes(32)), SIZE, ttl_s=1000)
    try:
        ids, values = [os.urandom(32)], [os.urandom(SIZE)]
        assert store(wire, ids, values) == [Outcome.OK]
        assert fetch(wire, ids)[0] == [Outcome.OK]
        assert wire.lookup(ids, PATIENCE_S).result() == Tally(1, Outcome.OK)
        assert wire.delete(ids, PATIENCE_S).result() == Tally(1, Outcome.OK)
        assert wire.memory(PATIENCE_S)[0] > 0
        assert wire.trouble == ""
    finally:
        wire.close()


def test_without_a_server(tmp_path: Path) -> None:
    wire = LmcacheWire(RedisAddress(path=str(tmp_path / "nobody.sock")), NAMES, SIZE)
    try:
        sick = {Outcome.UNAVAILABLE, Outcome.TIMEOUT}
        told: list[Outcome] = []
        wire.store([(bytes(32), memoryview(bytes(SIZE)))], time.monotonic() + 0.5, told.extend).result(PATIENCE_S)
        assert set(told) <= sick
        assert wire.lookup([bytes(32)], 0.5).result().outcome in sick
        assert wire.memory(0.5) == (0, None)
        assert "cannot connect" in wire.trouble
    finally:
        wire.close()
