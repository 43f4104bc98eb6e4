"""Namespaces by how far they are over their shares, without looking at all of them whenever somebody asks."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator

__all__ = ["OverShares"]

_SLACK = 256  # changed namespaces beyond the ranked ones before all are looked at, so that a look is paid for by many


class OverShares:
    """Those that have something to give, furthest over their shares first, by name among equals.

    A change only notes that a namespace has to be looked at again; the next question finds its new place by binary
    search in a sorted list. So a question costs O(log namespaces) comparisons for each namespace that has changed,
    however many have not. (The list is moved by eight bytes a namespace behind that place: of ten thousand namespaces a
    microsecond or two. In return a walk in order costs what a list's does.)

    Where nobody asks, names that come and go would add up: once more are noted than have a rank, by a margin, `changed`
    looks at all of them itself. So it is O(log namespaces) amortised, and mostly one addition to a set.
    """

    def __init__(self, over_share: Callable[[str], float | None]) -> None:
        """`over_share(namespace)`: how far it is over, in units per weight; None: it has nothing to give."""
        self._over_share = over_share
        self._order: list[tuple[float, str]] = []  # ranks, which are negated shares, and namespaces
        self._ranks: dict[str, float] = {}  # the same by namespace
        self._changed: set[str] = set()

    def changed(self, namespace: str) -> None:
        """What `over_share` says of it may be another number by now. It may be called before this returns."""
        self._changed.add(namespace)
        if len(self._changed) > len(self._order) + _SLACK:
            self._up_to_date()

    def first(self) -> str | None:
        """The one furthest over; None: nobody has anything to give."""
        order = self._up_to_date()
        return order[0][1] if order else None

    def __iter__(self) -> Iterator[tuple[float, str]]:
        """Each with its share negated, so that smaller goes first. To be ended before anything changes or is asked."""
        return iter(self._up_to_date())

    def _up_to_date(self) -> list[tuple[float, str]]:
        if len(self._changed) > len(self._order):  # as when policy is loaded
            for namespace in self._changed:
                self._rank(namespace)
            self._order = sorted((rank, namespace) for namespace, rank in self._ranks.items())
        else:
            for namespace in self._changed:
                self._move(namespace)
        self._changed.clear()
        return self._order

    def _move(self, namespace: str) -> None:
        before = self._ranks.get(namespace)
        after = self._rank(namespace)
        if before == after:
            return
        if before is not None:
            del self._order[bisect_left(self._order, (before, namespace))]
        if after is not None:
            insort(self._order, (after, namespace))

    def _rank(self, namespace: str) -> float | None:
        over = self._over_share(namespace)
        if over is None:
            self._ranks.pop(namespace, None)
            return None
        rank = self._ranks[namespace] = -over
        return rank
