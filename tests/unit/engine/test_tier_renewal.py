"""What the store lost, or did not take, is put again from host memory: for a reason, in order, and within bounds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from fixtures.engines import drive, request, tiny_core
from lamina.engine.core import EngineCore
from lamina.engine.store_memory import StoreMemory
from lamina.engine.tier_puts import Puts
from lamina.types import PinOrder, PinRecord, QuotaPolicy, TierQuota
from lamina_kernels.gpu.block_mover import HostBlocks
from lamina_kvtier.block_codec import BlockCodec
from lamina_kvtier.host_tier import HostTier
from lamina_kvtier.manager import KvManager
from lamina_kvtier.memory_tier import MemoryStore, MemoryTier, Steps, at_once
from lamina_kvtier.operations import Ended
from lamina_kvtier.reasons import Reason
from lamina_kvtier.tier import BlockKey, Operation, Outcome, Tally
from support.below import Below
from support.fixed_rates import HandClock

BYTES = 64


class Weak(MemoryTier):
    """A store that may be away, and remembers the order of puts."""

    away = False

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.tried: list[bytes] = []

    def put(self, keys: Sequence[BlockKey], values: Sequence[memoryview]) -> Operation[tuple[Outcome, ...]]:
        self.tried += [key.id for key in keys]
        return Ended((Outcome.UNAVAILABLE,) * len(keys)) if self.away else super().put(keys, values)

    def lookup(self, ids: Sequence[bytes]) -> Operation[Tally]:
        return Ended(Tally(0, Outcome.UNAVAILABLE)) if self.away else super().lookup(ids)


class Bench:
    """Host memory over a store, and hours in no time."""

    def __init__(self, *, slots: int = 100, limit: int | None = None, steps: Steps | None = None) -> None:
        self.clock, self.store, self.counts = HandClock(), MemoryStore(limit=limit), Counter[str]()
        self.codec = BlockCodec(bytes(32), BYTES)
        self.tier = Weak(self.store, self.codec, run=at_once if steps is None else steps)
        self.host, self.memory = HostTier(slots, BYTES), StoreMemory(clock=self.clock)
        arena = HostBlocks(slots, BYTES, pin=False)
        self.puts = Puts(KvManager(10), self.host, arena, self.tier, self.counts, self.memory, self.clock)

    def arrive(self, first: int, count: int, namespace: str = "a") -> list[bytes]:
        keys = [BlockKey(number.to_bytes(32, "big"), namespace) for number in range(first, first + count)]
        self.host.commit([given for given in self.host.reserve(keys) if given is not None])
        self.puts.want(keys)
        return [key.id for key in keys]

    def use(self, ids: Sequence[bytes]) -> None:
        slots = self.host.find(ids)
        self.host.hold(slots)
        self.host.release(slots)

    def pass_time(self, seconds: float, *, steps: int = 10) -> None:
        for _ in range(steps):
            self.clock.now += seconds / steps
            self.puts.settle()

    def flush(self) -> None:
        for identity in list(self.store._values):
            self.store.delete(identity)

    def stored(self, ids: Sequence[bytes]) -> int:
        return sum(self.store.has(identity) for identity in ids)


def test_a_store_that_came_back_empty_is_filled_again_the_last_used_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """FLUSHALL, or a server that was killed while nobody looked: heads before tails, and pinned blocks, too."""
    monkeypatch.setattr("lamina.engine.tier_puts._PUT_BYTES", 2 * BYTES)
    bench = Bench()
    tables = [bench.arrive(10 * at, 4) for at in range(3)]
    bench.pass_time(1)
    for at in (2, 0, 1):
        bench.use(tables[at])
    kept = bench.arrive(50, 2)
    bench.host.pin(kept, "a")
    bench.pass_time(1)
    assert bench.stored(sum(tables, kept)) == 14
    bench.flush()
    bench.tier.tried.clear()
    bench.pass_time(5)
    assert bench.tier.tried == [*tables[1], *tables[0], *tables[2], *kept]
    assert bench.stored(sum(tables, kept)) == 14
    bench.pass_time(3600, steps=1000)
    assert len(bench.tier.tried) == 14
    assert bench.host.usage().held == 0
    bench.host.check_integrity()


def test_the_next_victims_are_the_same_after_a_renewal() -> None:
    bench = Bench()
    ids = bench.arrive(0, 6) + bench.arrive(10, 3)
    bench.pass_time(1)
    bench.use(ids[:6])
    before = [key.id for _, key in bench.host.next_victims(9)]
    bench.flush()
    bench.pass_time(5)
    assert bench.stored(ids) == 9
    assert [key.id for _, key in bench.host.next_victims(9)] == before


def test_what_a_store_did_not_take_while_it_was_away_is_put_later() -> None:
    """And not over and over meanwhile."""
    bench = Bench()
    bench.tier.away = True
    ids = bench.arrive(0, 8)
    bench.pass_time(600, steps=3000)
    assert 8 < len(bench.tier.tried) <= 8 * (600 / 16 + 5)
    bench.tier.away = False
    bench.pass_time(20)
    assert bench.stored(ids) == 8
    assert bench.counts["failed"] == len(bench.tier.tried) - 8
    tried = len(bench.tier.tried)
    bench.pass_time(600, steps=300)
    assert len(bench.tier.tried) == tried


def test_a_store_that_went_away_and_came_back_empty_is_filled_again() -> None:
    bench = Bench()
    ids = bench.arrive(0, 8)
    bench.pass_time(1)
    bench.tier.away = True
    later = bench.arrive(20, 2)
    bench.pass_time(60)
    bench.flush()
    bench.tier.away = False
    bench.pass_time(30, steps=30)
    assert bench.stored(ids + later) == 10


def test_a_single_block_that_the_server_evicted_comes_alone() -> None:
    bench = Bench(slots=8)
    ids = bench.arrive(0, 8)
    bench.pass_time(1)
    bench.store.delete(ids[3])
    bench.tier.tried.clear()
    bench.pass_time(60, steps=60)
    assert bench.tier.tried == [ids[3]]


def test_what_a_request_misses_is_a_reason_to_look_at_once() -> None:
    bench = Bench()
    ids = bench.arrive(0, 8)
    bench.pass_time(0.1)
    bench.flush()
    bench.memory.missed(ids[:1])
    bench.pass_time(0)
    assert bench.stored(ids) == 8


def test_it_is_busy_until_all_of_host_memory_was_looked_at() -> None:
    """So that an engine without requests, which looks rarely, does not take hours for that."""
    bench = Bench(slots=1000)
    bench.tier.away = True
    late = bench.arrive(0, 4)
    bench.pass_time(0, steps=2)
    bench.tier.away = False
    bench.arrive(10, 996)
    bench.pass_time(0, steps=2)
    assert not bench.puts.is_busy
    bench.clock.now += 1.5
    bench.puts.settle()
    assert bench.stored(late) == 0
    while bench.puts.is_busy:
        bench.puts.settle()
    assert bench.stored(late) == 4


def test_what_was_refused_for_a_quota_is_no_failure() -> None:
    bench = Bench(limit=1)
    bench.arrive(0, 8)
    bench.pass_time(600, steps=300)
    assert len(bench.tier.tried) == 8


def test_a_store_that_is_too_small_is_not_filled_over_and_over() -> None:
    """It can hold a quarter of host memory: what has no room is tried ever more rarely."""
    bench = Bench(limit=25 * (BYTES + 200), slots=100)
    bench.arrive(0, 100)
    bench.pass_time(3600, steps=3600)
    assert len(bench.tier.tried) <= 100 * 16


def test_new_blocks_go_before_old_ones_and_little_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lamina.engine.tier_puts._PUT_BYTES", 4 * BYTES)
    monkeypatch.setattr("lamina.engine.tier_puts._MAX_PUT_BYTES", 32 * BYTES)
    steps = Steps()
    bench = Bench(steps=steps)
    old = bench.arrive(0, 40)
    for _ in range(10):
        bench.puts.settle()
        steps.run()
    bench.puts.settle()
    assert bench.stored(old) == 40
    bench.flush()
    bench.tier.tried.clear()
    bench.pass_time(3, steps=1)
    steps.run()
    bench.puts.settle()
    assert bench.host.usage().held == 8  # a quarter of what may be under way
    new = bench.arrive(60, 20, "b")
    bench.puts.settle()
    assert bench.tier.tried[8:] == new
    for _ in range(20):
        steps.run()
        bench.puts.settle()
    assert bench.stored(old + new) == 60


# In an engine

SMALL: dict[str, Any] = {"num_blocks": 14, "max_batch_tokens": 64}


def prompt(seed: int, blocks: int = 4) -> list[int]:
    return [(7 * at + seed) % 200 + 3 for at in range(16 * blocks)]


def ask(core: EngineCore, token_ids: list[int]) -> int:
    before = core.stats().prefix_hit_tokens
    drive(core, [request("probe", [*token_ids, 5], max_tokens=4)])
    return core.stats().prefix_hit_tokens - before


def test_another_replica_finds_a_prefix_after_the_store_lost_it(tmp_path: Path) -> None:
    """Nobody asks the first engine for that prefix again; it only has to have something to do."""
    clock, store = HandClock(), MemoryStore()
    below = Below(store=store)
    below.clock = clock
    first = tiny_core(tmp_path, tiers=below, **SMALL)
    for seed in range(6):
        ask(first, prompt(seed))
    for identity in list(store._values):
        store.delete(identity)
    second = tiny_core(tmp_path, tiers=below, **SMALL)
    assert ask(second, prompt(1)) == 0
    second.close()
    for seed in range(3):
        clock.now += 5
        ask(first, prompt(50 + seed, 1))
    third = tiny_core(tmp_path, tiers=below, **SMALL)
    assert ask(third, prompt(0)) == 64
    assert third.stats().loaded_blocks == 4
    for core in (first, third):
        core.check_integrity()
        core.close()


def test_what_only_the_device_has_comes_back_when_the_store_lost_it(tmp_path: Path) -> None:
    """Host memory had given it up, since the store had it; on the device it is no victim while somebody uses it."""
    clock, store = HandClock(), MemoryStore()
    below = Below(store=store, host=6)
    below.clock = clock
    core = tiny_core(tmp_path, tiers=below, **SMALL)
    ask(core, prompt(0))
    ask(core, prompt(30, 6))
    core.submit(request("long", [*prompt(0), 7], max_tokens=100))
    for _ in range(6):
        core.step()
    [choice] = core.scheduler.running
    ids = choice.known_ids(16)
    assert sum(map(store.has, ids)) == 4
    core._tiers._host.forget(ids, Reason.PRESSURE)  # type: ignore[attr-defined]
    for identity in list(store._values):
        store.delete(identity)
    for _ in range(8):
        clock.now += 3
        core.step()
    assert sum(map(store.has, ids)) == 4
    core.check_integrity()
    core.close()


@pytest.mark.parametrize("shared", [True, False], ids=["host memory is a tier", "a store alone"])
def test_a_pin_on_the_device_comes_back_from_the_store(tmp_path: Path, shared: bool) -> None:
    """Its blocks never leave the device, and are saved all the same: once, and again if the store loses them."""
    clock, store = HandClock(), MemoryStore()
    below = Below(store=store, shared=shared)
    below.clock = clock
    policy = QuotaPolicy(namespace="t", gpu=TierQuota(reserved=6, pin_limit=6))
    order = PinOrder(namespace="t", token_ids=tuple(prompt(1)), floor="gpu", ttl_s=1000.0)
    first = tiny_core(tmp_path, tiers=below, **SMALL)
    first.commons.set_quotas([policy])
    answer = first.commons.pin(order)
    assert answer.pin is not None
    assert ask(first, prompt(1)) == 0
    ids = first.commons._pins.listing()[0].ids
    drive(first, [request("next", [5, 6], max_tokens=4)])
    assert sum(map(store.has, ids)) == 4
    spilled = first.stats().spilled_blocks
    assert spilled == 4
    for identity in ids:
        store.delete(identity)
    for number in range(3):
        clock.now += 5
        drive(first, [request(f"again{number}", [5, 6], max_tokens=4)])
    assert sum(map(store.has, ids)) == 4
    assert first.stats().spilled_blocks == spilled
    first.close()
    second = tiny_core(tmp_path, tiers=below, **SMALL)
    second.commons.set_quotas([policy])
    pin = answer.pin
    second.commons.restore(
        [PinRecord(pin_id=pin.pin_id, order=order, created_at=pin.created_at, expires_at=pin.expires_at)]
    )
    assert ask(second, prompt(1)) == 64
    assert second.commons.report().pins[0].resident_blocks == 4
    second.check_integrity()
    second.close()
