"""Blocks are saved before they go, whoever makes them go; looking for them costs nothing while nothing moves."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from lamina.engine.tier_puts import Puts
from lamina.engine.tier_spill import Spills
from lamina_kernels.gpu.block_mover import BlockMover, HostBlocks
from lamina_kernels.oracles import blocks as plain_kernels
from lamina_kvtier import KvManager, Quota, QuotaBook
from lamina_kvtier.block_codec import BlockCodec
from lamina_kvtier.host_tier import HostTier
from lamina_kvtier.memory_tier import MemoryStore, MemoryTier, Steps
from lamina_kvtier.tier import BlockKey
from support.below import COSTS

BYTES = 64


class Bench:
    """A pool of blocks, host memory below it, and a count of the looks for victims."""

    def __init__(
        self, blocks: int, *, low_water: int, slots: int = 200, quotas: dict[str, Quota] | None = None
    ) -> None:
        book = QuotaBook(blocks)
        self.kv, self.host, self.counts = KvManager(blocks, quotas=book), HostTier(slots, BYTES), Counter[str]()
        if quotas is not None:
            book.load(quotas)
        self.pool = torch.arange(blocks, dtype=torch.uint8)[:, None].repeat(1, BYTES)
        self.arena = HostBlocks(slots, BYTES, pin=False)
        self.puts = Puts(self.kv, self.host, self.arena, None, self.counts)
        mover = BlockMover(self.pool, self.arena, costs=COSTS, kernels=plain_kernels)
        self.spills = Spills(self.kv, self.host, mover, self.puts, self.counts, low_water=low_water)
        self.looks = 0
        self.made = 0
        self._next_victims = self.kv.next_victims
        self.kv.next_victims = self._look  # type: ignore[method-assign]

    def _look(self, count: int) -> list[tuple[int, bytes]]:
        self.looks += 1
        return self._next_victims(count)

    def use(self, count: int, owner: str = "a") -> list[bytes]:
        """A request comes, computes blocks and goes, with a step after each; returns what a look-up would find."""
        blocks = self.kv.allocate(count, owner=owner)
        ids = [(self.made + at).to_bytes(32, "big") for at in range(count)]
        self.made += count
        for block, identity in zip(blocks, ids, strict=True):
            self.kv.publish(block, identity)
        self.kv.release(blocks)
        self.step()
        return ids

    def step(self) -> None:
        self.spills.after_step()
        while self.spills.reading:
            self.spills.settle()

    def known(self, ids: list[bytes]) -> int:
        return sum(self.kv.match([identity]) or len(self.host.find([identity])) for identity in ids)


def test_nothing_is_lost_as_long_as_steps_take_no_more_than_was_said() -> None:
    """Whatever leaves the pool is in host memory by then."""
    bench = Bench(40, low_water=8)
    ids: list[bytes] = []
    for _ in range(30):
        ids += bench.use(5)
        assert bench.known(ids) == len(ids)
    assert bench.counts["spilled"] >= len(ids) - 40


def test_a_tenant_near_its_limit_loses_nothing_although_much_is_free() -> None:
    bench = Bench(100, low_water=8, quotas={"a": Quota(0, 20)})
    ids: list[bytes] = []
    for _ in range(20):
        ids += bench.use(4)
        assert bench.known(ids) == len(ids)
    assert bench.kv.usage().free >= 80


@pytest.mark.parametrize("blocks", [200, 2000])
def test_a_step_that_allocates_nothing_looks_for_nothing(blocks: int) -> None:
    """A full pool, all of whose next victims are saved: looks come by blocks that change hands, not by steps."""
    bench = Bench(blocks, low_water=16, slots=blocks)
    while bench.kv.usage().free:
        bench.use(8)
    bench.step()
    bench.looks = 0
    for _ in range(100):
        bench.step()
    assert bench.looks == 0
    for _ in range(20):
        bench.use(8)
    assert bench.looks <= 2 + 20 * 8 * 2 // 16 * 2


def test_a_failed_copy_is_no_copy_and_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("the bus is gone")

    bench = Bench(10, low_water=4)
    with monkeypatch.context() as broken:
        broken.setattr(BlockMover, "_spill", fail)  # whichever way is the cheaper one here
        ids = bench.use(9)
    assert bench.counts["failed"] > 0
    assert not bench.host.find(ids[-1:])
    assert bench.host.usage().free == 200
    bench.use(1)
    bench.step()
    assert bench.counts["spilled"] > 0


def test_a_failed_copy_fails_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step that overwrites its block waits for it, and goes on; the slot is free again."""

    def fail(*_: object) -> None:
        raise RuntimeError("the bus is gone")

    bench = Bench(10, low_water=4)
    monkeypatch.setattr(BlockMover, "_spill", fail)
    blocks = bench.kv.allocate(9, owner="a")
    for at, block in enumerate(blocks):
        bench.kv.publish(block, at.to_bytes(32, "big"))
    bench.kv.release(blocks)
    bench.spills.after_step()
    assert bench.spills.reading
    bench.spills.before_step(blocks)
    bench.spills.settle()
    assert bench.counts["failed"] > 0
    assert bench.host.usage().free == 200


def test_puts_take_turns_by_tenant_and_forget_what_they_cannot_keep_up_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """A flood of one tenant does not keep another's blocks from the store; what exceeds the bounds is left out."""
    monkeypatch.setattr("lamina.engine.tier_puts._PUT_BYTES", 2 * BYTES)
    monkeypatch.setattr("lamina.engine.tier_puts._MAX_PUT_BYTES", 4 * BYTES)
    monkeypatch.setattr("lamina.engine.tier_puts._MAX_QUEUED_BYTES", 40 * BYTES)
    steps, store = Steps(), MemoryStore()
    tier = MemoryTier(store, BlockCodec(bytes(32), BYTES), run=steps)
    kv, host, arena = KvManager(10), HostTier(100, BYTES), HostBlocks(100, BYTES, pin=False)
    puts = Puts(kv, host, arena, tier, counts := Counter[str]())

    def arrive(namespace: str, count: int, first: int) -> list[BlockKey]:
        keys = [BlockKey(number.to_bytes(32, "big"), namespace) for number in range(first, first + count)]
        host.commit([given for given in host.reserve(keys) if given is not None])
        puts.want(keys)
        return keys

    flood, mine = arrive("flood", 60, 0), arrive("me", 3, 100)
    for _ in range(4):
        puts.settle()
        steps.run()
    assert sum(store.has(key.id) for key in mine) == 3
    for _ in range(40):
        puts.settle()
        steps.run()
    puts.settle()
    assert sum(store.has(key.id) for key in flood) == 40
    assert counts["stored"] == 43
    assert host.usage().held == 0
