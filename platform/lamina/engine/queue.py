"""Waiting choices under weighted fair share by tenant."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from lamina.engine.request import Choice

__all__ = ["FairQueue"]


class FairQueue:
    """Start-time fair queueing over tenants: the tenant that was served least (tokens / weight) goes first.

    Within a tenant, order is age, so a preempted choice comes back to its old place. A tenant that returns from
    idleness starts at the smallest virtual time among the active tenants: idleness earns no credit that could
    starve the others (Sheng et al., "Fairness in Serving Large Language Models", 2024, use the same lift).
    """

    def __init__(self) -> None:
        self._waiting: dict[str, deque[Choice]] = {}
        self._served: dict[str, float] = {}
        self._floor = 0.0  # virtual time of the tenant served last
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Choice]:
        for line in self._waiting.values():
            yield from line

    def push(self, choice: Choice) -> None:
        """O(1) for a new choice; a preempted one walks past the older ones of its tenant."""
        tenant = choice.request.tenant
        line = self._waiting.get(tenant)
        if line is None:
            line = self._waiting[tenant] = deque()
            self._served[tenant] = max(self._served.get(tenant, 0.0), self._floor)
        at = len(line)
        while at > 0 and line[at - 1].order > choice.order:
            at -= 1
        line.insert(at, choice)
        self._size += 1

    def heads(self) -> list[Choice]:
        """The oldest choice of each waiting tenant, the least served tenant first."""
        tenants = sorted(self._waiting, key=lambda tenant: self._served[tenant])
        return [self._waiting[tenant][0] for tenant in tenants]

    def head(self, tenant: str) -> Choice | None:
        """The tenant's oldest waiting choice."""
        line = self._waiting.get(tenant)
        return line[0] if line else None

    def waiting(self, tenant: str) -> int:
        """How many choices of the tenant wait."""
        return len(self._waiting.get(tenant, ()))

    def remove(self, choice: Choice) -> None:
        """Raises ValueError if the choice does not wait here."""
        tenant = choice.request.tenant
        line = self._waiting.get(tenant, deque())
        line.remove(choice)
        self._size -= 1
        if not line:
            del self._waiting[tenant]

    def charge(self, tenant: str, tokens: int, weight: float) -> None:
        """Counts tokens that the engine computes for a tenant."""
        before = self._served.get(tenant, self._floor)
        self._floor = max(self._floor, min(before, self._least_waiting(before)))
        self._served[tenant] = before + tokens / weight

    def _least_waiting(self, default: float) -> float:
        return min((self._served[tenant] for tenant in self._waiting), default=default)

    def forget_idle(self, active: set[str]) -> None:
        """Drops the books of tenants that neither wait nor run and owe nothing, so that they stay bounded."""
        for tenant in [name for name in self._served if name not in active and name not in self._waiting]:
            if self._served[tenant] <= self._floor:
                del self._served[tenant]
