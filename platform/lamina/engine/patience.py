"""How long a request waits for its start, and what it is told when that was too long."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from lamina.engine.request import RequestState
from lamina.errors import WaitExceeded
from lamina_kvtier.admission import Decision, ReleaseRate

__all__ = ["Patience"]


class Patience:
    """Deadlines of waiting requests, in the order in which they end; and how fast requests leave.

    Every operation is O(1) per request. Only names are kept, so a request that has ended is not held in memory.
    """

    def __init__(self, max_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Seconds that a request may wait; 0: as long as it takes."""
        self._max_s = max_s
        self._clock = clock
        self._deadlines: deque[tuple[float, str, int]] = deque()
        self._departures = ReleaseRate(clock)

    def now(self) -> float:
        """Seconds that never go back."""
        return self._clock()

    def waits(self, state: RequestState) -> None:
        """It waits from now on."""
        if self._max_s > 0:
            self._deadlines.append((self._clock() + self._max_s, state.request.request_id, state.arrival))

    def overdue(self) -> list[tuple[str, int]]:
        """Request ids and arrivals whose time is up, each once; most of them have started long ago."""
        now, found = self._clock(), []
        while self._deadlines and self._deadlines[0][0] <= now:
            found.append(self._deadlines.popleft()[1:])
        return found

    def left(self) -> None:
        """A request has ended."""
        self._departures.add(1)

    def seconds_until(self, departures: int) -> float:
        """How long until so many more have ended, at the rate at which they do now."""
        return self._departures.seconds_for(departures)

    def exceeded(self, decision: Decision) -> WaitExceeded:
        """What to say to a request that waited too long. `decision` is the ledger's of now."""
        retry_after_s = self.seconds_until(1) if decision.retry_after_s is None else decision.retry_after_s
        if decision.admitted:
            why = "other requests were ahead of it"
        else:
            why = f"it needs {decision.need} more KV blocks, and {decision.have} of {decision.limit} could be had"
        return WaitExceeded(
            f"The request waited {self._max_s:g} s and could not start: {why}. Retry in {retry_after_s:.0f} s.",
            limit=decision.limit,
            need=decision.need,
            have=decision.have,
            decision=decision.decision_id,
            retry_after_s=retry_after_s,
        )
