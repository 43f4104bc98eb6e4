"""Blocks on their way down: copied to host memory before they are evicted, from where `Puts` takes them to the store.

Spilled blocks stay where they are until somebody needs the room. A step that writes into one whose copy is under way
waits for the copy, on the device if there is one (`before_step`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from lamina.engine.tier_puts import Puts
from lamina_kernels.gpu.block_mover import BlockMover, Transfer
from lamina_kvtier.host_tier import HostTier, Reservation
from lamina_kvtier.identity import BlockId
from lamina_kvtier.manager import KvManager
from lamina_kvtier.policies import spill_candidates
from lamina_kvtier.tier import BlockKey

__all__ = ["SPILL_BATCH", "Spills"]

_MAX_SPILLS = 4  # transfers under way
SPILL_BATCH = 256  # blocks of one transfer


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
        self._near_limit: dict[str, None] = {}  # for which that is now; in turn
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
        """Lets the step wait for copies of blocks that it overwrites. One that failed is `settle`'s business: the
        step has nothing to do with it, and no request may end because of it."""
        targets = frozenset(written) & self.reading
        for spill in self._spills:
            if spill.blocks & targets:
                with suppress(RuntimeError):
                    spill.transfer.gate()

    def after_step(self) -> None:
        """Saves what would be evicted next, if it is time."""
        if not self.has_room or (self._kv.turnover < self._due and not self._near_limit):
            return
        due = list(self._near_limit)
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
        self._near_limit.update(dict.fromkeys(namespaces))

    def _changed(self, namespace: str) -> None:
        """Its account did."""
        left = self._changes_left[namespace] = self._changes_left.get(namespace, 0) - 1
        if left <= 0:
            self._near_limit[namespace] = None

    def _of_limits(self) -> dict[int, BlockId]:
        """What namespaces near their limits would give up, however much is free."""
        chosen: dict[int, BlockId] = {}
        while self._near_limit and len(chosen) < SPILL_BATCH:
            namespace = next(iter(self._near_limit))
            del self._near_limit[namespace]
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
        """Copies blocks down that may be overwritten in this very step, head first, as far as a transfer may start.

        But for those that have lost their identity since their table's owner published them: somebody deleted them, or
        the step that wrote them failed, and they are not to come back.
        """
        if self.has_room:
            known = [(block, identity) for block, identity in table if self._kv.identity_of(block) == identity]
            wanted = [pair for pair in known if pair[0] not in self.reading and not self._host.knows(pair[1])]
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
