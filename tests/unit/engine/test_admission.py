"""Who starts, who waits and who gives way, planned without a model or a clock."""

from __future__ import annotations

import pytest

from lamina.engine.scheduler import Scheduler
from lamina_kvtier import KvManager, Quota
from support.planned import BLOCK, Adapters, Planned, prompt

LONG = 20 * BLOCK  # max_tokens of requests that end much sooner
X, Y = "ab" * 32, "cd" * 32  # adapters


def crowd(sim: Planned, tenant: str, count: int, *, blocks: float = 3, first: int = 0, **options: int) -> None:
    for number in range(first, first + count):
        sim.submit(f"{tenant}{number}", prompt(1000 * ord(tenant) + number, blocks), **options)


# Nobody has a reservation


@pytest.mark.parametrize("quotas", [None, {}, {"a": Quota(0, 64), "b": Quota(0, 64, 0, 2.0)}])
def test_large_max_tokens_cost_no_concurrency(quotas: dict[str, Quota] | None) -> None:
    """Requests start by what they need today, with policy as without: what nobody was promised is not kept free."""
    sim = Planned(quotas=quotas)
    for number in range(4):
        crowd(sim, "ab"[number % 2], 1, first=number, max_tokens=LONG, ends_after=20)
        crowd(sim, "ab"[number % 2], 1, first=number + 4, max_tokens=LONG, ends_after=20)
    for _ in range(3):
        sim.step()
    assert sum(sim.running().values()) == 8
    sim.run()
    assert sim.preempted == []


def test_the_same_plans_with_and_without_policy() -> None:
    """Step for step, under scarcity too, if nobody has a reservation. (Which cached blocks go first may differ.)"""
    sims = [Planned(24, quotas=quotas, caching=False) for quotas in (None, {})]
    for sim in sims:
        for number in range(20):
            crowd(sim, "abc"[number % 3], 1, first=number, blocks=1 + number % 5, max_tokens=60, ends_after=20 + number)
        sim.run()
    assert sims[0].started == sims[1].started
    assert sims[0].ended == sims[1].ended
    assert sims[0].preempted == sims[1].preempted != []


def test_what_prompts_under_way_still_need_is_not_given_away() -> None:
    """Two long prompts that only fit one after the other are not started together: each would push out the other."""
    sim = Planned(24, max_batch_tokens=32)
    crowd(sim, "a", 1, blocks=15)
    crowd(sim, "b", 1, blocks=15)
    sim.run()
    assert sim.preempted == []


def test_without_room_preemption_ends() -> None:
    """Every preemption is paid for by a token that somebody drew: nothing goes in circles."""
    sim = Planned(16, max_batch_tokens=32)
    for tenant in "abcd":
        crowd(sim, tenant, 4, blocks=2, max_tokens=6 * BLOCK)
    sim.run()
    assert len(sim.ended) == 16
    assert 0 < len(sim.preempted) <= sim.drawn / BLOCK


# A reservation


FLOOD: dict[str, int] = {"max_tokens": LONG, "ends_after": 200}


@pytest.mark.parametrize("blocks", [2, 9])
def test_within_its_reservation_a_tenant_starts_in_the_next_plan(blocks: int) -> None:
    """However many another one has sent: it takes back what is its own, blocks and seats, in the same step."""
    sim = Planned(quotas={"b": Quota(24, 64)})
    crowd(sim, "a", 300, blocks=blocks, **FLOOD)
    for _ in range(20):
        sim.step()
    for number in range(6):
        sim.submit(f"b{number}", prompt(number, 6), max_tokens=5 * BLOCK, ends_after=10)
        sim.step()
        assert sim.started[f"b{number}"] == sim.steps
        assert sim.running()["b"] == 1
        while f"b{number}" not in sim.ended:
            sim.step()
    assert set(sim.preempted) <= {f"a{number}" for number in range(300)}


