"""Where adapters lie in one flat pool: an extent each, as long as the adapter is, so nobody pays for another's rank.

Only numbers live here, counted in elements; `lora_table` owns the memory and carries the moves out.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import NamedTuple

from lamina_kernels.gpu.lora_layout import ALIGN, padded

__all__ = ["ExtentPool", "Move", "PoolCorrupt"]


class PoolCorrupt(Exception):
    """The bookkeeping of a pool contradicts itself."""


class Move(NamedTuple):
    """Copy [source, source + length) to [target, target + length); moves only go down: target < source."""

    source: int
    target: int
    length: int

    @property
    def overlaps(self) -> bool:
        """Whether one copy would write what it has yet to read, so that it must go through a third place."""
        return self.target + self.length > self.source

    def pieces(self, limit: int) -> Iterator[Move]:
        """The same move in steps of at most `limit` elements, lowest first: none touches what a later one reads."""
        for done in range(0, self.length, limit):
            yield Move(self.source + done, self.target + done, min(limit, self.length - done))


class ExtentPool:
    """Disjoint extents of [0, capacity), each a multiple of ALIGN long and starting at one.

    A free list would have to be merged and split; the extents in order say the same, since free space is whatever lies
    between two of them. There are as many as loaded adapters, so a walk over all costs microseconds.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 0:
            raise ValueError(f"capacity is {capacity} elements; it cannot be negative")
        self.capacity = capacity - capacity % ALIGN
        self._starts: list[int] = []  # ascending
        self._lengths: dict[int, int] = {}  # by start

    @property
    def starts(self) -> tuple[int, ...]:
        """First elements of all extents, ascending."""
        return tuple(self._starts)

    @property
    def used(self) -> int:
        """Elements in extents."""
        return sum(self._lengths.values())

    @property
    def unused(self) -> int:
        """Elements in no extent; one allocation can have them all after `compaction`."""
        return self.capacity - self.used

    def allocate(self, elements: int) -> int | None:
        """The first element of a new extent in the smallest hole that holds it; None if no hole does."""
        if elements < 1:
            raise ValueError(f"an extent has at least 1 element, not {elements}")
        length = padded(elements)
        start = min(((size, at) for at, size in self._holes() if size >= length), default=(0, None))[1]
        if start is not None:
            insort(self._starts, start)
            self._lengths[start] = length
        return start

    def free(self, start: int) -> None:
        """Gives an extent back; KeyError if none starts there."""
        del self._lengths[start]
        del self._starts[bisect_left(self._starts, start)]

    def compaction(self) -> list[Move]:
        """Slides every extent down, so that all free space is one hole at the end; carry the moves out in this order.

        The extents have their new starts at once: the one at `move.source` is at `move.target` from now on.
        """
        moves, end = [], 0
        for start in self._starts:
            length = self._lengths[start]
            if start != end:
                moves.append(Move(start, end, length))
            end += length
        for source, target, length in moves:
            del self._lengths[source]
            self._lengths[target] = length
        self._starts = sorted(self._lengths)
        return moves

    def check_integrity(self) -> None:
        """Raises PoolCorrupt unless extents are aligned, disjoint and inside the pool, each known under one start."""
        if self._starts != sorted(self._lengths):
            raise PoolCorrupt(f"starts {self._starts} and lengths {self._lengths} name different extents")
        end = 0
        for start in self._starts:
            length = self._lengths[start]
            if start % ALIGN or length % ALIGN or length < 1:
                raise PoolCorrupt(f"the extent of {length} elements at {start} is not aligned")
            if start < end:
                raise PoolCorrupt(f"the extent at {start} begins inside the one before it, which ends at {end}")
            end = start + length
        if end > self.capacity:
            raise PoolCorrupt(f"extents end at {end}, the pool at {self.capacity}")

    def _holes(self) -> Iterator[tuple[int, int]]:
        """(start, length) of each, possibly empty, stretch between two extents."""
        end = 0
        for start in self._starts:
            yield end, start - end
            end = start + self._lengths[start]
        yield end, self.capacity - end
