"""Blocks by number: who is held how often, what is pinned, and the values that the manager hands out."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lamina_kvtier.errors import BlockMisuse
from lamina_kvtier.identity import BlockId

__all__ = ["BlockUsage", "CopyOnWrite", "PinCounts", "PrefixMatch", "ReferenceCounts"]


@dataclass(frozen=True, slots=True)
class BlockUsage:
    """Blocks by state; free + active + cached == total. `pinned` of the cached ones cannot be evicted."""

    total: int
    free: int
    active: int
    cached: int
    pinned: int = 0


@dataclass(frozen=True, slots=True)
class CopyOnWrite:
    """An order to the caller: copy block `source` to block `target`, then put `target` into the table."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """A known prefix, in blocks.

    `cached` of them may be evicted: acquiring those uses up available blocks. `pinned` of them are pinned, held or
    not, so they stay. The others are held by somebody and cost nothing more as long as they are.
    """

    known: int
    cached: int
    pinned: int = 0


class PinCounts:
    """How many leases each identity has. A pin is on contents: whatever block has them is kept.

    An identity is pinned for one namespace, and only for blocks that this namespace pays for: else a tenant could
    keep the operator's public blocks, beyond the operator's own pin quota.
    """

    __slots__ = ("_counts",)

    def __init__(self) -> None:
        self._counts: dict[tuple[str, BlockId], int] = {}

    def __len__(self) -> int:
        return len(self._counts)

    def __iter__(self) -> Iterator[tuple[str, BlockId]]:
        return iter(self._counts)

    def has(self, namespace: str, identity: BlockId) -> bool:
        return (namespace, identity) in self._counts

    def count(self, namespace: str, identity: BlockId) -> int:
        return self._counts.get((namespace, identity), 0)

    def add(self, namespace: str, identity: BlockId) -> bool:
        """Adds a lease; True if it is the first."""
        count = self._counts.get((namespace, identity), 0)
        self._counts[namespace, identity] = count + 1
        return count == 0

    def drop(self, namespace: str, identity: BlockId) -> bool:
        """Takes one lease away; True if it was the last."""
        self._counts[namespace, identity] -= 1
        last = self._counts[namespace, identity] == 0
        if last:
            del self._counts[namespace, identity]
        return last

    def require_droppable(self, namespace: str, ids: Sequence[BlockId]) -> None:
        """Raises BlockMisuse unless each identity has as many leases as `ids` names it."""
        for identity, times in Counter(ids).items():
            count = self._counts.get((namespace, identity), 0)
            if times > count:
                raise BlockMisuse(f"Cannot unpin {identity.hex()[:12]} {times} times: it has {count} leases.")


class ReferenceCounts:
    """How many table entries hold each block. Blocks with at least one are *active*."""

    __slots__ = ("_counts", "active")

    def __init__(self, num_blocks: int) -> None:
        self._counts = array("i", bytes(num_blocks * array("i").itemsize))
        self.active = 0

    def __len__(self) -> int:
        return len(self._counts)

    def __getitem__(self, block: int) -> int:
        return self._counts[block]

    def hold(self, block: int) -> bool:
        """Adds a reference; True if it is the first."""
        self._counts[block] += 1
        first = self._counts[block] == 1
        self.active += first
        return first

    def drop(self, block: int) -> bool:
        """Takes one reference of an active block; True if it was the last."""
        self._counts[block] -= 1
        last = self._counts[block] == 0
        self.active -= last
        return last

    def require_active(self, blocks: Sequence[int], verb: str) -> None:
        """Raises BlockMisuse unless each block exists and is held. `verb` says what was attempted."""
        for block in blocks:
            if not 0 <= block < len(self._counts):
                raise BlockMisuse(f"Cannot {verb} block {block}: numbers are 0 ... {len(self) - 1}.", block=block)
            if self._counts[block] == 0:
                raise BlockMisuse(f"Cannot {verb} block {block}: nobody holds it.", block=block)

    def require_droppable(self, blocks: Sequence[int]) -> None:
        """Raises BlockMisuse unless each block has as many references as `blocks` names it."""
        self.require_active(blocks, "release")
        if len(set(blocks)) == len(blocks):
            return
        for block, times in Counter(blocks).items():
            if times > self._counts[block]:
                raise BlockMisuse(
                    f"Cannot release block {block} {times} times: it has {self._counts[block]} references.",
                    block=block,
                )
