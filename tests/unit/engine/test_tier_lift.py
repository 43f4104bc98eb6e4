"""Pieces of prefixes on their way up: in fair turns, each block loaded once, and every outcome told with its reason."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from lamina.engine.tier_lift import Lift, LiftPaths
from lamina.engine.tier_rates import Rates
from lamina_kernels.gpu.block_mover import BlockMover, HostBlocks
from lamina_kernels.oracles import blocks as plain_kernels
from lamina_kvtier import KvManager
from lamina_kvtier.block_codec import BlockCodec
from lamina_kvtier.host_tier import HostTier
from lamina_kvtier.identity import BlockId
from lamina_kvtier.memory_tier import MemoryStore, MemoryTier, Steps
from lamina_kvtier.reasons import Reason
from lamina_kvtier.tier import BlockKey
from support.below import COSTS
from support.fixed_rates import HandClock

BYTES = 64


class Bench:
    """A store that has blocks 0 ... 199, each full of its number; what is asked of it waits for `steps.run()`."""

    def __init__(self, *, slots: int = 100, blocks: int = 100) -> None:
        self.restored: list[int] = []
        self.store, self.steps, self.clock = MemoryStore(), Steps(), HandClock()
        codec = BlockCodec(bytes(32), BYTES)
        kept = MemoryTier(self.store, codec)
        kept.put([key(at) for at in range(200)], [memoryview(bytearray([at]) * BYTES) for at in range(200)])
        self.kv, self.host = KvManager(blocks), HostTier(slots, BYTES)
        self.arena, self.pool = HostBlocks(slots, BYTES, pin=False), torch.zeros(blocks, BYTES, dtype=torch.uint8)
        self.paths = LiftPaths(
            self.kv,
            self.host,
            self.arena,
            BlockMover(self.pool, self.arena, costs=COSTS, kernels=plain_kernels),
            MemoryTier(self.store, codec, run=self.steps),
            Counter[str](),
            Rates(16, clock=self.clock),
            self.clock,
        )

    def lift(self, first: int, count: int = 1, tenant: str = "a") -> Lift:
        keys = [key(at) for at in range(first, first + count)]
        lift = Lift(self.paths, keys, tenant, 1.0, self.kv.allocate, self.restored.append)
        lift.begin()
        return lift

    def turn(self, lifts: list[Lift], spilling: frozenset[int] = frozenset()) -> None:
        """What one step does, with all copies done."""
        for lift in lifts:
            lift.advance()
        self.paths.start_waiting(spilling, copying=True)
        for lift in lifts:
            if lift.transfer is not None:
                lift.transfer.wait()
            lift.advance()

    def bytes_at(self, identity: BlockId) -> int:
        (block,) = self.kv.acquire([identity])
        self.kv.release([block])
        return int(self.pool[block].unique())


def key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(32, "big"), "tenant")


def test_a_flood_of_one_tenant_does_not_hold_up_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a hundred loads waiting, another tenant's single one is the next but one."""
    monkeypatch.setattr("lamina.engine.tier_lift._MAX_LOAD_BYTES", BYTES)
    bench = Bench()
    flood = [bench.lift(at) for at in range(100)]
    bench.turn(flood)
    mine = bench.lift(150, tenant="b")
    for _ in range(2):
        bench.steps.run()
        bench.turn([*flood, mine])
    bench.steps.run()
    bench.turn([*flood, mine])
    assert mine.is_done
    assert sum(lift.is_done for lift in flood) <= 3
    assert bench.bytes_at(key(150).id) == 150


def test_blocks_that_two_want_are_loaded_once() -> None:
    bench = Bench()
    lifts = [bench.lift(0, 4), bench.lift(0, 4, tenant="b")]
    bench.turn(lifts)
    assert len(bench.steps.waiting) == 1
    bench.steps.run()
    for _ in range(3):
        bench.turn(lifts)
    assert all(lift.is_done for lift in lifts)
    assert bench.paths.counts["loaded"] == 4
    assert [set(lift.origins.values()) for lift in lifts] == [{"store"}, {"host"}]
    assert bench.bytes_at(key(3).id) == 3
    for lift in lifts:
        lift.let_go([key(at).id for at in range(4)])
    bench.kv.check_integrity([])
    bench.host.check_integrity()


def test_what_is_missing_or_damaged_is_told() -> None:
    """The blocks before it are used; none behind it are."""
    bench = Bench()
    bench.store.tamper(key(2).id, lambda value: value[:-1] + bytes([value[-1] ^ 1]))
    lift = bench.lift(0, 5)
    bench.turn([lift])
    bench.steps.run()
    bench.turn([lift])
    bench.turn([lift])
    assert lift.is_done
    assert set(lift.origins) == {key(0).id, key(1).id}
    assert lift.fates == {key(2).id: Reason.INTEGRITY}
    assert (bench.paths.counts["loaded"], bench.paths.counts["failed"]) == (2, 1)
    assert bench.host.usage().writing == 0


