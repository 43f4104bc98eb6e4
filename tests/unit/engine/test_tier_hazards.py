"""What can go wrong between a plan, the copies beside it, and the promises behind it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from fixtures.engines import Outputs, collect, drive, request, tiny_core
from lamina.engine.plan import StepPlan
from lamina.engine.request import Choice
from lamina.engine.tier_protocol import Allocate, NoTiers
from lamina.engine.tier_puts import Puts
from lamina.types import GenerationRequest, QuotaPolicy, TierQuota
from lamina_kernels.gpu.block_mover import BlockMover, HostBlocks, Transfer
from lamina_kvtier import KvManager, Quota
from lamina_kvtier.block_codec import BlockCodec
from lamina_kvtier.host_tier import HostTier
from lamina_kvtier.memory_tier import MemoryStore, MemoryTier
from lamina_kvtier.tier import BlockKey
from support.below import Below
from support.planned import BLOCK, Planned, prompt


def test_no_block_comes_up_into_what_the_same_step_still_copies_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A choice of two siblings is preempted in the plan that copies their shared block for the other one. The block is
    free then, and an assured request whose prefix is below would be the next to get it."""
    promoted: list[int] = []
    promote = BlockMover.promote

    def noted(mover: BlockMover, slots: Sequence[int], blocks: Sequence[int]) -> Transfer:
        promoted.extend(blocks)
        return promote(mover, slots, blocks)

    monkeypatch.setattr(BlockMover, "promote", noted)
    alone, _ = _siblings(tmp_path / "alone", disturbed=False, promoted=promoted)
    beside, preemptions = _siblings(tmp_path / "beside", disturbed=True, promoted=promoted)
    assert preemptions > 0
    assert beside == alone


def _siblings(store: Path, *, disturbed: bool, promoted: list[int]) -> tuple[Outputs, int]:
    below = Below(host=64, shared=True)
    core = tiny_core(store, tiers=below, num_blocks=40, max_batch_tokens=256, max_running=2)
    core.commons.set_quotas([QuotaPolicy(namespace="b", gpu=TierQuota(reserved=20, limit=40))])
    drive(core, [_of_b("b0")])
    kv, tiers = core.scheduler.kv, below.made[-1]
    tiers._spills.save_now([(block, identity) for block, identity in kv.next_victims(40)][::-1])
    until = time.monotonic() + 10
    while core.stats().spilled_blocks == 0 and time.monotonic() < until:
        tiers.settle()
    kv.drop_cached()
    plan = core.scheduler.plan

    def slowly() -> StepPlan:
        """Copies that are begun within a plan have ended before its step."""
        before = len(promoted)
        planned = plan()
        assert len(promoted) == before, "a copy to the device was begun while a step was planned"
        return planned

    core.scheduler.plan = slowly  # type: ignore[method-assign]
    core.submit(request("a", prompt(1, 2.5), tenant="a", max_tokens=12, n=2, temperature=0.8, seed=7))
    tokens: Outputs = {}
    waits = disturbed
    while core.has_work():
        if waits and len(core.scheduler.running) == 2:
            core.submit(_of_b("b1"))
            waits = False
        collect(core.step(), tokens, {})
        core.check_integrity()
    core.close()
    return {key: value for key, value in tokens.items() if key[0] == "a"}, core.scheduler.preemptions


def _of_b(name: str) -> GenerationRequest:
    return replace(request(name, prompt(2, 4.5), max_tokens=4), tenant="b", namespace="b")


class SlowFetches(NoTiers):
    """The blocks of tenant b never come."""

    def is_ready(self, choice: Choice) -> bool:
        return choice.request.tenant != "b"


def test_nobody_goes_again_and_again_for_one_whose_blocks_are_still_coming() -> None:
    simulation = Planned(64, quotas={"b": Quota(24, 64)}, tiers=SlowFetches(), max_running=4)
    for name in range(8):
        simulation.submit(f"a{name}", prompt(name, 6), max_tokens=300)
    for _ in range(20):
        simulation.step()
    simulation.submit("b0", prompt(99, 8), max_tokens=16)
    for _ in range(200):
        simulation.step()
    assert "b0" in simulation.started
    assert max(Counter(simulation.preempted).values()) <= 2


class TakesMeanwhile(NoTiers):
    """A fetch that takes blocks which were promised to others, between the decision to start and the start."""

    def __init__(self) -> None:
        self.kv: KvManager
        self.held: list[int] = []

    def is_ready(self, choice: Choice) -> bool:
        if choice.request.tenant == "f" and not self.held:
            self.held = self.kv.allocate(min(12, self.kv.available_to("f")), owner="f")
        return True

    def started(self, choice: Choice, allocate: Allocate, give_back: Callable[[int], object]) -> None:
        self.kv.release(self.held)
        self.held = []

    def held_tables(self) -> list[list[int]]:
        return [self.held]


def test_a_start_that_finds_less_than_it_was_promised_is_no_error() -> None:
    tiers = TakesMeanwhile()
    simulation = Planned(24, quotas={}, tiers=tiers, max_batch_tokens=2 * BLOCK)
    tiers.kv = simulation.kv
    simulation.submit("a0", prompt(1, 14), max_tokens=4)
    simulation.step()
    simulation.submit("f0", prompt(2, 6), max_tokens=4)
    for _ in range(40):
        simulation.step()
    assert not simulation.running()


@pytest.mark.parametrize("with_store", [False, True])
def test_host_memory_keeps_the_newest_whether_they_are_stored_or_not(with_store: bool) -> None:
    kv, host, arena = KvManager(8), HostTier(4, 64), HostBlocks(4, 64, pin=False)
    store = MemoryTier(MemoryStore(), BlockCodec(bytes(32), 64)) if with_store else None
    puts = Puts(kv, host, arena, store, Counter())
    keys = [BlockKey(at.to_bytes(32, "big"), "tenant") for at in range(10)]
    for key in keys:
        host.commit([reservation for reservation in host.reserve([key]) if reservation is not None])
        puts.want([key])
        puts.settle()
        puts.settle()
    assert [at for at, key in enumerate(keys) if host.knows(key.id)] == [6, 7, 8, 9]
