"""The LMCache tier keeps the contract of all tiers, on a real server, and ends when it is told to."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("lmcache", reason="lmcache is not installed; `make lmcache-check` runs these tests")

from fixtures.redis import redis_servers, running_redis, tell
from lamina.config import EngineConfig
from lamina.wiring.block_store import open_store
from lamina.wiring.valkey import EmbeddedValkey
from lamina_kvtier.block_codec import layout_digest
from lamina_kvtier.errors import InvalidQuota, QuotaNotCoverable
from lamina_kvtier.identity import Layout
from lamina_kvtier.lmcache_tier import LmcacheTier, LmcacheTierConfig
from lamina_kvtier.lmcache_wire import LmcacheNames
from lamina_kvtier.quota import Quota
from lamina_kvtier.redis_plane import Backoff, PlaneConfig, RedisAddress
from lamina_kvtier.tier import Outcome, StoreTier, Tally
from support.fault_proxy import FaultProxy, Faults
from support.tier_contract import (
    BLOCK_BYTES,
    LAYOUT,
    PATIENCE_S,
    MakeTier,
    TierContract,
    blocks,
    keys,
    load,
    lookup,
    put,
    room,
)

# Patient: the machine that runs tests is busy. What depends on deadlines sets its own.
CONFIG = LmcacheTierConfig(
    lookup_s=20, load_s=20, put_s=20, delete_s=20, plane=PlaneConfig(backoff=Backoff(first_s=0.02, limit_s=0.2))
)

Connect = Callable[..., LmcacheTier]


@pytest.fixture(scope="module")
def closing() -> Iterator[ThreadPoolExecutor]:
    """LMCache takes two seconds to close, waiting in its sleep: that is done beside the next tests."""
    with ThreadPoolExecutor(8) as pool:
        yield pool


@pytest.fixture
def connect(closing: ThreadPoolExecutor) -> Iterator[Connect]:
    """Makes tiers and closes them."""
    made: list[LmcacheTier] = []

    def make(
        address: RedisAddress,
        config: LmcacheTierConfig = CONFIG,
        *,
        layout: bytes = LAYOUT,
        block_bytes: int = BLOCK_BYTES,
        salt: str = "",
    ) -> LmcacheTier:
        made.append(LmcacheTier(address, LmcacheNames.of_layout(layout, salt), block_bytes, config))
        return made[-1]

    yield make
    for tier in made:
        closing.submit(tier.close)


class TestLmcacheTier(TierContract):
    @pytest.fixture
    def make_tier(self, any_redis: EmbeddedValkey, connect: Connect) -> MakeTier:
        def make(layout: bytes = LAYOUT, block_bytes: int = BLOCK_BYTES) -> StoreTier:
            return connect(any_redis.address, layout=layout, block_bytes=block_bytes)

        return make


# One tier, and what may happen to it


def test_a_block_named_twice_is_loaded_twice(any_redis: EmbeddedValkey, connect: Connect) -> None:
    tier = connect(any_redis.address)
    names, values, into = keys(2), blocks(2), room(5)
    assert put(tier, [*names, names[0]], [*values, values[0]]) == (Outcome.OK,) * 3
    order = [0, 1, 0, 1, 1]
    assert load(tier, [names[at] for at in order], into) == (Outcome.OK,) * 5
    assert into == [values[at] for at in order]


def test_more_than_the_slab_holds_passes_through_it(any_redis: EmbeddedValkey, connect: Connect) -> None:
    """Four blocks are the least that it has; a hundred go through, in both directions at once."""
    size = 40_000
    tier = connect(any_redis.address, replace(CONFIG, slab_bytes=1), block_bytes=size)
    names, values, into = keys(100), blocks(100, size), room(50, size)
    assert put(tier, names[:50], values[:50]) == (Outcome.OK,) * 50
    down = tier.put(names[50:], values[50:])
    assert load(tier, names[:50], into) == (Outcome.OK,) * 50
    assert down.result(PATIENCE_S) == (Outcome.OK,) * 50
    assert into == values[:50]


def test_a_salt_is_part_of_the_key(any_redis: EmbeddedValkey, connect: Connect) -> None:
    """Spelled as LMCache spells it."""
    red, blue = connect(any_redis.address, salt="red"), connect(any_redis.address, salt="blue")
    names = keys(1)
    put(red, names, blocks(1))
    assert lookup(blue, names) == Tally(0, Outcome.MISSING)
    key = f"lamina-kv1-{LAYOUT.hex()[:32]}@01000100@0@{names[0].id.hex()}@red"
    assert tell(any_redis, b"STRLEN", key.encode()) == BLOCK_BYTES


def test_blocks_expire(any_redis: EmbeddedValkey, connect: Connect) -> None:
    tier = connect(any_redis.address, replace(CONFIG, ttl_s=0.2))
    names = keys(2)
    assert put(tier, names, blocks(2)) == (Outcome.OK,) * 2
    _until(lambda: lookup(tier, names) == Tally(0, Outcome.MISSING))
    assert load(tier, names, room(2)) == (Outcome.MISSING,) * 2


@pytest.mark.parametrize("damage", ["shorter", "longer", "much longer", "empty", "list"])
def test_a_value_of_another_length_is_corrupt_and_its_neighbours_are_not(
    any_redis: EmbeddedValkey, connect: Connect, damage: str
) -> None:
    """The connection stays in step, or is made anew."""
    tier = connect(any_redis.address)
    names, values, into = keys(5), blocks(5), room(5)
    put(tier, names, values)
    key = LmcacheNames.of_layout(LAYOUT).key(names[2].id)
    tell(any_redis, b"DEL", key)
    written = {"shorter": BLOCK_BYTES - 1, "longer": BLOCK_BYTES + 1, "much longer": 6 << 20, "empty": 0}
    tell(any_redis, b"RPUSH", key, b"x") if damage == "list" else tell(any_redis, b"SET", key, bytes(written[damage]))
    ok = Outcome.OK
    for _ in range(2):
        assert load(tier, names, into) == (ok, ok, Outcome.CORRUPT, ok, ok)
        assert into[:2] + into[3:] == values[:2] + values[3:]


def test_a_full_server_refuses(connect: Connect) -> None:
    size = 512 * 1024
    with running_redis(next(iter(redis_servers().values())), 16 << 20) as server:
        tell(server, b"CONFIG", b"SET", b"maxmemory-policy", b"noeviction")
        tier = connect(server.address, block_bytes=size)
        names, values = keys(60), blocks(60, size)
        outcomes = put(tier, names, values)
        assert set(outcomes) == {Outcome.OK, Outcome.REFUSED}
        assert "OOM" in tier.trouble
        kept = [name for name, outcome in zip(names, outcomes, strict=True) if outcome is Outcome.OK]
        assert lookup(tier, kept) == Tally(len(kept), Outcome.OK)


# What it is asked for from above


def test_it_is_what_an_address_with_the_prefix_means(any_redis: EmbeddedValkey) -> None:
    """Under the layout's name, in a put and a load."""
    layout = Layout(layers=2, kv_heads=1, head_dim=8, dtype="float32", block_size=16, rope="none")
    config = EngineConfig(model=Path("m"), adapters=Path("adapters"), kv_store_url=f"lmcache+{any_redis.address}")
    tier = open_store(config, BLOCK_BYTES, layout)
    try:
        assert tier.name == "lmcache"
        names, values, into = keys(2), blocks(2), room(2)
        _until(lambda: put(tier, names, values) == (Outcome.OK,) * 2)
        _until(lambda: load(tier, names, into) == (Outcome.OK,) * 2)
        assert into == values
        key = LmcacheNames.of_layout(layout_digest(layout)).key(names[0].id)
        assert tell(any_redis, b"EXISTS", key) == 1
    finally:
        tier.close()


