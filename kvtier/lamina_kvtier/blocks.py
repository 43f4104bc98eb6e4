"""Blocks by number: who is held how often, and the values that the manager hands out."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from lamina_kvtier.errors import BlockMisuse

__all__ = ["BlockUsage", "CopyOnWrite", "PrefixMatch", "ReferenceCounts"]


@dataclass(frozen=True, slots=True)
class BlockUsage:
    """Blocks by state; free + active + cached == total."""

    total: int
    free: int
    active: int
    cached: int


@dataclass(frozen=True, slots=True)
class CopyOnWrite:
    """An order to the caller: copy block `source` to block `target`, then put `target` into the table."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """A known prefix, in blocks. `cached` of them are held by nobody: acquiring those uses up available blocks."""

    known: int
    cached: int


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
