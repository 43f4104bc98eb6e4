"""Counts by namespace and reason that only grow, in bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

__all__ = ["FOLDED", "MAX_NAMESPACES", "NamespaceCounts"]

FOLDED = ""  # the namespace of those that were folded
MAX_NAMESPACES = 4096
_SLACK = 256  # namespaces beyond the bound before somebody looks, so that a look is paid for by many

R = TypeVar("R")


class NamespaceCounts(Mapping[tuple[str, R], int]):
    """A mapping from (namespace, reason) to a count.

    Of more than `most` namespaces the longest known ones that `keeps` says no to are folded into `FOLDED`, so sums
    over all of them stay right. `add` is O(1) amortised, as long as not more than `most` are to be kept.
    """

    def __init__(self, keeps: Callable[[str], bool], *, most: int = MAX_NAMESPACES) -> None:
        """`keeps(namespace)`: whether it has anything yet, or is promised something."""
        self._keeps, self._most = keeps, most
        self._counts: dict[str, dict[R, int]] = {}  # longest known first
        self._bound = most + _SLACK

    def add(self, namespace: str, reason: R, count: int = 1) -> None:
        """So many more."""
        own = self._counts.setdefault(namespace, {})
        own[reason] = own.get(reason, 0) + count
        if len(self._counts) > self._bound:
            self._fold(newest=namespace)

    def _fold(self, *, newest: str) -> None:
        excess = len(self._counts) - self._most
        for namespace in list(self._counts):
            if excess <= 0:
                break
            if namespace in (FOLDED, newest) or self._keeps(namespace):
                continue
            total = self._counts.setdefault(FOLDED, {})
            for reason, count in self._counts.pop(namespace).items():
                total[reason] = total.get(reason, 0) + count
            excess -= 1
        self._bound = max(self._most, len(self._counts)) + _SLACK

    def __getitem__(self, key: tuple[str, R]) -> int:
        """0 for what was never counted."""
        namespace, reason = key
        return self._counts.get(namespace, {}).get(reason, 0)

    def __contains__(self, key: object) -> bool:
        return key in set(self)

    def __iter__(self) -> Iterator[tuple[str, R]]:
        return ((namespace, reason) for namespace, own in self._counts.items() for reason in own)

    def __len__(self) -> int:
        return sum(map(len, self._counts.values()))