def test_promises_by_namespace_are_refused_rather_than_broken(any_redis: EmbeddedValkey, connect: Connect) -> None:
    tier = connect(any_redis.address)
    unlimited = 2**62
    tier.set_quotas({})
    tier.set_quotas({"a": Quota(0, unlimited)})
    with pytest.raises(QuotaNotCoverable):
        tier.set_quotas({"a": Quota(1, unlimited)})
    with pytest.raises(InvalidQuota, match="LMCache"):
        tier.set_quotas({"a": Quota(0, 1 << 30)})
    with pytest.raises(InvalidQuota, match="LMCache"):
        tier.set_quotas({}, capacity=1 << 30)
    assert tier.forget("a").result(PATIENCE_S) == Tally(0, Outcome.REFUSED)
    assert (tier.usage().coverable, tier.usage().keeps_quotas) == (0, False)


# A sick server

HASTE_S = 1.0
HASTY = LmcacheTierConfig(
    lookup_s=HASTE_S,
    load_s=HASTE_S,
    put_s=HASTE_S,
    delete_s=HASTE_S,
    plane=PlaneConfig(connect_s=0.5, backoff=Backoff(first_s=0.02, limit_s=0.2)),
)
SICK = {Outcome.UNAVAILABLE, Outcome.TIMEOUT}


