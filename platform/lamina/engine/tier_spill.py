"""Blocks on their way down: copied to host memory before they are evicted, and from there written to the store.

    device pool ──spill──▶ host memory ──put──▶ store

Spilled blocks stay where they are until somebody needs the room. A step that writes into one whose copy is under way
waits for the copy, on the device if there is one (`before_step`).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from lamina.engine.store_memory import StoreMemory
from lamina.engine.tier_renewal import Renewals
from lamina.engine.tier_shares import Shares
from lamina_kernels.gpu.block_mover import BlockMover, HostBlocks, Transfer
from lamina_kvtier.host_tier import HostTier, Reservation
from lamina_kvtier.identity import BlockId
from lamina_kvtier.manager import KvManager
from lamina_kvtier.policies import spill_candidates
from lamina_kvtier.tier import BlockKey, Operation, Outcome, StoreTier

__all__ = ["SPILL_BATCH", "Puts", "Spills"]

_MAX_SPILLS = 4  # transfers under way
SPILL_BATCH = 256  # blocks of one transfer
_PUT_BYTES = 16 << 20  # of one put, so that tenants take turns
_MAX_PUT_BYTES = 256 << 20  # on their way to the store
_MAX_QUEUED_BYTES = 256 << 20  # of one tenant, waiting for that; what comes beyond stays in host memory only
_SLACK_PART = 4  # of what may be on its way, and of host memory: no more than this is for what is not new


@dataclass(frozen=True, slots=True)
class _Spill:
    transfer: Transfer
    reservations: list[Reservation]
    blocks: frozenset[int]
    passing: bool  # only on their way to the store


class Spills:
    """Device to host memory, ahead of need.

    Saved is whatever the next `low_water` allocations would evict, for all namespaces together and for each that is
    near its own limit. Each look saves twice as much, and says how many blocks may change hands before the next one is
    due: so a step that allocates little costs nothing here, whatever the size of the pool.
    """

    def __init__(
        self,
        kv: KvManager,
        host: HostTier,
        mover: BlockMover,
        puts: Puts,
        counts: Counter[str],
        *,
        low_water: int,
    ) -> None:
        self._kv, self._host, self._mover, self._puts, self._counts = kv, host, mover, puts, counts
        self._low_water, self._high_water = low_water, min(2 * low_water, kv.num_blocks)
        self._spills: list[_Spill] = []
        self._due = 0  # by `KvManager.turnover`
        self._changes_left: dict[str, int] = {}  # by namespace: changes of its account until its limit may matter
        self._near_limit: set[str] = set()  # for which that is now
        if kv.ledger is not None:
            kv.ledger.watch(self._changed)
        self.reading: frozenset[int] = frozenset()  # device blocks whose copies are under way

    @property
    def has_room(self) -> bool:
        """Whether another transfer may start."""
        return len(self._spills) < _MAX_SPILLS

    def settle(self) -> None:
        """Takes in what has ended."""
        under_way = [spill for spill in self._spills if not self._end(spill)]
        if len(under_way) < len(self._spills):
            self._spills = under_way
            self._note()

    def before_step(self, written: Iterable[int]) -> None:
        """Lets the step wait for copies of blocks that it overwrites."""
        targets = frozenset(written) & self.reading
        for spill in self._spills:
            if spill.blocks & targets:
                spill.transfer.gate()

    def after_step(self) -> None:
        """Saves what would be evicted next, if it is time."""
        if not self.has_room or (self._kv.turnover < self._due and not self._near_limit):
            return
        due = sorted(self._near_limit)
        chosen = self._of_limits()
        if self._kv.turnover >= self._due:
            free = self._kv.usage().free
            victims = self._kv.next_victims(self._high_water - free) if free < self._high_water else []
            more, later = self._choose(victims, free)
            chosen |= more
            self._due = self._kv.turnover + later
        if self.save([(block, self._key(block, identity)) for block, identity in chosen.items()]):
            self._look_again(due)

    def _look_again(self, namespaces: Iterable[str]) -> None:
        """In the next step: not all was saved that had to be."""
        self._due = 0
        self._near_limit.update(namespaces)

    def _changed(self, namespace: str) -> None:
        """Its account did."""
        left = self._changes_left[namespace] = self._changes_left.get(namespace, 0) - 1
        if left <= 0:
            self._near_limit.add(namespace)

    def _of_limits(self) -> dict[int, BlockId]:
        """What namespaces near their limits would give up, however much is free."""
        chosen: dict[int, BlockId] = {}
        while self._near_limit and len(chosen) < SPILL_BATCH:
            namespace = self._near_limit.pop()
            near = self._kv.victims_near_limit(namespace, self._high_water)
            if near is None:
                self._changes_left.pop(namespace, None)
                continue
            more, self._changes_left[namespace] = self._choose(near[1], near[0])
            chosen |= more
        return chosen

    def save(self, victims: Sequence[tuple[int, BlockKey]]) -> int:
        """Copies blocks down, next victim first; returns how many had to be left for another time."""
        batch = victims[:SPILL_BATCH][::-1]  # a table's order, head first
        self.copy([block for block, _ in batch], self._host.reserve([key for _, key in batch]))
        return max(0, len(victims) - SPILL_BATCH)

    def copy(self, blocks: Sequence[int], given: Sequence[Reservation | None], *, passing: bool = False) -> None:
        """Copies blocks to the slots that they were given, head first; those without stay where they are.

        `passing`: only the store wants them. Their slots are the next victims once it has them.
        """
        reserved = [(block, room) for block, room in zip(blocks, given, strict=True) if room is not None]
        if reserved:
            sources, reservations = [block for block, _ in reserved], [room for _, room in reserved]
            transfer = self._mover.spill(sources, [reservation.slot for reservation in reservations])
            self._spills.append(_Spill(transfer, reservations, frozenset(sources), passing))
            self._note()

    def save_now(self, table: Sequence[tuple[int, BlockId]]) -> None:
        """Copies blocks down that may be overwritten in this very step, head first, as far as a transfer may start."""
        if self.has_room:
            wanted = [pair for pair in table if pair[0] not in self.reading and not self._host.knows(pair[1])]
            self.save([(block, self._key(block, identity)) for block, identity in wanted[:SPILL_BATCH][::-1]])

    def key_of(self, block: int) -> BlockKey:
        """Of a published block."""
        identity = self._kv.identity_of(block)
        assert identity is not None
        return self._key(block, identity)

    def _choose(self, victims: Sequence[tuple[int, BlockId]], free: int) -> tuple[dict[int, BlockId], int]:
        """What to save of a queue of victims, and how many blocks may change hands before the next look at it."""
        identities = dict(victims)
        safe = frozenset(block for block, identity in victims if self._host.knows(identity)) | self.reading
        chosen = spill_candidates(
            identities, free=free, low_water=self._low_water, high_water=self._high_water, safe=safe
        )
        if chosen:
            return {block: identities[block] for block in chosen}, max(1, self._high_water - self._low_water)
        unsafe = next((place for place, (block, _) in enumerate(victims, free) if block not in safe), self._high_water)
        return {}, max(1, max(free, unsafe) - self._low_water)

    def _key(self, block: int, identity: BlockId) -> BlockKey:
        return BlockKey(identity, self._kv.owner_of(block) or "", self._kv.adapter_of(block))

    def keys_under_way(self) -> Iterator[BlockKey]:
        """Of blocks whose copies have not ended."""
        return (reservation.key for spill in self._spills for reservation in spill.reservations)

    def _end(self, spill: _Spill) -> bool:
        if not spill.transfer.done():
            return False
        try:
            spill.transfer.wait()
        except RuntimeError:
            self._host.abandon(spill.reservations)
            self._counts["failed"] += len(spill.reservations)
            self._look_again(reservation.key.namespace for reservation in spill.reservations)
            return True
        self._host.commit(spill.reservations)
        self._counts["spilled"] += len(spill.reservations)
        self._puts.want([reservation.key for reservation in spill.reservations], passing=spill.passing)
        return True

    def _note(self) -> None:
        self.reading = frozenset[int]().union(*(spill.blocks for spill in self._spills))


@dataclass(slots=True, eq=False)
class _Put:
    keys: list[BlockKey]
    slots: list[int]
    passing: bool  # host memory itself has no use of it: the slots are the next victims afterwards, as they were
    operation: Operation[tuple[Outcome, ...]] | None = None


class Puts:
    """Host memory to the store: written through as fast as it keeps up, tenants in fair turns; and once more what the
    store lost, or did not take, while nothing new waits."""

    def __init__(
        self,
        kv: KvManager,
        host: HostTier,
        arena: HostBlocks,
        store: StoreTier | None,
        counts: Counter[str],
        memory: StoreMemory | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`store`: None: there is none, and nothing is put. `memory`: of what is in it."""
        self._kv, self._host, self._arena, self._store, self._counts = kv, host, arena, store, counts
        self._memory = StoreMemory() if memory is None else memory
        self._renewals = None if store is None else Renewals(kv, host, store, self._memory, clock)
        self._shares: Shares[_Put] = Shares(_MAX_PUT_BYTES)
        self._queued: Counter[str] = Counter()  # bytes that wait, by namespace
        self._under_way: list[_Put] = []

    @property
    def has_store(self) -> bool:
        """Or nothing is ever put."""
        return self._store is not None

    def want(self, keys: Sequence[BlockKey], *, passing: bool = False) -> None:
        """These blocks of host memory are to be put, in a table's order. `passing`: that is no use of them there."""
        if self._store is None:
            return
        for namespace, own in _by_namespace(keys).items():
            size = max(1, _PUT_BYTES // self._arena.block_bytes)
            for start in range(0, len(own), size):
                put = _Put(own[start : start + size], [], passing)
                if self._queued[namespace] + self._bytes(put) > _MAX_QUEUED_BYTES:
                    return
                self._queued[namespace] += self._bytes(put)
                self._shares.want(put, namespace, self._weight(namespace), self._bytes(put))

    @property
    def is_busy(self) -> bool:
        """Whether the store is writing or being looked at, or something waits for that."""
        renews = self._renewals is not None and self._renewals.is_busy
        return bool(self._under_way or self._queued) or renews

    def slack(self) -> int:
        """How many blocks may be put beside what is new: none while that waits, or while much is under way."""
        unit = self._arena.block_bytes
        room = min(_MAX_PUT_BYTES, self._host.num_slots * unit) // _SLACK_PART
        most = max(1, min(_PUT_BYTES, room) // unit)
        is_quiet = not self._queued and (not self._shares.moving or self._shares.moving + most * unit <= room)
        return most if is_quiet else 0

    def has(self, identity: BlockId) -> bool:
        """Whether the store has this block, as far as we know, or is writing it. O(blocks that are being written)."""
        return self._memory.believes(identity) or any(key.id == identity for key in self.keys_under_way())

    def keys_under_way(self) -> Iterator[BlockKey]:
        """Of blocks that the store is writing."""
        return (key for put in self._under_way for key in put.keys)

    def settle(self) -> None:
        """Takes in what has ended, and starts what may start."""
        self._under_way = [put for put in self._under_way if not self._end(put)]
        self._start_waiting()
        if self._renewals is not None:
            self._renewals.settle()
            self._renew(self._renewals)

    def _start_waiting(self) -> None:
        while (put := self._shares.start()) is not None:
            self._start(put)

    def _renew(self, renewals: Renewals) -> None:
        """Puts once more what has to be, as far as there is slack."""
        while most := self.slack():
            keys = renewals.next(most, {key.id for key in self.keys_under_way()})
            if not keys:
                return
            self.want(keys, passing=True)
            self._start_waiting()

    def _start(self, put: _Put) -> None:
        namespace = put.keys[0].namespace
        self._queued[namespace] -= self._bytes(put)
        if not self._queued[namespace]:
            del self._queued[namespace]
        found = [(slot, key) for key in put.keys for slot in self._host.find([key.id])]  # the others are gone already
        if not found or self._store is None:
            self._shares.ended(put)
            return
        put.slots = [slot for slot, _ in found]
        self._host.hold(put.slots)
        put.operation = self._store.put([key for _, key in found], list(map(self._arena.bytes_of, put.slots)))
        self._under_way.append(put)

    def _end(self, put: _Put) -> bool:
        if put.operation is None or not put.operation.done():
            return False
        outcomes = put.operation.result()
        slots = zip(put.slots, outcomes, strict=True)
        keys = [self._host.key_of(slot) for slot, outcome in slots if outcome is Outcome.OK]
        kept = [key.id for key in keys if key is not None]
        self._counts["stored"] += len(kept)
        self._counts["failed"] += len(outcomes) - len(kept)
        self._memory.note(kept)
        self._tell(outcomes)
        if put.passing:
            self._host.put_back(put.slots)  # the least recently used ones come last, and are the next victims again
        else:
            self._host.release(put.slots)
        self._shares.ended(put)
        return True

    def _tell(self, outcomes: Sequence[Outcome]) -> None:
        if self._renewals is None:
            return
        if all(outcome in (Outcome.OK, Outcome.REFUSED) for outcome in outcomes):
            self._renewals.worked()
        else:
            self._renewals.failed()

    def _bytes(self, put: _Put) -> int:
        return len(put.keys) * self._arena.block_bytes

    def _weight(self, namespace: str) -> float:
        return 1.0 if self._kv.ledger is None else self._kv.ledger.book.of(namespace).weight


def _by_namespace(keys: Iterable[BlockKey]) -> dict[str, list[BlockKey]]:
    found: dict[str, list[BlockKey]] = {}
    for key in keys:
        found.setdefault(key.namespace, []).append(key)
    return found
