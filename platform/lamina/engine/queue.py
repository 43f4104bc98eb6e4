"""Waiting choices under weighted fair share by tenant."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from lamina.engine.request import Choice

__all__ = ["FairQueue"]


class FairQueue:
    """Start-time fair queueing over tenants: the tenant that was served least (tokens / weight) goes first.

    Within a tenant, order is age, so a preempted choice comes back to its old place. A tenant that returns from
    idleness starts at most `credit` behind the smallest virtual time among the active tenants: longer idleness earns
    no more, and cannot starve the others (Sheng et al., "Fairness in Serving Large Language Models", 2024, lift all the
    way). The credit is what lets one that asks for less than its share be served at once: without it, it is only ever
    served at the rate of its share, however seldom it comes, so beside one that floods its prompts take twice as long.
    """

    def __init__(self, credit: float = 0.0) -> None:
        """`credit` in tokens per weight: by so much others may be held up, once, for what a tenant has left them."""
        self._credit = credit
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
            self._served[tenant] = max(self._served.get(tenant, 0.0), self._floor - self._credit)
        at = len(line)
        while at > 0 and line[at - 1].order > choice.order:
            at -= 1
        line.insert(at, choice)
        self._size += 1

    def heads(self, is_privileged: Callable[[Choice], bool] = lambda _: False) -> list[Choice]:
        """The oldest choice of each waiting tenant, the least served tenant first, and of equals the privileged."""
        first = [line[0] for line in self._waiting.values()]
        return sorted(first, key=lambda head: (self._served[head.request.tenant], not is_privileged(head)))

    def soon(self, count: int) -> Iterator[Choice]:
        """The first `count` choices of each waiting tenant: all first ones, the least served tenant's first, then all
        second ones, ..."""
        lines = [self._waiting[head.request.tenant] for head in self.heads()]
        for place in range(count):
            yield from (line[place] for line in lines if place < len(line))

    def head(self, tenant: str) -> Choice | None:
        """The tenant's oldest waiting choice."""
        line = self._waiting.get(tenant)
        return line[0] if line else None

    def served(self, tenant: str) -> float:
        """Its virtual time, in tokens per weight."""
        return self._served.get(tenant, self._floor)

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
            if self._served[tenant] <= self._floor - self._credit:
                del self._served[tenant]
