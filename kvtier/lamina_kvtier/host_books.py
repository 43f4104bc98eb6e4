"""The state of a host tier, and the few moves that always change several of its parts together."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from lamina_kvtier.blocks import PinCounts, ReferenceCounts
from lamina_kvtier.identity import BlockId
from lamina_kvtier.prefix_index import PrefixIndex
from lamina_kvtier.tier import NO_ADAPTER, BlockKey
from lamina_kvtier.victims import ReclaimPolicy, Victims

__all__ = ["HostBooks", "Reservation"]


@dataclass(frozen=True, slots=True, eq=False)
class Reservation:
    """A slot that its owner may write, until it commits or abandons it: exactly once."""

    slot: int
    key: BlockKey


class HostBooks:
    """What `HostTier` knows. Only it changes anything here; `host_integrity` proves that the parts agree."""

    def __init__(self, num_slots: int, policy: ReclaimPolicy) -> None:
        self.policy = policy  # is told of every move
        self.free = list(range(num_slots - 1, -1, -1))  # lowest last: neighbours are handed out together
        self.keys: list[BlockKey | None] = [None] * num_slots  # of all slots that are not free
        self.writing: dict[int, Reservation] = {}
        self.arriving: dict[BlockId, int] = {}  # being written, and still wanted: identity -> slot
        self.index = PrefixIndex(num_slots)  # what can be found
        self.holds = ReferenceCounts(num_slots)
        self.touched: set[int] = set()  # held slots that somebody has used since they were held first
        self.pins = PinCounts()  # leases by who pays and identity, also of blocks that are not here
        self.victims = Victims(num_slots)  # known, not held, not pinned
        self.charged: dict[str, int] = {}  # slots by namespace, but for free ones
        self.made: Counter[bytes] = Counter()  # those by the adapter that computed them, without the base model's

    def key_at(self, slot: int) -> BlockKey:
        key = self.keys[slot]
        assert key is not None
        return key

    def is_pinned(self, key: BlockKey) -> bool:
        """Whether whoever pays for the block has a lease on it."""
        return self.pins.has(key.namespace, key.id)

    def occupy(self, slot: int, key: BlockKey) -> Reservation:
        """`slot`, just taken from `free`, will be written."""
        self.keys[slot] = key
        self.arriving[key.id] = slot
        self.charged[key.namespace] = self.charged.get(key.namespace, 0) + 1
        if key.adapter != NO_ADAPTER:
            self.made[key.adapter] += 1
        self.policy.took(slot, key.namespace)
        reservation = self.writing[slot] = Reservation(slot, key)
        return reservation

    def vacate(self, slot: int) -> None:
        """`slot` is free from now on; it must be neither known nor held nor written."""
        key = self.key_at(slot)
        namespace = key.namespace
        self.keys[slot] = None
        self.free.append(slot)
        self.charged[namespace] -= 1
        if self.charged[namespace] == 0:
            del self.charged[namespace]
        if key.adapter != NO_ADAPTER:
            self.made[key.adapter] -= 1
            if self.made[key.adapter] == 0:
                del self.made[key.adapter]
        self.policy.freed(slot)

    def queue_last(self, slot: int) -> None:
        """`slot`, known and not held, was used: the last victim, unless it is pinned."""
        key = self.key_at(slot)
        if not self.is_pinned(key):
            self.victims.push_back(slot, key.namespace)
            self.policy.rested(slot)

    def queue_first(self, slot: int) -> None:
        """`slot`, known and not held, may go: the next victim, unless it is pinned."""
        key = self.key_at(slot)
        if not self.is_pinned(key):
            self.victims.push_front(slot, key.namespace)
            self.policy.rested(slot)

    def wake(self, slot: int) -> None:
        """`slot` is no victim any more, if it was one."""
        if slot in self.victims:
            self.victims.remove(slot)
            self.policy.woke(slot)
