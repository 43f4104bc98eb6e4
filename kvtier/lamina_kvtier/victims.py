"""Which stored blocks may be evicted, oldest first: of all, and of each namespace. And who decides whose goes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

from lamina_kvtier.rings import Rings

__all__ = ["LeastRecent", "ReclaimPolicy", "Victims", "VictimsView"]


class VictimsView(Protocol):
    """What a policy may ask. All of it is O(1) but iteration."""

    def __len__(self) -> int: ...

    def oldest_namespace(self) -> str | None:
        """Whose victim is the least recently used of all; None if there are none."""
        ...

    def count(self, namespace: str) -> int: ...

    def namespaces(self) -> Iterator[str]:
        """Those with at least one victim."""
        ...


class ReclaimPolicy(Protocol):
    """Whose block goes when room is needed. `used`: slots by namespace, pinned ones and those being written included.

    The tier asks before every slot that it takes; answers must be O(namespaces) at most and change no slot. And it
    tells what becomes of each slot, for policies that keep accounts: took, then rested and woke in turn, then freed.
    """

    def may_grow(self, namespace: str, used: Mapping[str, int]) -> bool:
        """Whether it may have one more slot. If not, its own oldest victim makes room, or nothing is stored."""
        ...

    def victim(self, requester: str, used: Mapping[str, int], victims: VictimsView) -> str | None:
        """Whose oldest victim goes when no slot is free; None: nobody's, nothing is stored."""
        ...

    def promises(self, namespace: str) -> bool:
        """Whether it has a quota: then what it lost is remembered even while it has nothing here."""
        ...

    def took(self, slot: int, namespace: str) -> None:
        """A free slot is the namespace's from now on, and in use."""
        ...

    def rested(self, slot: int) -> None:
        """It may be evicted from now on."""
        ...

    def woke(self, slot: int) -> None:
        """It may not any more."""
        ...

    def freed(self, slot: int) -> None:
        """It was in use and is free."""
        ...


class LeastRecent:
    """No quotas: the least recently used block goes, whoever paid for it."""

    def may_grow(self, namespace: str, used: Mapping[str, int]) -> bool:
        return True

    def victim(self, requester: str, used: Mapping[str, int], victims: VictimsView) -> str | None:
        return victims.oldest_namespace()

    def promises(self, namespace: str) -> bool:
        return False

    def took(self, slot: int, namespace: str) -> None:
        """Keeps no accounts."""

    def rested(self, slot: int) -> None:
        """Keeps no accounts."""

    def woke(self, slot: int) -> None:
        """Keeps no accounts."""

    def freed(self, slot: int) -> None:
        """Keeps no accounts."""


class Victims:
    """Slots that may be evicted, each in two rings: everybody's and its namespace's. O(1) but for iteration."""

    __slots__ = ("_counts", "_everybodys", "_length", "_namespaces", "_order", "_own", "_owners")

    def __init__(self, size: int) -> None:
        self._order = Rings(size)
        self._everybodys = self._order.open()
        self._own = Rings(size)
        self._owners: dict[str, int] = {}  # namespace -> its ring, if it has victims
        self._counts: dict[str, int] = {}
        self._namespaces: dict[int, str] = {}  # slot -> namespace
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __contains__(self, slot: int) -> bool:
        return slot in self._order

    def __iter__(self) -> Iterator[int]:
        """Next victim first, by age alone."""
        return self._order.walk(self._everybodys)

    def __reversed__(self) -> Iterator[int]:
        """Last victim first."""
        return self._order.walk_back(self._everybodys)

    def oldest(self, namespace: str) -> int | None:
        ring = self._owners.get(namespace)
        return None if ring is None else self._own.first(ring)

    def oldest_namespace(self) -> str | None:
        slot = self._order.first(self._everybodys)
        return None if slot is None else self._namespaces[slot]

    def count(self, namespace: str) -> int:
        return self._counts.get(namespace, 0)

    def namespaces(self) -> Iterator[str]:
        return iter(self._counts)

    def push_back(self, slot: int, namespace: str) -> None:
        """The last victim from now on."""
        self._order.push_back(self._everybodys, slot)
        self._own.push_back(self._count(slot, namespace), slot)

    def push_front(self, slot: int, namespace: str) -> None:
        """The next victim from now on."""
        self._order.push_front(self._everybodys, slot)
        self._own.push_front(self._count(slot, namespace), slot)

    def remove(self, slot: int) -> None:
        self._order.remove(slot)
        self._own.remove(slot)
        self._length -= 1
        namespace = self._namespaces.pop(slot)
        left = self._counts[namespace] - 1
        if left:
            self._counts[namespace] = left
        else:
            del self._counts[namespace]
            self._own.close(self._owners.pop(namespace))

    def _count(self, slot: int, namespace: str) -> int:
        self._length += 1
        self._namespaces[slot] = namespace
        self._counts[namespace] = self._counts.get(namespace, 0) + 1
        ring = self._owners.get(namespace)
        if ring is None:
            ring = self._owners[namespace] = self._own.open()
        return ring

    def violations(self) -> list[str]:
        """Where the rings and counters disagree, one sentence each. O(size)."""
        everybody = self._order.members(self._everybodys)
        if everybody is None:
            return ["victims: everybody's ring is broken"]
        found: list[str] = []
        if not len(everybody) == self._length == len(self._namespaces) == self._order.present() == self._own.present():
            found.append(f"victims: {len(everybody)} are queued, but {self._length} were counted")
        if self._counts.keys() != self._owners.keys():
            found.append("victims: namespaces with a ring and with a count differ")
        for namespace, ring in self._owners.items():
            own = self._own.members(ring)
            if own is None or len(own) != self._counts.get(namespace):
                found.append(f"victims: the ring of {namespace!r} is broken or miscounted")
            elif any(self._namespaces.get(slot) != namespace for slot in own):
                found.append(f"victims: the ring of {namespace!r} has another namespace's slot")
        return found
