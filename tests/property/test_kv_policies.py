"""What to spill, and load or recompute: each pure function against its definition, searched from end to end."""

from __future__ import annotations

import math
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lamina_kvtier.policies import LoadChoice, Rate, Split, spill_candidates, split

some = settings(max_examples=200, deadline=None)
seconds = st.floats(1e-6, 10.0)
waters = st.tuples(st.integers(0, 12), st.integers(0, 12)).map(sorted)


# Spill


@some
@given(st.integers(0, 15), st.integers(0, 15), waters, st.sets(st.integers(0, 14)), st.sets(st.integers(0, 14)))
def test_the_next_allocations_lose_nothing(
    queued: int, free: int, water: list[int], in_flight: set[int], safe: set[int]
) -> None:
    """Either the next `low` lose nothing as it is, or the next `high` lose nothing once the chosen are copied."""
    low, high = water
    chosen = spill_candidates(range(queued), free=free, low_water=low, high_water=high, in_flight=in_flight, safe=safe)

    def lost(allocations: int) -> set[int]:
        return set(range(queued)[: max(0, allocations - free)]) - in_flight - safe

    assert chosen == (sorted(lost(high)) if lost(low) else [])


def test_only_the_front_of_the_queue_is_looked_at() -> None:
    """A million cached blocks cost nothing."""
    queue = count()
    assert spill_candidates(queue, free=2, low_water=4, high_water=6) == [0, 1, 2, 3]
    assert next(queue) == 4


def test_water_marks_are_in_order() -> None:
    with pytest.raises(ValueError, match="low <= high"):
        spill_candidates([], free=0, low_water=2, high_water=1)


# Load or recompute


@some
@given(st.integers(0, 60), seconds, seconds, st.floats(0, 20.0), st.one_of(st.just(math.inf), st.floats(-1.0, 20.0)))
def test_the_split_is_the_best_there_is(n: int, compute: float, load: float, delay: float, deadline: float) -> None:
    """Of all that keep the deadline; never slower than computing everything."""
    chosen = split(n, compute, load, queue_delay=delay, deadline=deadline)

    def cost(k: int) -> float:
        return max(k * compute, delay + (n - k) * load if k < n else 0.0)

    def keeps(k: int) -> bool:
        return k == n or delay + (n - k) * load <= deadline * (1 + 1e-9) + 1e-9

    assert chosen.compute_front + chosen.load_back == n
    assert keeps(chosen.compute_front)
    allowed = [k for k in range(n + 1) if keeps(k) and (k == n or delay + (n - k) * load <= deadline)]
    assert chosen.seconds <= min(cost(k) for k in allowed) * (1 + 1e-9) + 1e-12
    assert chosen.seconds == (cost(chosen.compute_front) if n else 0.0)
    assert chosen.seconds <= n * compute * (1 + 1e-9)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"n_blocks": 0}, Split(0, 0, LoadChoice.NOTHING, 0.0)),
        ({"n_blocks": 10}, Split(1, 9, LoadChoice.SPLIT, 9.0)),
        ({"n_blocks": 1}, Split(0, 1, LoadChoice.LOAD, 1.0)),
        ({"n_blocks": 10, "queue_delay": 200.0}, Split(10, 0, LoadChoice.CHEAPER, 90.0)),
        ({"n_blocks": 10, "queue_delay": 40.0}, Split(5, 5, LoadChoice.SPLIT, 45.0)),
        ({"n_blocks": 10, "deadline": 5.5}, Split(5, 5, LoadChoice.SPLIT, 45.0)),
        ({"n_blocks": 10, "deadline": 0.5}, Split(10, 0, LoadChoice.DEADLINE, 90.0)),
        ({"n_blocks": 10, "deadline": 5.0, "queue_delay": 6.0}, Split(10, 0, LoadChoice.DEADLINE, 90.0)),
        ({"n_blocks": 10, "deadline": -1.0}, Split(10, 0, LoadChoice.DEADLINE, 90.0)),
    ],
)
def test_each_reason(arguments: dict[str, float], expected: Split) -> None:
    """Computing a block takes 9 s, loading one 1 s."""
    n_blocks = int(arguments.pop("n_blocks"))
    assert split(n_blocks, 9.0, 1.0, **arguments) == expected


@pytest.mark.parametrize("wrong", [0.0, -1.0, math.inf, math.nan])
def test_rates_are_positive_numbers(wrong: float) -> None:
    with pytest.raises(ValueError, match="positive"):
        split(1, wrong, 1.0)
    with pytest.raises(ValueError, match="positive"):
        split(1, 1.0, wrong)


@pytest.mark.parametrize("delay", [-1.0, math.nan])
def test_a_delay_is_not_negative(delay: float) -> None:
    with pytest.raises(ValueError, match="not a choice"):
        split(1, 1.0, 1.0, queue_delay=delay)


# Rates


def test_a_rate_starts_as_a_guess_and_becomes_what_is_measured() -> None:
    """The guess counts for little from the start and for nothing in the end."""
    rate = Rate(prior=5.0, half_life=100.0)
    assert (rate.seconds_per_unit, rate.count) == (5.0, 0)
    rate.observe(99.0, 99.0)
    assert rate.seconds_per_unit == pytest.approx(1.02, abs=0.03)
    for _ in range(50):
        rate.observe(100.0, 100.0)
    assert rate.seconds_per_unit == pytest.approx(1.0, abs=1e-9)
    assert rate.count == 51


def test_a_rate_follows_a_change_within_some_half_lives() -> None:
    rate = Rate(prior=1.0, half_life=10.0)
    for _ in range(100):
        rate.observe(1.0, 1.0)
    for _ in range(10):
        rate.observe(1.0, 3.0)
    assert rate.seconds_per_unit == pytest.approx(2.0, abs=0.1)
    for _ in range(100):
        rate.observe(1.0, 3.0)
    assert rate.seconds_per_unit == pytest.approx(3.0, abs=0.01)


@some
@given(st.lists(st.tuples(st.floats(-1, 1e6), st.floats(-1, 1e6)), max_size=30))
def test_a_rate_stays_between_what_it_was_told(observations: list[tuple[float, float]]) -> None:
    """Positive and finite, whatever was observed: `split` can always use it."""
    rate = Rate(prior=1.0)
    told = [1.0]
    for units, took in observations:
        rate.observe(units, took)
        if units > 0 and took >= 0:
            told.append(max(took / units, 1e-12))
    assert min(told) * (1 - 1e-6) <= rate.seconds_per_unit <= max(told) * (1 + 1e-6)


def test_what_cannot_be_measured_is_ignored() -> None:
    rate = Rate(prior=2.0)
    for units, took in ((0.0, 1.0), (1.0, math.inf), (1.0, math.nan), (-1.0, 1.0), (1.0, -1.0)):
        rate.observe(units, took)
    assert (rate.seconds_per_unit, rate.count) == (2.0, 0)
    with pytest.raises(ValueError, match="positive"):
        Rate(prior=0.0)
