"""The queue of blocks that nobody holds, next victim first: a doubly linked list in two arrays."""

from __future__ import annotations

from array import array
from collections.abc import Iterator

__all__ = ["FreeList"]

_ABSENT = -1


class FreeList:
    """Block numbers 0 ... size - 1 in an order, each at most once; every operation but iteration is O(1).

    At first all blocks are in it, in ascending order. Arrays of machine integers instead of node objects: a
    million blocks take 8 MB and give the garbage collector nothing to walk. The caller keeps the rules (push
    only what is absent, remove only what is present, pop only when not empty).
    """

    __slots__ = ("_end", "_following", "_length", "_previous")

    def __init__(self, size: int) -> None:
        # Entry `size` is a sentinel that closes the list to a ring, so that no operation has a special case.
        self._end = size
        self._following: array[int] = array("i", [*range(1, size + 1), 0])
        self._previous: array[int] = array("i", [size, *range(size)])
        self._length = size

    def __len__(self) -> int:
        return self._length

    def __contains__(self, block: int) -> bool:
        return self._following[block] != _ABSENT

    def __iter__(self) -> Iterator[int]:
        """Next victim first. O(length)."""
        block = self._following[self._end]
        while block != self._end:
            yield block
            block = self._following[block]

    def push_front(self, block: int) -> None:
        """Makes `block` the next victim."""
        self._link(self._end, block, self._following[self._end])

    def push_back(self, block: int) -> None:
        """Makes `block` the last victim."""
        self._link(self._previous[self._end], block, self._end)

    def pop_front(self) -> int:
        """Takes the next victim out."""
        block = self._following[self._end]
        self.remove(block)
        return block

    def remove(self, block: int) -> None:
        """Takes `block` out, wherever it stands."""
        before, after = self._previous[block], self._following[block]
        self._following[before] = after
        self._previous[after] = before
        self._following[block] = self._previous[block] = _ABSENT
        self._length -= 1

    def broken_links(self) -> list[str]:
        """What is wrong with the ring itself, one sentence each. Ends even if the ring is broken. O(size)."""
        found: list[str] = []
        at, steps = self._end, 0
        while steps <= self._length:
            after = self._following[at]
            if after == _ABSENT or self._previous[after] != at:
                found.append(f"free list: the link from {at} to {after} has no way back")
                break
            at, steps = after, steps + 1
            if at == self._end:
                break
        if at != self._end or steps != self._length + 1:
            found.append(f"free list: it claims {self._length} blocks, but its ring does not close after them")
        return found + self._strays()

    def _strays(self) -> list[str]:
        present = sum(link != _ABSENT for link in self._following) - 1
        if present != self._length:
            return [f"free list: {present} blocks are linked, but it claims {self._length}"]
        return []

    def _link(self, before: int, block: int, after: int) -> None:
        self._following[before] = self._previous[after] = block
        self._previous[block], self._following[block] = before, after
        self._length += 1
