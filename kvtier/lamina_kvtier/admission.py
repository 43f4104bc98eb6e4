"""Whether a request may start: the answer, with its numbers, and when to ask again."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from lamina_kvtier.errors import new_decision_id

__all__ = ["Cause", "Decision", "ReleaseRate", "Verdict"]


class Verdict(StrEnum):
    """`QUEUE`: wait, it will fit. `REFUSED`: it would fit, but may not wait (429). `NEVER`: it cannot fit (400)."""

    ADMITTED = "admitted"
    QUEUE = "queue"
    REFUSED = "refused"
    NEVER = "never"


class Cause(StrEnum):
    """Which bound said no: nobody's, the policy as such, the namespace's own use, or everybody's."""

    NONE = "none"
    CEILING = "ceiling"
    TENANT_LIMIT = "tenant_limit"
    POOL = "pool"


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """`need` units were wanted, `have` can be had now (NEVER: at most, ever), `limit` is the bound that was applied.

    `ahead`: units that it may come to use beyond those. `entitled`: with them all it stays within its namespace's
    reservation, which nobody may keep from it: if it has to wait all the same, others use more than they reserved.
    """

    verdict: Verdict
    cause: Cause
    namespace: str
    limit: int
    need: int
    have: int
    ahead: int = 0
    entitled: bool = False
    retry_after_s: float | None = None
    decision_id: str = field(default_factory=new_decision_id)

    @property
    def admitted(self) -> bool:
        return self.verdict is Verdict.ADMITTED


class ReleaseRate:
    """Units per second that came back lately, forgotten with a half life: how long a shortage may last."""

    SHORTEST_S, LONGEST_S, UNKNOWN_S = 0.1, 60.0, 1.0
    _HALF_LIFE_S = 5.0

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` returns seconds that never go back."""
        self._clock = clock
        self._decay = math.log(2) / self._HALF_LIFE_S
        self._rate, self._at = 0.0, clock()

    def add(self, units: int) -> None:
        """`units` came back just now."""
        self._rate = self._faded() + units * self._decay

    def seconds_for(self, units: int) -> float:
        """How long until `units` more have come back, if it goes on like this."""
        rate = self._faded()
        if rate <= 0.0:
            return self.UNKNOWN_S
        return min(max(units / rate, self.SHORTEST_S), self.LONGEST_S)

    def _faded(self) -> float:
        now = self._clock()
        if now > self._at:
            self._rate *= math.exp(-self._decay * (now - self._at))
            self._at = now
        return self._rate
