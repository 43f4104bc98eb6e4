"""Rates that are what a test says, and time that passes when a test says so."""

from __future__ import annotations

from collections.abc import Callable

from lamina.engine.tier_rates import Rates

__all__ = ["FixedRates", "HandClock"]


class HandClock:
    """Seconds that stand still until somebody moves `now`."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class FixedRates(Rates):
    """Of blocks of 16 tokens; what the engine measures is ignored."""

    def __init__(self, *, compute_s: float, load_s: float, clock: Callable[[], float]) -> None:
        """Seconds per block."""
        super().__init__(16, clock=clock)
        super().computed(160, 10 * compute_s)
        super().loaded(10, clock() - 10 * load_s)

    def computed(self, tokens: int, seconds: float) -> None:
        """Ignored."""

    def loaded(self, blocks: int, since: float) -> None:
        """Ignored."""