def test_a_flood_leaves_a_tenant_its_hits() -> None:
    """B finds of its own prefixes what it finds alone, while A floods."""

    def hits(flooded: bool) -> list[int]:
        sim = Planned(96, quotas={"b": Quota(40, 96)})
        for turn in range(12):
            if flooded:
                crowd(sim, "a", 30, first=100 * turn, blocks=4, **FLOOD)
            sim.submit(f"b{turn}", [*prompt(turn % 3, 9), turn], max_tokens=2 * BLOCK, ends_after=8)
            for _ in range(15):
                sim.step()
        assert sim.ended.keys() >= {f"b{turn}" for turn in range(12)}
        assert not any(name.startswith("b") for name in sim.preempted)
        return [sim.cached[f"b{turn}"] for turn in range(12)]

    alone = hits(flooded=False)
    assert hits(flooded=True) == alone
    assert sum(alone) == 9 * 9 * BLOCK


def test_what_was_admitted_within_a_reservation_is_never_preempted() -> None:
    """Though its own tenant runs more than it reserved, and others want theirs back."""
    sim = Planned(64, quotas={"a": Quota(12, 64), "b": Quota(40, 64)}, max_running=12)
    sim.submit("a0", prompt(0, 4), max_tokens=7 * BLOCK)
    crowd(sim, "a", 8, first=1, blocks=5, max_tokens=8 * BLOCK)
    for _ in range(3):
        sim.step()
    assert sim.running()["a"] > 3
    for number in range(4):
        sim.submit(f"b{number}", prompt(50 + number, 6), max_tokens=4 * BLOCK)
    while "a0" not in sim.ended:
        sim.step()
    assert "a0" not in sim.preempted
    assert sim.preempted
    sim.run()
    assert not any(name.startswith("b") for name in sim.preempted)


@pytest.mark.parametrize(("steps", "blocks", "grows"), [(140, 12.5, 1), (100, 10, 4)])
def test_an_older_choice_that_was_promised_nothing_goes_before_a_younger_one_that_was(
    steps: int, blocks: float, grows: int
) -> None:
    """When another tenant's request starts, and when one grows."""
    sim = Planned(36, quotas={"a": Quota(16, 36), "b": Quota(14, 36)})
    sim.submit("a0", prompt(0, 4), max_tokens=13 * BLOCK)
    sim.step()
    sim.submit("a1", prompt(1, 2), max_tokens=9 * BLOCK)
    for _ in range(steps):
        sim.step()
    assert sim.running() == {"a": 2}
    sim.submit("b0", prompt(2, blocks), max_tokens=grows * BLOCK)
    sim.step()
    assert sim.started["b0"] == sim.steps
    sim.run()
    assert sim.preempted == ["a0"]
    assert len(sim.ended) == 3


