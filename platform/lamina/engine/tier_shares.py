"""Who may move bytes next: fair shares of one path, by tenant, with a bound on what is under way."""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

__all__ = ["Shares"]

T = TypeVar("T", bound=Hashable)


@dataclass(slots=True)
class _Line(Generic[T]):
    """One tenant's transfers that wait, oldest first, and the virtual time at which the first of them starts."""

    starts: float
    weight: float
    waiting: deque[tuple[T, int]] = field(default_factory=deque)


class Shares(Generic[T]):
    """Start-time fair queueing (Goyal et al., 1996) over transfers of known size.

    Virtual time is bytes per weight, that of the transfer started last. A tenant's next transfer starts where its last
    one ended, or now if it was idle: idleness earns no credit, and a thousand waiting transfers of one tenant delay
    another's by no more than what is under way and one transfer of each other tenant.

    Nothing starts while it would put more than `limit` bytes under way, unless it is alone. O(log tenants) each.
    """

    def __init__(self, limit: int) -> None:
        """limit: bytes. Raises ValueError."""
        if limit < 1:
            raise ValueError(f"nothing can move within {limit} bytes")
        self.limit = limit
        self.moving = 0  # bytes under way
        self._now = 0.0
        self._lines: dict[str, _Line[T]] = {}  # of tenants with something that waits
        self._heads: list[tuple[float, int, str]] = []  # (start, serial, tenant); may have stale entries
        self._ended: dict[str, float] = {}  # where tenants without a line ended, if that is in the future
        self._sizes: dict[T, int] = {}  # of what is under way
        self._serial = itertools.count()

    def want(self, item: T, tenant: str, weight: float, size: int) -> None:
        """`item` waits for its turn. Raises ValueError for a weight or size that is not positive."""
        if not weight > 0 or size < 1:
            raise ValueError(f"not a transfer: {size} bytes of weight {weight}")
        line = self._lines.get(tenant)
        if line is None:
            starts = max(self._now, self._ended.pop(tenant, 0.0))
            line = self._lines[tenant] = _Line(starts, weight)
            self._push(tenant, line)
        line.weight = weight
        line.waiting.append((item, size))

    def start(self) -> T | None:
        """The next one, which is under way until `ended`; None if none waits, or none may start before one ends."""
        while self._heads:
            starts, _, tenant = self._heads[0]
            line = self._lines.get(tenant)
            if line is None or line.starts != starts:
                heapq.heappop(self._heads)
                continue
            item, size = line.waiting[0]
            if self.moving and self.moving + size > self.limit:
                return None
            heapq.heappop(self._heads)
            line.waiting.popleft()
            self._now = starts
            line.starts += size / line.weight
            self._go_on(tenant, line)
            self.moving += size
            self._sizes[item] = size
            return item
        return None

    def ended(self, item: T) -> None:
        """What was started has ended. Nothing happens if it was not under way."""
        self.moving -= self._sizes.pop(item, 0)

    def set_aside(self, item: T) -> int:
        """What was started cannot use its turn now: others may start meanwhile. Its size, for `returned`."""
        size = self._sizes.pop(item)
        self.moving -= size
        return size

    def returned(self, item: T, tenant: str, weight: float, size: int) -> None:
        """What was set aside is its tenant's next again, and has cost nothing."""
        line = self._lines.get(tenant)
        if line is None:
            line = self._lines[tenant] = _Line(self._ended.pop(tenant, self._now), weight)
        line.starts -= size / line.weight
        line.waiting.appendleft((item, size))
        self._push(tenant, line)

    def withdraw(self, item: T, tenant: str) -> None:
        """`item` is not wanted any more, waiting or under way; it costs its tenant nothing if it waited. O(waiting)."""
        self.ended(item)
        line = self._lines.get(tenant)
        if line is None:
            return
        kept = deque((other, size) for other, size in line.waiting if other != item)
        if len(kept) < len(line.waiting):
            line.waiting = kept
            if not kept:
                self._close(tenant, line)

    def bytes_before(self, tenant: str, weight: float) -> float:
        """What moves before a new transfer of the tenant, about: its own, and as much of the others' as is fair."""
        own = self._waiting(tenant)
        others = [name for name in self._lines if name != tenant]
        fair = own * sum(self._lines[name].weight for name in others) / weight
        return self.moving + own + min(fair, sum(map(self._waiting, others)))

    def _waiting(self, tenant: str) -> int:
        line = self._lines.get(tenant)
        return 0 if line is None else sum(size for _, size in line.waiting)

    def _go_on(self, tenant: str, line: _Line[T]) -> None:
        if line.waiting:
            self._push(tenant, line)
        else:
            self._close(tenant, line)

    def _push(self, tenant: str, line: _Line[T]) -> None:
        heapq.heappush(self._heads, (line.starts, next(self._serial), tenant))

    def _close(self, tenant: str, line: _Line[T]) -> None:
        del self._lines[tenant]
        self._ended = {name: ended for name, ended in self._ended.items() if ended > self._now}
        if line.starts > self._now:
            self._ended[tenant] = line.starts