def test_no_room_below_or_above_is_no_error() -> None:
    bench = Bench(slots=3, blocks=2)
    lift = bench.lift(0, 5)
    bench.turn([lift])
    bench.steps.run()
    bench.turn([lift])
    bench.turn([lift])
    assert lift.is_done
    assert lift.fates == {key(3).id: Reason.PRESSURE, key(4).id: Reason.PRESSURE}
    assert len(lift.here) == 2
    assert bench.host.usage().held == 0


def test_blocks_that_are_being_read_are_not_overwritten() -> None:
    bench = Bench(blocks=2)
    lift = bench.lift(0, 2)
    bench.turn([lift])
    bench.steps.run()
    for _ in range(3):
        bench.turn([lift], spilling=frozenset({1}))
    assert not lift.is_done
    assert len(lift.held) == 2
    bench.turn([lift])
    assert lift.is_done
    assert lift.here


@pytest.mark.parametrize("when", ["waiting", "loading", "loaded"])
def test_a_lift_may_be_stopped_at_any_time(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lamina.engine.tier_lift._MAX_LOAD_BYTES", BYTES)
    bench = Bench()
    first, lift = bench.lift(50), bench.lift(0)
    if when != "waiting":
        bench.turn([first, lift])
        bench.steps.run()
        bench.turn([first, lift])
    if when == "loaded":
        bench.steps.run()
    lift.cancel()
    for _ in range(4):
        bench.steps.run()
        bench.turn([first, lift])
    assert lift.is_done
    assert not lift.here
    assert first.is_done
    first.let_go([key(50).id])
    assert bench.paths.loads.moving == bench.paths.copies.moving == 0
    usage = bench.host.usage()
    assert (usage.held, usage.writing) == (0, 0)
    bench.kv.check_integrity([])


def test_a_block_that_host_memory_has_behind_a_gap_leaks_no_slot() -> None:
    """It ends what is loaded in one go; the slots behind it are given back, and what was there is used after all."""
    bench = Bench()
    given = bench.host.reserve([key(1)])
    reserved = [reservation for reservation in given if reservation is not None]
    bench.arena.bytes_of(reserved[0].slot)[:] = bytes([1]) * BYTES
    bench.host.commit(reserved)
    lift = bench.lift(0, 4)
    for _ in range(3):
        bench.turn([lift])
        bench.steps.run()
    assert lift.is_done
    assert list(lift.origins.values()) == ["store", "host"]
    assert lift.fates == {}
    assert bench.host.usage().writing == 0
    again = bench.lift(0, 4, tenant="b")
    for _ in range(3):
        bench.turn([lift, again])
        bench.steps.run()
    assert len(again.origins) == 4
    assert [bench.bytes_at(key(at).id) for at in range(4)] == [0, 1, 2, 3]
    bench.host.check_integrity()


def test_who_waits_for_another_ones_load_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tenants wait for a block that somebody is writing, as much as may move at a time; a third one loads."""
    monkeypatch.setattr("lamina.engine.tier_lift._MAX_LOAD_BYTES", 2 * BYTES)
    bench = Bench()
    assert bench.host.reserve([key(2)]) != [None]
    waiting = [bench.lift(2, tenant=tenant) for tenant in "ab"]
    others: list[Lift] = []
    for at in range(5):
        others.append(bench.lift(50 + at, tenant="c"))
        for _ in range(3):
            bench.turn([*waiting, *others])
            bench.steps.run()
    assert all(lift.is_done for lift in others)
    assert not any(lift.is_done for lift in waiting)


def test_device_blocks_that_are_still_read_are_kept_and_not_asked_for_twice() -> None:
    bench = Bench(blocks=4)
    lift = bench.lift(0, 2)
    bench.turn([lift])
    bench.steps.run()
    bench.turn([lift], spilling=frozenset(range(4)))
    first = lift.held
    bench.turn([lift], spilling=frozenset(range(4)))
    assert lift.held == first
    assert len(first) == 2
    assert bench.restored in ([], [0])
    bench.turn([lift])
    assert list(lift.here.values()) == first


def test_a_lift_that_ends_early_gives_its_device_blocks_back() -> None:
    bench = Bench(blocks=4)
    lift = bench.lift(0, 2)
    bench.turn([lift])
    bench.steps.run()
    bench.turn([lift], spilling=frozenset(range(4)))
    lift.cancel()
    assert lift.is_done
    assert bench.restored[-1] == 2
    assert bench.kv.usage().free == 4
    bench.kv.check_integrity([])
    bench.host.check_integrity()
