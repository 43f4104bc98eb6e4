"""Many queues over the same slots, in two arrays: `free_list.FreeList`, for as many owners as there are."""

from __future__ import annotations

from array import array
from collections.abc import Iterator

__all__ = ["Rings"]

_ABSENT = -1


class Rings:
    """Slots 0 ... size - 1, each in at most one ring. Every operation but iteration is O(1).

    A ring is named by its sentinel, an entry behind the slots' that closes it, so that no operation has a special
    case. The caller keeps the rules: push only what is absent, remove only what is present, close only empty rings.
    """

    __slots__ = ("_closed", "_following", "_previous", "_size")

    def __init__(self, size: int) -> None:
        self._size = size
        self._following: array[int] = array("i", [_ABSENT]) * size
        self._previous: array[int] = array("i", [_ABSENT]) * size
        self._closed: list[int] = []  # sentinels to use again

    def open(self) -> int:
        """A new, empty ring."""
        if self._closed:
            ring = self._closed.pop()
        else:
            ring = len(self._following)
            self._following.append(ring)
            self._previous.append(ring)
        return ring

    def close(self, ring: int) -> None:
        self._closed.append(ring)

    def __contains__(self, slot: int) -> bool:
        return self._following[slot] != _ABSENT

    def first(self, ring: int) -> int | None:
        slot = self._following[ring]
        return None if slot == ring else slot

    def walk(self, ring: int) -> Iterator[int]:
        """First to last. O(length)."""
        slot = self._following[ring]
        while slot != ring:
            yield slot
            slot = self._following[slot]

    def walk_back(self, ring: int) -> Iterator[int]:
        """Last to first. O(length)."""
        slot = self._previous[ring]
        while slot != ring:
            yield slot
            slot = self._previous[slot]

    def push_front(self, ring: int, slot: int) -> None:
        self._link(ring, slot, self._following[ring])

    def push_back(self, ring: int, slot: int) -> None:
        self._link(self._previous[ring], slot, ring)

    def remove(self, slot: int) -> None:
        """Takes `slot` out of whatever ring it is in."""
        before, after = self._previous[slot], self._following[slot]
        self._following[before], self._previous[after] = after, before
        self._following[slot] = self._previous[slot] = _ABSENT

    def members(self, ring: int) -> list[int] | None:
        """As `walk`, but None if the ring is broken, and it ends even then. O(length)."""
        found: list[int] = []
        at = ring
        while len(found) <= self._size:
            after = self._following[at]
            if after == _ABSENT or self._previous[after] != at:
                return None
            if after == ring:
                return found
            found.append(after)
            at = after
        return None

    def present(self) -> int:
        """How many slots are in rings. O(size)."""
        return sum(self._following[slot] != _ABSENT for slot in range(self._size))

    def _link(self, before: int, slot: int, after: int) -> None:
        self._following[before] = self._previous[after] = slot
        self._previous[slot], self._following[slot] = before, after
