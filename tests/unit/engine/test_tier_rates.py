"""Load or recompute, by what was measured."""

from __future__ import annotations

from lamina.engine.tier_fetch import Rates


def test_loading_is_tried_until_both_are_known_and_then_the_faster_wins() -> None:
    """Rates follow what is measured lately; steps of a few tokens say nothing about prefill."""
    rates = Rates(16)
    assert rates.prefers_load()
    rates.loaded(10, 1.0)  # 0.1 s a block
    rates.computed(16, 0.001)
    assert rates.prefers_load()
    rates.computed(160, 0.5)  # 0.05 s a block
    assert not rates.prefers_load()
    rates.loaded(5000, 50.0)  # 0.01 s a block by now
    assert rates.prefers_load()