def test_use_within_a_reservation_gives_nothing_to_others() -> None:
    """A request whose worst case exceeds the reservation is only preempted once its tenant uses more than that."""
    sim = Planned(32, quotas={"b": Quota(10, 32)})
    sim.submit("b0", prompt(1, 3), max_tokens=LONG // 4, ends_after=5 * BLOCK)
    crowd(sim, "a", 6, blocks=5, max_tokens=80)
    sim.run()
    assert "b0" not in sim.preempted
    assert sim.preempted


def test_the_youngest_of_the_furthest_over_its_share_goes() -> None:
    """By blocks in use beyond the reservation, per weight."""
    sim = Planned(40, quotas={"a": Quota(0, 40), "c": Quota(0, 40, 0, 4.0), "b": Quota(12, 40)})
    for name, blocks in (("a0", 7), ("a1", 5), ("c0", 9), ("c1", 9)):
        sim.submit(name, prompt(ord(name[0]) + int(name[1]), blocks), max_tokens=8 * BLOCK, ends_after=40)
    for _ in range(3):
        sim.step()
    sim.submit("b0", prompt(9, 8), max_tokens=BLOCK)
    sim.step()
    assert sim.preempted == ["a1"]
    assert sim.started["b0"] == sim.steps


def test_nobody_gives_way_to_a_request_whose_adapter_is_not_there() -> None:
    sim = Planned(quotas={"b": Quota(24, 64)}, adapters=Adapters(cold={X: 3}))
    crowd(sim, "a", 30, **FLOOD)
    for _ in range(5):
        sim.step()
    sim.submit("b0", prompt(1, 2), adapter=X)
    while "b0" not in sim.started:
        assert sim.preempted == []
        sim.step()
    assert sim.preempted != []


def test_a_large_request_is_not_starved_by_small_ones() -> None:
    """It is not overtaken for ever by those without a reservation, whatever they are worth."""
    sim = Planned(32, quotas={"b": Quota(4, 32)}, max_running=16)
    crowd(sim, "a", 60, blocks=2, max_tokens=BLOCK)
    sim.step()
    sim.submit("x0", prompt(1, 20), max_tokens=3 * BLOCK)
    for number in range(200):
        sim.submit(f"b{number}", prompt(number, 1), max_tokens=BLOCK)
        sim.step()
    assert "x0" in sim.started
    sim.run()
    assert "x0" in sim.ended


def test_a_scheduler_needs_a_pool_with_quotas() -> None:
    with pytest.raises(ValueError, match="quotas"):
        Scheduler(KvManager(4), Adapters(), max_batch_tokens=16, max_running=2)


# One step


def test_decoding_comes_first_and_in_full() -> None:
    """Prompts get what max_prefill_tokens says, whatever waits, and every running choice its token."""
    sim = Planned(256, max_prefill_tokens=40, max_running=12)
    crowd(sim, "a", 4, blocks=1, max_tokens=200)
    while len(sim.scheduler.running) < 4:
        sim.step()
    sim.step()
    crowd(sim, "b", 6, blocks=20, max_tokens=30)
    for _ in range(20):
        plan = sim.step()
        assert sum(chunk.count for chunk in plan.chunks if not chunk.decodes) == 40
        assert {chunk.choice.request.request.request_id for chunk in plan.chunks if chunk.decodes} >= {"a0", "a3"}


def test_more_choices_than_tokens_take_turns() -> None:
    sim = Planned(64, max_batch_tokens=5, max_running=8)
    sim.submit("a0", prompt(1, 0.25), max_tokens=60, n=8)
    while len(sim.scheduler.running) < 8:
        sim.step()
    before = {choice: choice.output_len for choice in sim.scheduler.running}
    for _ in range(16):
        assert sim.step().tokens == 5
    assert {choice.output_len - count for choice, count in before.items()} == {10}


def test_a_prompt_leaves_the_blocks_that_decoding_needs_next() -> None:
    """It goes on later, instead of taking the last block and pushing somebody out for it."""
    sim = Planned(20, max_batch_tokens=BLOCK, max_running=4)
    crowd(sim, "a", 3, blocks=1.5, max_tokens=4 * BLOCK)
    while len(sim.scheduler.running) < 3:
        sim.step()
    crowd(sim, "b", 1, blocks=6, max_tokens=BLOCK)
    sim.run()
    assert sim.preempted == []


def test_the_least_served_tenant_computes_first() -> None:
    """A long prompt under way does not hold up another tenant's short one until it is complete."""
    sim = Planned(256, max_batch_tokens=64)
    crowd(sim, "a", 1, blocks=60)
    sim.step()
    crowd(sim, "b", 1, blocks=2)
    sim.step()
    assert sim.started["b0"] == 2
    assert "a0" not in sim.ended


# What a tenant pays


def test_a_cold_load_is_paid_for() -> None:
    """In tokens that the engine computes in the meantime; once, and within bounds."""
    adapters = Adapters(seconds={X: 0.5, Y: 1000.0})
    sim = Planned(adapters=adapters)
    sim.scheduler.load_cost.computed(1000, 1.0)
    queue = sim.scheduler.queue

    def paid(name: str, adapter: str | None) -> float:
        tenant = name[0]
        sim.submit(name, prompt(ord(tenant), 1), max_tokens=1, adapter=adapter)
        before: float = queue.served(tenant)
        sim.step()
        return queue.served(tenant) - before

    assert paid("a0", X) == pytest.approx(500 + BLOCK)
    assert paid("a1", X) <= BLOCK
    assert paid("b0", Y) >= 4 * 256
    assert paid("c0", None) <= BLOCK


def test_nothing_is_charged_for_loads_before_a_step_was_measured() -> None:
    sim = Planned(adapters=Adapters(seconds={X: 5.0}))
    assert sim.scheduler.load_cost.tokens(5.0) == 0
