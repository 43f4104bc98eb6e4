"""Load or recompute, by what was measured."""

from __future__ import annotations

import pytest

from lamina.engine.tier_rates import PATIENCE_S, Rates
from lamina_kvtier.policies import LoadChoice
from support.fixed_rates import HandClock


def test_loading_is_tried_until_both_are_known() -> None:
    """Steps of a few tokens say nothing about prefill, so nothing is known after them."""
    clock = HandClock()
    rates = Rates(16, clock=clock)
    assert rates.decide(8, blocks_before=0).reason is LoadChoice.LOAD
    assert rates.patience(8) == PATIENCE_S
    rates.loaded(10, clock.now - 1.0)
    rates.computed(16, 0.001)
    assert rates.decide(8, blocks_before=0).load_back == 8
    assert rates.decide(0, blocks_before=0).reason is LoadChoice.NOTHING


def test_the_faster_way_wins_and_similar_ones_share_the_work() -> None:
    clock = HandClock()
    rates = Rates(16, clock=clock)
    rates.loaded(10, clock.now - 1.0)  # 0.1 s a block
    rates.computed(160, 1.0)  # the same
    halves = rates.decide(10, blocks_before=0)
    assert (halves.compute_front, halves.load_back, halves.reason) == (5, 5, LoadChoice.SPLIT)
    assert rates.decide(10, blocks_before=1000).reason is LoadChoice.CHEAPER  # others are served first
    assert rates.patience(10) == pytest.approx(1.0)
    rates.computed(1_600_000, 100.0)  # a millisecond by now
    assert rates.decide(10, blocks_before=0).reason is LoadChoice.CHEAPER
    rates.computed(1_600_000, 1e6)  # ten seconds
    assert rates.decide(10, blocks_before=0).reason is LoadChoice.LOAD


def test_a_few_blocks_are_not_worth_the_device() -> None:
    """Computing 1 of 100 blocks while 99 are loaded makes the first token 1 % earlier, for a step of everybody's."""
    clock = HandClock()
    rates = Rates(16, clock=clock)
    rates.loaded(100, clock.now - 1.0)
    rates.computed(1600, 50.0)
    assert rates.decide(100, blocks_before=0).reason is LoadChoice.LOAD
    rates.computed(1_600_000, 2000.0)
    assert rates.decide(100, blocks_before=0).reason is LoadChoice.SPLIT


def test_loads_that_overlap_are_one_stream() -> None:
    """Four at once that take a second together are a quarter of a second each."""
    clock = HandClock()
    rates = Rates(16, clock=clock)
    rates.computed(160, 10 * 0.25)
    clock.now += 1.0
    for _ in range(4):
        rates.loaded(1, clock.now - 1.0)
    assert rates.decide(10, blocks_before=0).reason is LoadChoice.SPLIT


def test_a_slow_time_is_forgotten_by_a_probe() -> None:
    """Declining for ever what was slow once would never find out that it is fast again."""
    clock = HandClock()
    rates = Rates(16, clock=clock)
    rates.computed(160, 1.0)
    rates.loaded(1000, clock.now - 1000.0)
    assert rates.decide(4, blocks_before=0).reason is LoadChoice.CHEAPER
    assert not rates.take_probe()
    clock.now += 60.0
    assert rates.take_probe()
    assert not rates.take_probe()  # one at a time
    rates.loaded(2, clock.now - 0.001)
    assert rates.decide(4, blocks_before=0).reason is LoadChoice.LOAD