@pytest.mark.parametrize("faults", [Faults(silent=True), Faults(refuse=True), Faults(cut_after=3000)], ids=repr)
def test_a_sick_server_is_an_outcome_in_time_and_it_recovers(
    any_redis: EmbeddedValkey, connect: Connect, faults: Faults
) -> None:
    """LMCache's own client would wait for ever, and not connect again."""
    assert any_redis.address.path is not None
    with FaultProxy(any_redis.address.path) as proxy:
        tier = connect(RedisAddress.parse(f"redis://127.0.0.1:{proxy.port}"), HASTY)
        names, values, into = keys(4), blocks(4), room(4)
        _until(lambda: put(tier, names, values) == (Outcome.OK,) * 4)
        proxy.faults = faults
        proxy.drop_all()
        for _ in range(3):
            assert set(put(tier, names, values)) <= SICK | {Outcome.OK}
            assert set(load(tier, names, into)) <= SICK | {Outcome.OK}
            assert lookup(tier, names).outcome in SICK | {Outcome.OK}
        proxy.faults = Faults()
        proxy.drop_all()
        _until(lambda: put(tier, names, values) == (Outcome.OK,) * 4)
        _until(lambda: load(tier, names, into) == (Outcome.OK,) * 4)
        assert into == values


def test_a_server_that_is_not_there(connect: Connect, tmp_path: Path) -> None:
    tier = connect(RedisAddress(path=str(tmp_path / "nobody.sock")), HASTY)
    names = keys(3)
    assert set(put(tier, names, blocks(3))) <= SICK
    assert set(load(tier, names, room(3))) <= SICK
    assert lookup(tier, names).outcome in SICK
    assert tier.trouble


def test_killed_and_started_again(connect: Connect) -> None:
    with running_redis(next(iter(redis_servers().values()))) as server:
        tier = connect(server.address, HASTY)
        names, values, into = keys(4), blocks(4), room(4)
        _until(lambda: put(tier, names, values) == (Outcome.OK,) * 4)
        assert server.pid is not None
        os.kill(server.pid, signal.SIGKILL)
        for _ in range(3):
            assert set(load(tier, names, into)) <= SICK | {Outcome.MISSING}
        _until(lambda: put(tier, names, values) == (Outcome.OK,) * 4)  # the server is supervised
        _until(lambda: load(tier, names, into) == (Outcome.OK,) * 4)
        assert into == values


# Nothing is left behind


def test_closing_leaves_no_thread_and_no_shared_memory(any_redis: EmbeddedValkey) -> None:
    before, shared = set(threading.enumerate()), _shared_memory()
    tier = LmcacheTier(any_redis.address, LmcacheNames.of_layout(LAYOUT), BLOCK_BYTES, CONFIG)
    names = keys(8)
    put(tier, names, blocks(8))
    load(tier, names, room(8))
    assert _shared_memory() <= shared  # so a killed process leaves none either
    tier.close()
    assert {thread.name for thread in threading.enumerate() if thread not in before and thread.is_alive()} == set()


def test_the_interpreter_ends_with_an_open_tier(any_redis: EmbeddedValkey) -> None:
    """Whoever forgets to close it is not kept from leaving; and LMCache told nobody about us."""
    program = f"""
import os
from lamina_kvtier.lmcache_tier import LmcacheTier
from lamina_kvtier.lmcache_wire import LmcacheNames
from lamina_kvtier.redis_plane import RedisAddress
from lamina_kvtier.tier import BlockKey
tier = LmcacheTier(RedisAddress(path={any_redis.address.path!r}), LmcacheNames("m"), 100)
print(tier.put([BlockKey(bytes(32), "t")], [memoryview(bytes(100))]).result(), os.environ["LMCACHE_TRACK_USAGE"])
"""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("LMCACHE", "DO_NOT"))}
    ended = subprocess.run([sys.executable, "-c", program], env=clean, capture_output=True, text=True, timeout=180)
    assert ended.returncode == 0, ended.stderr
    assert "Outcome.OK" in ended.stdout
    assert "false" in ended.stdout


def _shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()


def _until(condition: Callable[[], bool], limit_s: float = 60.0) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.01)
