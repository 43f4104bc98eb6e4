"""What nobody may read is garbage, and what runs beside the step runs as late as it may.

    a device block or host slot that is free, or was handed out just now     ──▶ all ones: NaN in every float
    a copy between device and host memory                                     ──▶ runs when somebody has to know
    an operation of the store                                                 ──▶ runs some steps later, or fails

A block that is read after it was given away, or before it was filled, mostly still holds the right numbers: mistakes of
this kind hide behind fast copies and little load, and the request that makes one looks fine. Here it shows, at the
latest when the replay pass (`replay.py`) compares what later requests said.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence

import torch

from lamina.config import EngineConfig
from lamina.engine.pool import BlockPool
from lamina.engine.tiers import KvTiers
from lamina_kernels.gpu.block_mover import BlockMover, HostBlocks, Transfer
from lamina_kernels.oracles import blocks as plain_kernels
from lamina_kvtier.block_codec import BlockCodec
from lamina_kvtier.blocks import CopyOnWrite
from lamina_kvtier.fault_tier import Faults, FaultTier
from lamina_kvtier.host_tier import HostTier, Reservation
from lamina_kvtier.identity import BlockId, Layout
from lamina_kvtier.ledger import Charge
from lamina_kvtier.manager import UNOWNED, KvManager
from lamina_kvtier.memory_tier import MemoryStore, MemoryTier, Steps
from lamina_kvtier.reasons import Reason
from lamina_kvtier.tier import BlockKey, StoreTier
from support.below import COSTS, Below

__all__ = ["LateLane", "LateMover", "LateTransfer", "Poison", "PoisonedBelow", "PoisonedHost", "PoisonedKv"]

_GARBAGE = 0xFF


class LateLane:
    """A lane whose work runs when it is gated, waited for, or found to be done, after a few looks.

    That is all that a device promises: work runs some time between `submit` and those.
    """

    def __init__(self, dice: random.Random) -> None:
        self._dice = dice
        self._waiting: list[LateTransfer] = []
        self.late = 0  # transfers that somebody found not to be done yet

    def submit(self, work: Callable[[], None]) -> LateTransfer:
        transfer = LateTransfer(self, work, looks=self._dice.choice((0, 1, 3, 8)))
        self._waiting.append(transfer)
        return transfer

    def run_until(self, transfer: LateTransfer) -> None:
        """In order: what was submitted before runs before."""
        while not transfer.has_run:
            self._waiting.pop(0).run()


class LateTransfer:
    """A `Transfer` that has not happened yet."""

    def __init__(self, lane: LateLane, work: Callable[[], None], *, looks: int) -> None:
        self._lane, self._work, self._looks = lane, work, looks
        self._error: Exception | None = None
        self.has_run = False

    def run(self) -> None:
        try:
            self._work()
        except Exception as error:  # noqa: BLE001 - it belongs to whoever waits for the transfer
            self._error = error
        self.has_run = True

    def done(self) -> bool:
        self._looks -= 1
        if self._looks < 0:
            self._lane.run_until(self)
        self._lane.late += not self.has_run
        return self.has_run

    def wait(self) -> None:
        self._lane.run_until(self)
        if self._error is not None:
            raise self._error

    def gate(self) -> None:
        self.wait()


class LateMover(BlockMover):
    """Remembers which blocks are still to be read."""

    reading: list[tuple[LateTransfer, frozenset[int]]]

    def run_late(self, spills: LateLane, promotions: LateLane) -> None:
        self.reading = []
        self._spills.lane, self._promotions.lane = spills, promotions

    def spill(self, ids: Sequence[int], host_slots: Sequence[int]) -> Transfer:
        transfer = super().spill(ids, host_slots)
        assert isinstance(transfer, LateTransfer)
        self.reading.append((transfer, frozenset(ids)))
        return transfer

    def still_reads(self) -> frozenset[int]:
        self.reading = [(transfer, blocks) for transfer, blocks in self.reading if not transfer.has_run]
        return frozenset[int]().union(*(blocks for _, blocks in self.reading))


class Poison:
    """Writes garbage into what is free: as a later owner would, so it spares what is still owed to somebody.

    Those are sources of copies on write, until the step that makes the copies, and blocks that are being spilled: a
    step that overwrites one of those waits for the copy, and that it does is to be seen, not to be helped.
    """

    def __init__(self, kv: KvManager, pool: BlockPool, arena: HostBlocks, mover: LateMover) -> None:
        self.blocks = self.slots = 0  # poisoned so far
        self._kv, self._arena, self._mover = kv, arena, mover
        self._memory = pool.data.view(pool.num_blocks, -1).view(torch.uint8)
        self._to_copy: set[int] = set()
        self._taken = set[int]()  # blocks that are not free, at the last look

    def look(self) -> None:
        """Poisons device blocks that have become free since the last look and that nobody reads."""
        spared = self._to_copy | self._mover.still_reads()
        free = {block for block in range(self._kv.num_blocks) if self._kv.owner_of(block) is None}
        for block in (free & self._taken) - spared:
            self._spoil(block)
            self._taken.discard(block)
        self._taken |= set(range(self._kv.num_blocks)) - free

    def handed_out(self, blocks: Iterable[int]) -> None:
        """Evicted and given to another in one call, these were never seen free. Their contents are undefined."""
        spared = self._to_copy | self._mover.still_reads()
        for block in set(blocks) - spared:
            self._spoil(block)

    def will_copy(self, copy: CopyOnWrite) -> None:
        self._to_copy.add(copy.source)

    def copied(self) -> None:
        self._to_copy.clear()
        self.look()

    def spoil_slot(self, slot: int) -> None:
        self._arena.slots(slot).fill_(_GARBAGE)
        self.slots += 1

    def _spoil(self, block: int) -> None:
        self._memory[block] = _GARBAGE
        self.blocks += 1


class PoisonedKv(KvManager):
    poison: Poison

    def allocate(self, count: int, *, owner: str = UNOWNED, charge: Charge | None = None) -> list[int]:
        blocks = super().allocate(count, owner=owner, charge=charge)
        self.poison.look()
        self.poison.handed_out(blocks)
        return blocks

    def make_writable(self, block: int, *, owner: str | None = None) -> CopyOnWrite | None:
        copy = super().make_writable(block, owner=owner)
        if copy is not None:
            self.poison.handed_out([copy.target])
            self.poison.will_copy(copy)
        self.poison.look()
        return copy

    def release(self, blocks: Sequence[int]) -> None:
        super().release(blocks)
        self.poison.look()

    def forget(self, ids: Iterable[BlockId], reason: Reason = Reason.DELETED) -> int:
        forgotten = super().forget(ids, reason)
        self.poison.look()
        return forgotten


class _PoisonedPool(BlockPool):
    poison: Poison

    def copy(self, copies: Sequence[CopyOnWrite]) -> None:
        super().copy(copies)
        self.poison.copied()


class PoisonedHost(HostTier):
    poison: Poison | None = None
    taken: frozenset[int] = frozenset()

    def look(self, handed_out: Iterable[int] = ()) -> None:
        """Poisons slots that have become free, and those that were evicted and given to another in one call."""
        if self.poison is not None:
            free = frozenset(self._books.free)
            for slot in (self.taken & free).union(handed_out):
                self.poison.spoil_slot(slot)
            self.taken = frozenset(range(self.num_slots)) - free

    def reserve(self, keys: Sequence[BlockKey]) -> list[Reservation | None]:
        given = super().reserve(keys)
        self.look([reservation.slot for reservation in given if reservation is not None])
        return given

    def reserve_beside_others(
        self, keys: Sequence[BlockKey], spare: Callable[[BlockId], bool] = lambda _: False
    ) -> list[Reservation | None]:
        given = super().reserve_beside_others(keys, spare)
        self.look([reservation.slot for reservation in given if reservation is not None])
        return given

    def commit(self, reservations: Sequence[Reservation]) -> None:
        super().commit(reservations)
        self.look()

    def abandon(self, reservations: Sequence[Reservation]) -> None:
        super().abandon(reservations)
        self.look()

    def release(self, slots: Sequence[int]) -> None:
        super().release(slots)
        self.look()

    def put_back(self, slots: Sequence[int]) -> None:
        super().put_back(slots)
        self.look()

    def forget(self, ids: Iterable[BlockId], reason: Reason) -> int:
        forgotten = super().forget(ids, reason)
        self.look()
        return forgotten


class PoisonedBelow(Below):
    """`Below` for one engine with poison, late copies and a late store. `tick` lets the store go on.

    seed: of everything that is drawn here. faults: of the store; None: it only takes its time.
    """

    poison: Poison
    kv_class: type[PoisonedKv] = PoisonedKv
    host_class: type[PoisonedHost] = PoisonedHost
    mover_class: type[LateMover] = LateMover

    def __init__(
        self,
        *,
        host: int,
        store: MemoryStore | None,
        seed: int,
        faults: Faults | None = None,
        shared: bool = False,
    ) -> None:
        super().__init__(host=host, store=store, seed=seed, shared=shared)
        self.dice = random.Random(seed)
        self.faults = faults
        self.steps = Steps()
        self.run = self.steps
        self.now = 0.0  # the faulty store's clock: it goes a second a tick
        self.lanes: list[LateLane] = []
        self.fault_tier: FaultTier | None = None

    def __call__(self, config: EngineConfig, pool: BlockPool, kv: KvManager, layout: Layout) -> KvTiers:
        tiers = super().__call__(config, pool, kv, layout)
        below = tiers.below
        assert below is not None
        host = below.host
        kv.__class__, pool.__class__, host.__class__ = self.kv_class, _PoisonedPool, self.host_class
        assert isinstance(kv, PoisonedKv)
        assert isinstance(pool, _PoisonedPool)
        assert isinstance(host, PoisonedHost)
        self.poison = Poison(kv, pool, below.arena, self.late_mover)
        kv.poison = pool.poison = host.poison = self.poison
        return tiers

    def mover(self, pool: BlockPool, arena: HostBlocks) -> BlockMover:
        self.late_mover = self.mover_class(pool.data, arena, costs=COSTS, kernels=plain_kernels)
        self.lanes = [self.lane(), self.lane()]
        self.late_mover.run_late(*self.lanes)
        return self.late_mover

    def lane(self) -> LateLane:
        return LateLane(self.dice)

    def store_tier(self, codec: BlockCodec) -> StoreTier | None:
        if self.store is None:
            return None
        tier = MemoryTier(self.store, codec, run=self.run)
        if self.faults is None:
            return tier
        self.fault_tier = FaultTier(tier, self.faults, seed=self.seed or 0, clock=lambda: self.now)
        return self.fault_tier

    def tick(self) -> None:
        """Time passes in the store: some of what it was asked to do is done."""
        self.now += 1.0
        self.steps.run(min(len(self.steps.waiting), self.dice.choice((0, 0, 1, 2, 5))))
