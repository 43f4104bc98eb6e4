"""The tier of faults: harmless without any, and with them repeatable, honest, and no worse than the protocol allows."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lamina_kvtier.block_codec import BlockCodec
from lamina_kvtier.fault_tier import Fault, Faults, FaultTier
from lamina_kvtier.memory_tier import MemoryStore, MemoryTier
from lamina_kvtier.tier import Outcome, StoreTier, Tally
from support.tier_contract import (
    BLOCK_BYTES,
    LAYOUT,
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

CODEC = BlockCodec(LAYOUT, BLOCK_BYTES)
COUNT = 60


@pytest.fixture
def make_tier() -> Iterator[MakeTier]:
    store = MemoryStore()
    made: list[FaultTier] = []

    def make(layout: bytes = LAYOUT, block_bytes: int = BLOCK_BYTES) -> StoreTier:
        made.append(FaultTier(MemoryTier(store, BlockCodec(layout, block_bytes)), Faults(), seed=0))
        return made[-1]

    yield make
    for tier in made:
        tier.close()


class TestFaultTierWithoutFaults(TierContract):
    """Around another tier it changes nothing."""


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def stored(faults: Faults, seed: int = 1, clock: Clock | None = None) -> tuple[FaultTier, list, list]:
    """A tier with these faults, on a store with blocks in it."""
    clock = clock or Clock()
    inner = MemoryTier(MemoryStore(), CODEC)
    names, values = keys(COUNT), blocks(COUNT)
    put(inner, names, values)
    return FaultTier(inner, faults, seed=seed, clock=clock, sleep=clock.sleep), names, values


@pytest.mark.parametrize(
    ("fault", "outcome"),
    [
        ("vanished", Outcome.MISSING),
        ("truncated", Outcome.CORRUPT),
        ("flipped", Outcome.CORRUPT),
        ("wrong_layout", Outcome.WRONG_LAYOUT),
    ],
)
def test_faults_of_blocks(fault: str, outcome: Outcome) -> None:
    """Found at the look-up; about as many as asked for fail at the load, their memory is not right, the rest is."""
    tier, names, values = stored(Faults(**{fault: 0.5}))
    assert lookup(tier, names) == Tally(COUNT, Outcome.OK)
    into = room(COUNT)
    outcomes = load(tier, names, into)
    assert set(outcomes) == {Outcome.OK, outcome}
    assert tier.injected[Fault(fault)] == outcomes.count(outcome)
    assert COUNT // 4 < outcomes.count(outcome) < COUNT * 3 // 4
    for fared, place, value in zip(outcomes, into, values, strict=True):
        assert (place == value) == (fared is Outcome.OK)


def test_all_faults_at_once_are_repeatable() -> None:
    """The same seed gives the same outcomes, another one others."""
    faults = Faults(vanished=0.1, truncated=0.1, flipped=0.1, wrong_layout=0.1, disconnected=0.3, slow=0.2)
    runs = []
    for seed in (1, 1, 2):
        tier, names, _ = stored(faults, seed)
        runs.append([(load(tier, names, room(COUNT)), lookup(tier, names)) for _ in range(20)])
    assert runs[0] == runs[1] != runs[2]
    assert {fault for fault, count in tier.injected.items() if count} == set(Fault)


def test_a_disconnected_operation_keeps_what_came_before() -> None:
    """From some block on everything is unavailable, and a put has stored exactly what it says."""
    tier, names, values = stored(Faults(disconnected=1.0))
    into = room(COUNT)
    outcomes = load(tier, names, into)
    reached = outcomes.count(Outcome.OK)
    assert outcomes == (Outcome.OK,) * reached + (Outcome.UNAVAILABLE,) * (COUNT - reached)
    assert into[:reached] == values[:reached]
    tally = lookup(tier, names)
    assert tally.outcome is Outcome.UNAVAILABLE
    assert tally.blocks < COUNT
    fresh = keys(COUNT)
    kept = put(tier, fresh, blocks(COUNT)).count(Outcome.OK)
    assert kept < COUNT
    assert lookup(tier._inner, fresh) == Tally(kept, Outcome.MISSING)


def test_a_slow_operation_ends_later() -> None:
    """Until then it is not done, and a waiter's patience may end first."""
    clock = Clock()
    tier, names, values = stored(Faults(slow=1.0, slow_s=2.0), clock=clock)
    into = room(COUNT)
    operation = tier.load(ids(names), into)
    with pytest.raises(TimeoutError):
        operation.result(0.5)
    assert not operation.done()
    clock.now = 2.0
    assert operation.done()
    assert operation.result(0) == (Outcome.OK,) * COUNT
    assert into == values
    assert lookup(tier, names) == Tally(COUNT, Outcome.OK)
    assert clock.now == 4.0


def test_a_too_slow_operation_ends_at_its_deadline() -> None:
    """With nothing to show for it."""
    clock = Clock()
    tier, names, values = stored(Faults(slow=1.0, slow_s=9.0, deadline_s=3.0), clock=clock)
    into = room(COUNT)
    assert load(tier, names, into) == (Outcome.TIMEOUT,) * COUNT
    assert clock.now == 3.0
    assert all(place != value for place, value in zip(into, values, strict=True))
    assert lookup(tier, names) == Tally(0, Outcome.TIMEOUT)
    assert put(tier, names, values) == (Outcome.TIMEOUT,) * COUNT


def test_closing_ends_slow_operations() -> None:
    tier, names, _ = stored(Faults(slow=1.0, slow_s=2.0))
    operation = tier.load(ids(names), room(COUNT))
    tier.close()
    assert operation.done()


def test_a_store_that_is_away_and_comes_back() -> None:
    """As if it had been killed and started again with what it had."""
    tier, names, values = stored(Faults())
    tier.away = True
    assert put(tier, names, values) == load(tier, names, room(COUNT)) == (Outcome.UNAVAILABLE,) * COUNT
    assert lookup(tier, names) == tier.delete(ids(names)).result() == Tally(0, Outcome.UNAVAILABLE)
    tier.away = False
    assert load(tier, names, room(COUNT)) == (Outcome.OK,) * COUNT


def test_what_fails_by_itself_is_not_made_worse() -> None:
    """A block that is missing anyway stays that."""
    tier, _, _ = stored(Faults(flipped=1.0))
    assert load(tier, keys(1), room(1)) == (Outcome.MISSING,)


@pytest.mark.parametrize("rates", [{"slow": 1.1}, {"flipped": -0.1}, {"flipped": 0.6, "vanished": 0.6}])
def test_rates_are_probabilities(rates: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="probabilities"):
        Faults(**rates)
