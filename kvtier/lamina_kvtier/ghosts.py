"""Blocks that were evicted lately: why, and how much more room would have kept them.

    evicted ──▶ [ 1/8 ]──▶[ 1/8 ]──▶[ 1/4 ]──▶[ 1/2 ] ──▶ forgotten        of the tier's capacity
                 +1/8      +1/4      +1/2      +1

Least recently used order has the inclusion property: a tier with X more blocks holds what this one holds and the X
blocks that it evicted last. So a miss that is found in a segment would have been a hit with as much more room as the
segments up to there. (Exact under least recently used order, an estimate under quotas.)
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from lamina_kvtier.identity import BlockId
from lamina_kvtier.reasons import Reason

__all__ = ["Ghost", "Ghosts", "segments_for"]


@dataclass(frozen=True, slots=True)
class Ghost:
    """A block that was evicted: why, and with how many more blocks of room it would still be there, at most."""

    reason: Reason
    extra_blocks: int


def segments_for(capacity: int) -> list[int]:
    """Sizes that remember as many evicted blocks as the tier has: +1/8, +1/4, +1/2 and twice the room."""
    eighth = max(1, capacity // 8)
    return [eighth, eighth, 2 * eighth, 4 * eighth]


class Ghosts:
    """Bounded by the sum of its segments; O(segments) per operation."""

    def __init__(self, sizes: Sequence[int]) -> None:
        """sizes: blocks per segment, most recent first. Raises ValueError."""
        if any(size < 1 for size in sizes):
            raise ValueError(f"segments have at least one block, not {list(sizes)}")
        self._sizes = tuple(sizes)
        # Ordered, because taking the first key of a plain dict again and again is quadratic.
        self._segments: list[OrderedDict[BlockId, Reason]] = [OrderedDict() for _ in sizes]

    def __len__(self) -> int:
        return sum(map(len, self._segments))

    @property
    def rooms(self) -> list[int]:
        """What `Ghost.extra_blocks` can be, smallest first."""
        return list(accumulate(self._sizes))

    def add(self, identity: BlockId, reason: Reason) -> None:
        """`identity` was evicted just now. What no longer fits into a segment moves on to the next."""
        self.discard(identity)
        for segment, size in zip(self._segments, self._sizes, strict=True):
            segment[identity] = reason
            if len(segment) <= size:
                return
            identity, reason = segment.popitem(last=False)

    def discard(self, identity: BlockId) -> None:
        """It is stored again."""
        for segment in self._segments:
            if segment.pop(identity, None) is not None:
                return

    def find(self, identity: BlockId) -> Ghost | None:
        extra = 0
        for segment, size in zip(self._segments, self._sizes, strict=True):
            extra += size
            reason = segment.get(identity)
            if reason is not None:
                return Ghost(reason, extra)
        return None
