"""The host tier against a naive model: one list of slots, searched from end to end.

After every step the answers, the states of all slots, the order of victims, the charges and the counters must be
equal, `check_integrity` must hold, and a simulated arena must still contain, in every slot that can be found or is
held, exactly the block that was written there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, precondition, rule

from lamina_kvtier.errors import BlockMisuse
from lamina_kvtier.ghosts import Ghosts
from lamina_kvtier.host_tier import HostTier, Reservation
from lamina_kvtier.identity import child_id
from lamina_kvtier.reasons import Reason
from lamina_kvtier.tier import BlockKey
from lamina_kvtier.victims import VictimsView

NAMESPACES = ("ann", "bob", "cy")
MAX_SLOTS = 8
BLOCK_BYTES = 16
POISON = b"poison"


def chain(namespace: str, tokens: Sequence[int]) -> list[BlockKey]:
    """One block per token."""
    keys: list[BlockKey] = []
    parent = namespace.encode().ljust(32, b".")
    for token in tokens:
        parent = child_id(parent, [token])
        keys.append(BlockKey(parent, namespace))
    return keys


class Limits:
    """A policy with teeth: a limit for each, and who has most gives. Keeps its own account of who has what."""

    def __init__(self, limits: Mapping[str, int]) -> None:
        self.limits = limits
        self.slots: dict[int, str] = {}
        self.idle: set[int] = set()

    def took(self, slot: int, namespace: str) -> None:
        assert slot not in self.slots
        self.slots[slot] = namespace

    def rested(self, slot: int) -> None:
        assert slot in self.slots.keys() - self.idle
        self.idle.add(slot)

    def woke(self, slot: int) -> None:
        self.idle.remove(slot)

    def freed(self, slot: int) -> None:
        assert slot not in self.idle
        del self.slots[slot]

    def promises(self, namespace: str) -> bool:
        return True

    def may_grow(self, namespace: str, used: Mapping[str, int]) -> bool:
        return used.get(namespace, 0) < self.limits[namespace]

    def victim(self, requester: str, used: Mapping[str, int], victims: VictimsView) -> str | None:
        return max(victims.namespaces(), key=lambda namespace: (used[namespace], namespace), default=None)


class Watcher:
    """Believes what it is told, and looks when somebody pins what is stored already."""

    def __init__(self, tier: HostTier) -> None:
        self.stored: set[BlockKey] = set()
        tier.watch_pinned(self)

    def arrived(self, key: BlockKey) -> None:
        assert key not in self.stored
        self.stored.add(key)

    def lost(self, key: BlockKey) -> None:
        self.stored.remove(key)


@dataclass(eq=False)
class Entry:
    """One slot that is not free."""

    key: BlockKey
    state: str  # writing, unwanted (forgotten while being written), known, lost (forgotten while held)
    holds: int = 0
    used: bool = False


class NaiveHost:
    """What the host tier means, in the plainest words. It takes the real one's choice of free slots."""

    def __init__(self, num_slots: int, limits: Mapping[str, int]) -> None:
        self.num_slots, self.limits = num_slots, limits
        self.entries: dict[int, Entry] = {}
        self.order: list[int] = []  # victims, next one first
        self.pins: Counter[tuple[str, bytes]] = Counter()
        self.ghosts: dict[bytes, Reason] = {}
        self.evictions: Counter[Any] = Counter()
        self.refusals: Counter[Any] = Counter()

    def slot_of(self, identity: bytes, *states: str) -> int | None:
        return next((s for s, e in self.entries.items() if e.key.id == identity and e.state in states), None)

    def charged(self) -> Counter[str]:
        return Counter(entry.key.namespace for entry in self.entries.values())

    def find(self, keys: Sequence[BlockKey]) -> list[int]:
        slots: list[int] = []
        for key in keys:
            slot = self.slot_of(key.id, "known")
            if slot is None:
                break
            slots.append(slot)
        return slots

    def reserve(self, keys: Sequence[BlockKey], granted: Sequence[Reservation | None]) -> None:
        known = [slot for key in keys if (slot := self.slot_of(key.id, "known")) is not None]
        self.hold(known)
        for key, reservation in zip(keys, granted, strict=True):
            self.reserve_one(key, reservation)
        self.release(known)

    def reserve_beside_others(
        self, keys: Sequence[BlockKey], spare: Callable[[bytes], bool], granted: Sequence[Reservation | None]
    ) -> None:
        known = [slot for key in keys if (slot := self.slot_of(key.id, "known")) is not None]
        self.hold(known)
        for at, key in enumerate(keys):
            is_new = self.slot_of(key.id, "known", "writing") is None
            own = self.oldest_of(key.namespace)
            others = self.oldest_of(self.furthest())
            is_at_limit = self.charged()[key.namespace] >= self.limits[key.namespace]
            is_full = len(self.entries) == self.num_slots
            if is_new and own is None and not is_at_limit and others is not None and spare(self.entries[others].key.id):
                own = others
            if is_new and own is None and (is_at_limit or is_full):
                assert list(granted[at:]) == [None] * len(granted[at:])
                break
            if is_new and own is not None and is_full and not is_at_limit:
                self.lose(own, Reason.PRESSURE)
            self.reserve_one(key, granted[at])
        self.release(known)

    def furthest(self) -> str | None:
        """Whose block goes."""
        owners, charged = {self.entries[slot].key.namespace for slot in self.order}, self.charged()
        return max(owners, key=lambda namespace: (charged[namespace], namespace), default=None)

    def oldest_of(self, namespace: str | None) -> int | None:
        return next((slot for slot in self.order if self.entries[slot].key.namespace == namespace), None)

    def reserve_one(self, key: BlockKey, reservation: Reservation | None) -> None:
        if self.slot_of(key.id, "known", "writing") is not None:
            assert reservation is None
            return
        self.ghosts.pop(key.id, None)
        charged = self.charged()
        owner: str | None = None
        room = charged[key.namespace] < self.limits[key.namespace]
        reason = Reason.PRESSURE if room else Reason.OWN_QUOTA
        if not room:
            owner = key.namespace
        elif len(self.entries) == self.num_slots:
            owner = self.furthest()
        if not room or len(self.entries) == self.num_slots:
            victim = self.oldest_of(owner)
            if victim is None:
                assert reservation is None
                self.refusals[key.namespace, reason] += 1
                self.ghosts[key.id] = reason
                return
            self.lose(victim, reason)
        assert reservation is not None
        assert reservation.key == key
        assert 0 <= reservation.slot < self.num_slots
        assert reservation.slot not in self.entries
        self.entries[reservation.slot] = Entry(key, "writing")

    def commit(self, slots: Sequence[int]) -> None:
        for slot in slots[::-1]:
            entry = self.entries[slot]
            if entry.state == "unwanted":
                del self.entries[slot]
            else:
                entry.state = "known"
                self.queue(slot, last=True)

    def abandon(self, slots: Sequence[int]) -> None:
        for slot in slots:
            del self.entries[slot]

    def hold(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self.entries[slot].holds += 1
            if slot in self.order:
                self.order.remove(slot)

    def release(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self.entries[slot].used = True
        for slot in slots[::-1]:
            self.drop(slot)

    def put_back(self, slots: Sequence[int]) -> None:
        used = [slot for slot in slots if self.entries[slot].used]
        for slot in [slot for slot in slots if slot not in used] + used[::-1]:
            self.drop(slot)

    def drop(self, slot: int) -> None:
        entry = self.entries[slot]
        entry.holds -= 1
        if entry.holds == 0:
            used, entry.used = entry.used, False
            if entry.state == "lost":
                del self.entries[slot]
            else:
                self.queue(slot, last=used)

    def is_pinned(self, key: BlockKey) -> bool:
        return self.pins[key.namespace, key.id] > 0

    def queue(self, slot: int, *, last: bool) -> None:
        if not self.is_pinned(self.entries[slot].key):
            self.order.insert(len(self.order) if last else 0, slot)

    def pin(self, ids: Sequence[bytes], namespace: str) -> None:
        self.pins.update((namespace, identity) for identity in ids)
        self.order = [slot for slot in self.order if not self.is_pinned(self.entries[slot].key)]

    def unpin(self, ids: Sequence[bytes], namespace: str) -> None:
        for identity in ids[::-1]:
            self.pins[namespace, identity] -= 1
            slot = self.slot_of(identity, "known")
            if self.pins[namespace, identity] or slot is None or self.entries[slot].holds:
                continue
            if self.entries[slot].key.namespace == namespace:
                self.queue(slot, last=True)

    def forget(self, ids: Sequence[bytes], reason: Reason) -> int:
        forgotten = 0
        for identity in ids:
            known, writing = self.slot_of(identity, "known"), self.slot_of(identity, "writing")
            forgotten += known is not None or writing is not None
            if known is not None:
                self.lose(known, reason)
            elif writing is not None:
                self.entries[writing].state = "unwanted"
        return forgotten

    def lose(self, slot: int, reason: Reason) -> None:
        entry = self.entries[slot]
        self.evictions[entry.key.namespace, reason] += 1
        self.ghosts[entry.key.id] = reason
        if slot in self.order:
            self.order.remove(slot)
        if entry.holds:
            entry.state = "lost"
        else:
            del self.entries[slot]


tables = st.tuples(st.sampled_from(NAMESPACES), st.lists(st.integers(0, 1), min_size=1, max_size=4))


class HostMachine(RuleBasedStateMachine):
    """Every operation in any order, on a tier that is too small."""

    closed = False  # see ClosedHostMachine
    writes = Bundle("writes")
    holds = Bundle("holds")
    pins = Bundle("pins")

    @initialize(num_slots=st.integers(0, MAX_SLOTS), limits=st.lists(st.integers(0, MAX_SLOTS), min_size=3, max_size=3))
    def start(self, num_slots: int, limits: list[int]) -> None:
        by_name = dict(zip(NAMESPACES, limits, strict=True))
        self.policy = Limits(by_name)
        self.real = HostTier(num_slots, BLOCK_BYTES, policy=self.policy, ghosts=Ghosts([10_000]))
        self.naive = NaiveHost(num_slots, by_name)
        self.watcher = Watcher(self.real)
        self.arena = [POISON] * num_slots
        self.held: list[tuple[int, bytes]] = []  # every hold: the slot and what is read there
        self.seen: dict[bytes, list[BlockKey]] = {}  # identity -> its chain up to there

    def keys(self, table: tuple[str, list[int]]) -> list[BlockKey]:
        keys = chain(*table)
        for at, key in enumerate(keys):
            self.seen[key.id] = keys[: at + 1]
        return keys

    @rule(target=writes, table=tables, skip=st.integers(0, 2), beside_others=st.booleans(), spare=st.integers(0, 4))
    def reserve(self, table: tuple[str, list[int]], skip: int, beside_others: bool, spare: int) -> list[Reservation]:
        """Blocks may come without their heads: those spill tail first."""
        keys = self.keys(table)[0 if self.closed else skip :]
        prefix = self.hold(table) if self.closed else []
        if beside_others:

            def is_spare(identity: bytes) -> bool:
                return identity[-1] % 4 < spare

            granted = self.real.reserve_beside_others(keys, is_spare)
            self.naive.reserve_beside_others(keys, is_spare, granted)
        else:
            granted = self.real.reserve(keys)
            self.naive.reserve(keys, granted)
        written = [reservation for reservation in granted if reservation is not None]
        for reservation in written:
            self.arena[reservation.slot] = POISON
        if self.closed:
            self.commit(written)
            self.release(prefix)
            written = []
        return written

    @rule(write=consumes(writes))
    def commit(self, write: list[Reservation]) -> None:
        for reservation in write:
            self.arena[reservation.slot] = reservation.key.id
        self.real.commit(write)
        self.naive.commit([reservation.slot for reservation in write])

    @rule(write=consumes(writes))
    def abandon(self, write: list[Reservation]) -> None:
        self.real.abandon(write)
        self.naive.abandon([reservation.slot for reservation in write])

    @rule(target=holds, table=tables)
    def hold(self, table: tuple[str, list[int]]) -> list[int]:
        keys = self.keys(table)
        slots = self.real.find(key.id for key in keys)
        assert slots == self.naive.find(keys)
        self.real.hold(slots)
        self.naive.hold(slots)
        self.held += [(slot, key.id) for slot, key in zip(slots, keys, strict=False)]
        return slots

    @rule(slots=consumes(holds))
    def release(self, slots: list[int]) -> None:
        self.let_go("release", slots)

    @precondition(lambda self: not self.closed)
    @rule(slots=consumes(holds))
    def put_back(self, slots: list[int]) -> None:
        self.let_go("put_back", slots)

    def let_go(self, how: str, slots: list[int]) -> None:
        for slot in slots:
            self.held.remove(next(hold for hold in self.held if hold[0] == slot))
        getattr(self.real, how)(slots)
        getattr(self.naive, how)(slots)

    @precondition(lambda self: not self.closed)
    @rule(count=st.integers(0, 4))
    def save_below(self, count: int) -> None:
        """The oldest are held, written to a tier below, and put back where they were."""
        before = list(self.naive.order)
        slots = [slot for slot, _ in self.real.next_victims(count)]
        assert slots == before[:count]
        self.real.hold(slots)
        self.real.put_back(slots[::-1])
        assert list(self.real._books.victims) == before

    @rule(target=pins, table=tables, stranger=st.sampled_from([None, None, *NAMESPACES]))
    def pin(self, table: tuple[str, list[int]], stranger: str | None) -> tuple[list[bytes], str]:
        """What somebody else pays for is not kept by a pin."""
        ids = [key.id for key in self.keys(table)]
        namespace = stranger or table[0]
        self.real.pin(ids, namespace)
        self.naive.pin(ids, namespace)
        self.watch()
        return ids, namespace

    @rule(pin=consumes(pins))
    def unpin(self, pin: tuple[list[bytes], str]) -> None:
        self.real.unpin(*pin)
        self.naive.unpin(*pin)
        self.watch()

    def pinned_and_stored(self) -> set[BlockKey]:
        stored = [entry.key for entry in self.naive.entries.values() if entry.state == "known"]
        return {key for key in stored if self.naive.is_pinned(key)}

    def watch(self) -> None:
        """Whoever pins or unpins knows it; only what happens between is told."""
        self.watcher.stored = self.pinned_and_stored()

    @precondition(lambda self: not self.closed)
    @rule(table=tables, reason=st.sampled_from([Reason.TTL, Reason.DELETED, Reason.INTEGRITY]))
    def forget(self, table: tuple[str, list[int]], reason: Reason) -> None:
        ids = [key.id for key in self.keys(table)]
        assert self.real.forget(ids, reason) == self.naive.forget(ids, reason)

    @precondition(lambda self: not self.closed)
    @rule()
    def clear(self) -> None:
        ids = [entry.key.id for entry in self.naive.entries.values()]
        assert self.real.clear(Reason.DELETED) == self.naive.forget(ids, Reason.DELETED)

    # Misuse: refused, and the invariants below show that nothing changed

    @rule(slot=st.integers(-1, MAX_SLOTS))
    def hold_an_unknown_slot(self, slot: int) -> None:
        known = slot in self.naive.entries and self.naive.entries[slot].state == "known"
        if not known:
            with pytest.raises(BlockMisuse):
                self.real.hold([*self.naive.order, slot])

    @rule(slot=st.integers(-1, MAX_SLOTS), how=st.sampled_from(["release", "put_back"]))
    def let_go_too_often(self, slot: int, how: str) -> None:
        holds = self.naive.entries[slot].holds if slot in self.naive.entries else 0
        with pytest.raises(BlockMisuse):
            getattr(self.real, how)([slot] * (holds + 1))

    @rule(write=writes)
    def end_a_write_twice_at_once(self, write: list[Reservation]) -> None:
        stranger = Reservation(0, BlockKey(bytes(32), "ann"))
        for wrong in ([*write, *write], [*write, stranger]):
            if write or stranger in wrong:
                with pytest.raises(BlockMisuse):
                    self.real.commit(wrong)
                with pytest.raises(BlockMisuse):
                    self.real.abandon(wrong)

    @rule(table=tables)
    def unpin_too_often(self, table: tuple[str, list[int]]) -> None:
        key = self.keys(table)[-1]
        with pytest.raises(BlockMisuse):
            self.real.unpin([key.id] * (self.naive.pins[key.namespace, key.id] + 1), key.namespace)

    # What must hold after every step

    @invariant()
    def bookkeeping_is_sound(self) -> None:
        self.real.check_integrity()

    @invariant()
    def both_worlds_agree(self) -> None:
        real, naive = self.real, self.naive
        assert list(real._books.victims) == naive.order
        assert real._books.charged == dict(naive.charged()) == Counter(self.policy.slots.values())
        assert self.policy.idle == set(naive.order)
        assert real.evictions == naive.evictions
        assert real.refusals == naive.refusals
        usage = real.usage()
        states = [entry.state for entry in naive.entries.values()]
        assert usage.free == naive.num_slots - len(states)
        assert usage.writing == states.count("writing") + states.count("unwanted")
        assert usage.held == sum(entry.holds > 0 for entry in naive.entries.values())
        assert usage.cached == len(naive.order)
        assert usage.free + usage.writing + usage.held + usage.cached + usage.pinned == usage.total
        assert sum(usage.bytes_by_namespace.values()) == (usage.total - usage.free) * BLOCK_BYTES
        for identity in self.seen:
            known = naive.slot_of(identity, "known", "writing") is not None
            assert real.knows(identity) == known
            if not known:
                ghost = real.ghost_of(identity)
                assert (None if ghost is None else ghost.reason) is naive.ghosts.get(identity)

    @invariant()
    def pinned_blocks_are_counted(self) -> None:
        assert self.watcher.stored == self.pinned_and_stored()
        pinned = Counter(key.namespace for key in self.watcher.stored)
        writing = [e.key.namespace for e in self.naive.entries.values() if e.state in ("writing", "unwanted")]
        assert +Counter(self.real.pinned_by_owner()) == pinned
        assert self.real.writing_by_owner() == Counter(writing)
        for name in NAMESPACES:
            assert self.real.slots_of(name) == self.naive.charged()[name]
            idle = [slot for slot in self.naive.order if self.naive.entries[slot].key.namespace == name]
            assert self.real.evictable_slots_of(name) == len(idle)

    @invariant()
    def what_is_found_or_held_is_what_was_written(self) -> None:
        for identity in self.seen:
            for slot in self.real.find([identity]):
                assert self.arena[slot] == identity
        for slot, identity in self.held:
            assert self.arena[slot] == identity


class ClosedHostMachine(HostMachine):
    """Tables that are stored and used in order, as the engine's are."""

    closed = True

    @invariant()
    def known_prefixes_have_no_gaps(self) -> None:
        """No order of eviction takes a block whose successor stays: every known block can be found."""
        for identity, keys in self.seen.items():
            if self.real.knows(identity):
                assert len(self.real.find(key.id for key in keys)) == len(keys)


TestHostMachine = HostMachine.TestCase
TestHostMachine.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestClosedHostMachine = ClosedHostMachine.TestCase
TestClosedHostMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
