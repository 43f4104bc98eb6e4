"""A step between its launch and its landing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lamina.engine.plan import StepPlan
from lamina.engine.request import Choice
from lamina.engine.sampler import Draws, Sampled

__all__ = ["Flight"]


@dataclass(frozen=True, slots=True)
class Flight:
    """What was launched, and who draws from each row of logits: a first token is drawn for all n siblings."""

    plan: StepPlan
    families: Sequence[Sequence[Choice]]
    draws: Draws
    ahead: bool  # the next step may be launched before this one lands

    def collect(self) -> list[list[tuple[Choice, Sampled]]]:
        """Waits for the draws."""
        drawn = iter(self.draws.collect())
        return [[(choice, next(drawn)) for choice in family] for family in self.families]
