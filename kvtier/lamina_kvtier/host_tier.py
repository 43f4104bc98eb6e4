"""The host tier: which block lies in which slot of the host arena, and which one goes when room is needed.

                reserve                 commit                    hold
        free ───────────▶ writing ──────────────────▶ cached ◀──────────▶ held
         ▲                   │ abandon                  │      release      │
         ├───────────────────┘                          │                   │ forget, then release
         ├──────────────────────────────────────────────┘ evict, forget     │
         └──────────────────────────────────────────────────────────────────┘

It touches no memory: the arena is `HostBlocks`, and `BlockMover` and the tiers below move the bytes. What they are
owed is what the states say: a slot being written is neither found nor reused, a held one (promoted, or written to a
tier below) is not reused, a pinned one (whoever pays for it has a lease on its identity) is never evicted.

    free + writing + held + cached (evictable) + pinned (and not held) == total
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from lamina_kvtier.errors import BlockMisuse, IntegrityError
from lamina_kvtier.ghosts import Ghost, Ghosts, segments_for
from lamina_kvtier.host_books import HostBooks, Reservation
from lamina_kvtier.host_integrity import find_violations
from lamina_kvtier.identity import BlockId
from lamina_kvtier.namespace_counts import NamespaceCounts
from lamina_kvtier.reasons import Reason
from lamina_kvtier.tier import BlockKey
from lamina_kvtier.victims import LeastRecent, ReclaimPolicy

__all__ = ["HostTier", "HostUsage", "PinWatcher", "Reservation"]


class PinWatcher(Protocol):
    """Hears of blocks that whoever pays for them has pinned."""

    def arrived(self, key: BlockKey) -> None:
        """It is stored, and stays while it is pinned."""
        ...

    def lost(self, key: BlockKey) -> None:
        """It was forgotten."""
        ...


@dataclass(frozen=True, slots=True)
class HostUsage:
    """Slots by state, and who pays for them (everything but free ones)."""

    total: int
    free: int
    writing: int
    held: int
    cached: int
    pinned: int
    bytes_by_namespace: dict[str, int]


class HostTier:
    """Slots 0 ... num_slots - 1 of `block_bytes` bytes, found by identity.

    Lists of slots and identities are in a table's order, head first; whatever is let go is let go tail first, so
    that a prefix shrinks from its end and never loses its head before its tail. To keep that true a caller who stores
    what follows a known prefix holds that from before it reserves until after it commits, or stores tail first.

    Every method is O(1) per block it names or returns (for a policy that is), except `clear`, `forget_where`, `usage`
    and `check_integrity`. Misuse raises BlockMisuse and changes nothing. Not thread-safe: one scheduler owns it.
    """

    def __init__(
        self,
        num_slots: int,
        block_bytes: int,
        *,
        policy: ReclaimPolicy | None = None,
        ghosts: Ghosts | None = None,
        seal: Callable[[int], int] | None = None,
    ) -> None:
        """Raises BlockMisuse. policy: whose block goes; default: the least recently used, whoever pays for it.

        seal: a checksum of what lies in a slot, taken when it is committed and compared by `broken`.
        """
        if num_slots < 0 or block_bytes < 1:
            raise BlockMisuse(f"No host tier has {num_slots} slots of {block_bytes} bytes.")
        self.num_slots, self.block_bytes = num_slots, block_bytes
        self.evictions: NamespaceCounts[Reason] = NamespaceCounts(self._knows)  # blocks lost, by namespace
        self.refusals: NamespaceCounts[Reason] = NamespaceCounts(self._knows)  # blocks not stored for want of room
        self._policy = LeastRecent() if policy is None else policy
        self._ghosts = Ghosts(segments_for(num_slots)) if ghosts is None else ghosts
        self._books = HostBooks(num_slots, self._policy)
        self._watcher: PinWatcher | None = None
        self._seal = seal
        self._seals: dict[int, int] = {}  # by committed slot, until it is committed again

    # What is there

    def find(self, ids: Iterable[BlockId]) -> list[int]:
        """The slots of the longest known prefix of `ids`. Changes nothing, not even the order; `hold` them to use."""
        return self._books.index.known_prefix(ids)

    def knows(self, identity: BlockId) -> bool:
        """Whether it is stored, or being written right now."""
        return self._books.index.block_of(identity) is not None or identity in self._books.arriving

    def key_of(self, slot: int) -> BlockKey | None:
        """What lies in a slot, or is being written to it, or lay there until it was forgotten."""
        return self._books.keys[slot]

    def next_victims(self, count: int) -> list[tuple[int, BlockKey]]:
        """Up to `count` evictable slots, least recently used first: what to save in a tier below. O(count)."""
        found: list[tuple[int, BlockKey]] = []
        for slot in self._books.victims:
            if len(found) >= count:
                break
            found.append((slot, self._books.key_at(slot)))
        return found

    def newest(self, count: int) -> list[int]:
        """Up to `count` evictable slots, most recently used first, so heads before tails. O(count)."""
        return list(islice(reversed(self._books.victims), count))

    # Storing: two phases

    def reserve(self, keys: Sequence[BlockKey]) -> list[Reservation | None]:
        """A slot for each block that is not there yet; makes room by evicting. In the table's order.

        None: it `knows` the block already (which counts as a use), or the policy gives no room for it (counted in
        `refusals`). No block of `keys` is evicted for another one of them.
        """
        with self._kept(keys):
            return [self._reserve(key) for key in keys]

    def reserve_beside_others(
        self, keys: Sequence[BlockKey], spare: Callable[[BlockId], bool] = lambda _: False
    ) -> list[Reservation | None]:
        """As `reserve`, but out of free slots and the namespace's own: nobody else loses a block for these, but for one
        that the policy names and that is `spare`: whoever loses it finds it in a tier below.

        All are of one namespace. None: known already, or there is no such room for it, nor for those after it; that is
        not counted as a refusal.
        """
        given: list[Reservation | None] = []
        with self._kept(keys):
            for key in keys:
                if not self.knows(key.id) and not self._has_room_beside_others(key.namespace, spare):
                    break
                given.append(self._reserve(key))
        return [*given, *[None] * (len(keys) - len(given))]

    def commit(self, reservations: Sequence[Reservation]) -> None:
        """They are written: found from now on, unless forgotten meanwhile. In the table's order."""
        self._end(reservations)
        for reservation in reversed(reservations):
            slot, identity = reservation.slot, reservation.key.id
            if self._books.arriving.get(identity) != slot:  # forgotten since
                self._books.vacate(slot)
                continue
            del self._books.arriving[identity]
            if self._seal is not None:
                self._seals[slot] = self._seal(slot)
            self._books.index.insert(slot, identity)
            self._books.queue_last(slot)
            if self._watcher is not None and self._books.is_pinned(reservation.key):
                self._watcher.arrived(reservation.key)

    def abandon(self, reservations: Sequence[Reservation]) -> None:
        """They will not be written, and nobody writes there any more."""
        self._end(reservations)
        for reservation in reversed(reservations):
            if self._books.arriving.get(reservation.key.id) == reservation.slot:
                del self._books.arriving[reservation.key.id]
            self._books.vacate(reservation.slot)

    # Using

    def hold(self, slots: Sequence[int]) -> None:
        """One more reference on each: it is read, by a promotion or by a tier below, and not reused."""
        for slot in slots:
            if not 0 <= slot < self.num_slots or self._books.index.identity_of(slot) is None:
                raise BlockMisuse(f"Cannot hold slot {slot}: no known block is in it.", block=slot)
        for slot in slots:
            if self._books.holds.hold(slot):
                self._books.wake(slot)

    def release(self, slots: Sequence[int]) -> None:
        """Drops one reference on each: they were used, and are the last victims from now on, tail before head."""
        self._books.holds.require_droppable(slots)
        self._books.touched.update(slots)
        for slot in reversed(slots):
            self._drop(slot)

    def put_back(self, slots: Sequence[int]) -> None:
        """Drops one reference on each: they were not used, or are not needed here any more.

        They are the next victims from now on, tail before head (unless somebody else who held them used them, or
        uses them). So it ends the writing of `next_victims` to a tier below (given in reverse: those come tail
        first), and it ends a promotion if tiers are to be exclusive: the slot is reused as soon as one is needed,
        even before a tail that was not promoted, for which the tier above now has the head.
        """
        self._books.holds.require_droppable(slots)
        touched = [slot for slot in slots if slot in self._books.touched]
        for slot in slots:
            if slot not in self._books.touched:
                self._drop(slot)
        for slot in reversed(touched):
            self._drop(slot)

    # Pins

    def pin(self, ids: Iterable[BlockId], namespace: str) -> None:
        """One more lease on each identity: blocks of `namespace` that have it, now or later, are never evicted.

        Quotas for pins are the caller's to keep (`pins.py`).
        """
        for identity in ids:
            if self._books.pins.add(namespace, identity):
                slot = self._paid_by(namespace, identity)
                if slot is not None:
                    self._books.wake(slot)

    def unpin(self, ids: Sequence[BlockId], namespace: str) -> None:
        """Ends one lease on each. The last victims from now on, tail before head."""
        self._books.pins.require_droppable(namespace, ids)
        for identity in reversed(ids):
            if self._books.pins.drop(namespace, identity):
                slot = self._paid_by(namespace, identity)
                if slot is not None and self._books.holds[slot] == 0:
                    self._books.queue_last(slot)

    def is_leased(self, identity: BlockId, namespace: str) -> bool:
        """Whether `namespace` has pinned this identity, stored or not."""
        return self._books.pins.has(namespace, identity)

    def leases(self) -> Iterator[tuple[str, BlockId]]:
        """Every pinned identity and who has pinned it."""
        return iter(self._books.pins)

    def stores(self, identity: BlockId) -> bool:
        """Whether it is here and complete."""
        return self._books.index.block_of(identity) is not None

    def watch_pinned(self, watcher: PinWatcher) -> None:
        """From now on `watcher` hears when a pinned block is stored, and when one is forgotten."""
        self._watcher = watcher

    # Losing

    def forget(self, ids: Iterable[BlockId], reason: Reason) -> int:
        """Makes identities unknown, pinned ones too, and returns how many were known or being written.

        Held slots stay with their holders and become free afterwards. Pins stay leases on an identity.
        """
        forgotten = 0
        for identity in ids:
            slot = self._books.index.block_of(identity)
            if slot is not None:
                self._lose(slot, reason)
            else:
                slot = self._books.arriving.pop(identity, None)
            forgotten += slot is not None
        return forgotten

    def forget_where(self, wanted: Callable[[BlockKey], bool], reason: Reason) -> int:
        """Forgets what these keys stand for, as `forget` does. O(slots)."""
        return self.forget([key.id for key in self._books.keys if key is not None and wanted(key)], reason)

    def clear(self, reason: Reason) -> int:
        """Forgets everything, as `forget` does. O(slots)."""
        books = self._books
        known = [key.id for key in books.keys if key is not None and books.index.block_of(key.id) is not None]
        return self.forget([*known, *books.arriving], reason)

    # Explaining

    def ghost_of(self, identity: BlockId) -> Ghost | None:
        """Why this block was lost or refused, and how much more room would have kept it; None: not, or long ago."""
        return self._ghosts.find(identity)

    @property
    def ghost_rooms(self) -> list[int]:
        """What `ghost_of(...).extra_blocks` can be, smallest first."""
        return self._ghosts.rooms

    def stored(self) -> list[int]:
        """Slots whose blocks can be found, in no order. O(slots)."""
        return [slot for slot in range(self.num_slots) if self._books.index.identity_of(slot) is not None]

    def broken(self, slots: Iterable[int]) -> list[int]:
        """Of these slots, those whose block is stored, but no longer what was committed: somebody wrote over it."""
        if self._seal is None:
            return []
        known = [slot for slot in slots if self._books.index.identity_of(slot) is not None]
        return [slot for slot in known if self._seal(slot) != self._seals[slot]]

    def slots_of(self, namespace: str) -> int:
        """What a namespace pays for here, slots being written included."""
        return self._books.charged.get(namespace, 0)

    def slots_by_adapter(self) -> Mapping[bytes, int]:
        """What each adapter computed of what lies here, slots being written included; without the base model."""
        return self._books.made

    def evictable_slots_of(self, namespace: str) -> int:
        """How many of those it could lose: neither held nor pinned nor being written."""
        return self._books.victims.count(namespace)

    def pinned_by_owner(self) -> dict[str, int]:
        """Blocks that are here and pinned by who pays for them, held or not. O(pinned identities)."""
        found: Counter[str] = Counter()
        for namespace, identity in self._books.pins:
            found[namespace] += self._paid_by(namespace, identity) is not None
        return dict(found)

    def writing_by_owner(self) -> dict[str, int]:
        """Blocks that are being written. O(those)."""
        return dict(Counter(reservation.key.namespace for reservation in self._books.writing.values()))

    def usage(self) -> HostUsage:
        """O(namespaces)."""
        books = self._books
        held, cached = books.holds.active, len(books.victims)
        busy = len(books.free) + len(books.writing) + held + cached
        return HostUsage(
            total=self.num_slots,
            free=len(books.free),
            writing=len(books.writing),
            held=held,
            cached=cached,
            pinned=self.num_slots - busy,
            bytes_by_namespace={namespace: slots * self.block_bytes for namespace, slots in books.charged.items()},
        )

    def check_integrity(self) -> None:
        """Proves every rule of the bookkeeping; raises IntegrityError with all broken ones. O(num_slots)."""
        violations = find_violations(self._books)
        if violations:
            raise IntegrityError(violations)

    # Inside

    def _knows(self, namespace: str) -> bool:
        return namespace in self._books.charged or self._policy.promises(namespace)

    def _paid_by(self, namespace: str, identity: BlockId) -> int | None:
        """The slot that is known by `identity`, if `namespace` pays for it."""
        slot = self._books.index.block_of(identity)
        return slot if slot is not None and self._books.key_at(slot).namespace == namespace else None

    @contextmanager
    def _kept(self, keys: Sequence[BlockKey]) -> Iterator[None]:
        """What is there of these is not evicted for the others, and counts as used."""
        known = [slot for key in keys if (slot := self._books.index.block_of(key.id)) is not None]
        self.hold(known)
        yield
        self.release(known)

    def _reserve(self, key: BlockKey) -> Reservation | None:
        if self.knows(key.id):
            return None
        self._ghosts.discard(key.id)  # before its victim becomes one: then their order stays exact
        slot = self._take(key)
        return None if slot is None else self._books.occupy(slot, key)

    def _take(self, key: BlockKey) -> int | None:
        # The one place where a victim is chosen.
        books, namespace = self._books, key.namespace
        while not self._policy.may_grow(namespace, books.charged):
            if not self._evict(namespace, Reason.OWN_QUOTA):
                self._refuse(key, Reason.OWN_QUOTA)
                return None
        if not books.free:
            owner = self._policy.victim(namespace, books.charged, books.victims)
            if not self._evict(owner, Reason.PRESSURE):
                self._refuse(key, Reason.PRESSURE)
                return None
        return books.free.pop()

    def _has_room_beside_others(self, namespace: str, spare: Callable[[BlockId], bool]) -> bool:
        """Whether `_take` will find some, after the namespace's own oldest victim has gone if it must, or a spare one
        of others."""
        books = self._books
        if not self._policy.may_grow(namespace, books.charged):
            return books.victims.count(namespace) > 0
        if books.free or self._evict(namespace, Reason.PRESSURE):
            return True
        owner = self._policy.victim(namespace, books.charged, books.victims)
        victim = None if owner is None else books.victims.oldest(owner)
        return victim is not None and spare(books.key_at(victim).id) and self._evict(owner, Reason.PRESSURE)

    def _evict(self, owner: str | None, reason: Reason) -> bool:
        """The owner's oldest victim, if there is one."""
        victim = None if owner is None else self._books.victims.oldest(owner)
        if victim is not None:
            self._lose(victim, reason)
        return victim is not None

    def _refuse(self, key: BlockKey, reason: Reason) -> None:
        self.refusals.add(key.namespace, reason)
        self._ghosts.add(key.id, reason)

    def _lose(self, slot: int, reason: Reason) -> None:
        """A known block becomes unknown; its slot is free unless somebody holds it."""
        key = self._books.key_at(slot)
        self.evictions.add(key.namespace, reason)
        self._ghosts.add(key.id, reason)
        self._books.index.drop(slot)
        self._books.wake(slot)
        if self._books.holds[slot] == 0:
            self._books.vacate(slot)
        if self._watcher is not None and self._books.is_pinned(key):
            self._watcher.lost(key)

    def _drop(self, slot: int) -> None:
        books = self._books
        if not books.holds.drop(slot):
            return
        was_used = slot in books.touched
        books.touched.discard(slot)
        if books.index.identity_of(slot) is None:  # forgotten while it was held
            books.vacate(slot)
        elif was_used:
            books.queue_last(slot)
        else:
            books.queue_first(slot)

    def _end(self, reservations: Sequence[Reservation]) -> None:
        writing = self._books.writing
        for reservation in reservations:
            if writing.get(reservation.slot) is not reservation:
                raise BlockMisuse("This reservation has ended, or was never given.", block=reservation.slot)
        if len({reservation.slot for reservation in reservations}) != len(reservations):
            raise BlockMisuse("A reservation ends once.")
        for reservation in reservations:
            del writing[reservation.slot]
