"""A few neighbouring blocks on their way up: loaded into host memory if they are not there, then copied to the device.

waits ──▶ loads ──▶ waits ──▶ is copied ──▶ done        `Shares` of each path say when waiting ends
  └─────────────────▲
  in host memory already
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from lamina.engine.store_memory import StoreMemory
from lamina.engine.tier_rates import Rates
from lamina.engine.tier_shares import Shares
from lamina_kernels.gpu.block_mover import BlockMover, HostBlocks, Transfer
from lamina_kvtier.errors import OutOfBlocks
from lamina_kvtier.host_tier import HostTier, Reservation
from lamina_kvtier.identity import BlockId
from lamina_kvtier.manager import KvManager
from lamina_kvtier.reasons import Reason, reason_of
from lamina_kvtier.tier import BlockKey, Operation, Outcome, StoreTier

__all__ = ["Lift", "LiftPaths"]

_MAX_LOAD_BYTES = 64 << 20  # on their way from the store
_MAX_COPY_BYTES = 128 << 20  # on their way to the device


class LiftPaths:
    """What lifts go through, and how fast it is."""

    def __init__(
        self,
        kv: KvManager,
        host: HostTier,
        arena: HostBlocks,
        mover: BlockMover,
        store: StoreTier | None,
        counts: Counter[str],
        rates: Rates,
        clock: Callable[[], float],
        memory: StoreMemory | None = None,
    ) -> None:
        """`memory`: of what is in the store."""
        self.memory = StoreMemory() if memory is None else memory
        self.kv, self.host, self.arena, self.mover, self.store = kv, host, arena, mover, store
        self.counts, self.rates, self.clock = counts, rates, clock
        self.loads: Shares[Lift] = Shares(_MAX_LOAD_BYTES)
        self.copies: Shares[Lift] = Shares(_MAX_COPY_BYTES)

    def start_waiting(self, spilling: frozenset[int], *, copying: bool) -> None:
        """Starts what may start. `spilling`: device blocks that are being read.

        `copying`: to the device, too. Never while a step is planned: a block that has come free in it may still be
        the source of one of its copies.
        """
        _start(self.loads, Lift.load)
        if copying:
            _start(self.copies, lambda lift: lift.copy(spilling))


def _start(shares: Shares[Lift], go: Callable[[Lift], bool]) -> None:
    """All that may start now. Those that cannot yet keep their places, and hold up nobody else."""
    aside: list[tuple[Lift, int]] = []
    while (lift := shares.start()) is not None:
        if not go(lift):
            aside.append((lift, shares.set_aside(lift)))
    for lift, size in reversed(aside):
        shares.returned(lift, lift.tenant, lift.weight, size)


class _State(Enum):
    WANTS_LOAD = auto()
    LOADS = auto()
    WANTS_COPY = auto()
    COPIES = auto()
    DONE = auto()


@dataclass(slots=True, eq=False)
class Lift:
    """`allocate` gives device blocks for it, and `restore` hears how many of them it gave back unused.

    Holds the slots that it copies, and then the device blocks in `here`.
    """

    paths: LiftPaths
    keys: list[BlockKey]
    tenant: str
    weight: float
    allocate: Callable[[int], list[int]]
    restore: Callable[[int], object]
    state: _State = _State.WANTS_LOAD
    slots: list[int] = field(default_factory=list)  # of the first blocks, held
    reservations: list[Reservation] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)
    here: dict[BlockId, int] = field(default_factory=dict)  # arrived, and held
    operation: Operation[tuple[Outcome, ...]] | None = None
    transfer: Transfer | None = None
    since: float = 0.0
    loaded: set[BlockId] = field(default_factory=set)
    origins: dict[BlockId, str] = field(default_factory=dict)  # "host" or "store", of what arrived
    fates: dict[BlockId, Reason] = field(default_factory=dict)  # of what did not
    cancelled: bool = False

    @property
    def is_done(self) -> bool:
        return self.state is _State.DONE

    @property
    def held(self) -> list[int]:
        """Device blocks."""
        return [*self.here.values(), *self.targets]

    @property
    def _size(self) -> int:
        return len(self.keys) * self.paths.arena.block_bytes

    def begin(self) -> None:
        """Stands in line for what it needs first."""
        self.slots = self.paths.host.find(self._ids)
        self.paths.host.hold(self.slots)
        if len(self.slots) == len(self.keys) or self.paths.store is None:
            self._want_copy()
        else:
            self.paths.loads.want(self, self.tenant, self.weight, self._size)

    def cancel(self) -> None:
        """Stops early; what is under way still has to end."""
        self.cancelled = True
        if self.operation is not None:
            self.operation.cancel()
        if self.state is _State.WANTS_LOAD:
            self.paths.loads.withdraw(self, self.tenant)
            self._finish()
        elif self.state is _State.WANTS_COPY:
            self.paths.copies.withdraw(self, self.tenant)
            self._finish()

    def let_go(self, identities: Iterable[BlockId]) -> list[int]:
        """Gives back those of these device blocks that it holds, and returns them."""
        blocks = [self.here.pop(identity) for identity in identities if identity in self.here]
        self.paths.kv.release(blocks)
        return blocks

    def advance(self) -> None:
        """Takes in what has ended."""
        if self.state is _State.LOADS and self.operation is not None and self.operation.done():
            self._end_load(self.operation.result())
        if self.state is _State.COPIES and self.transfer is not None and self.transfer.done():
            self._end_copy(self.transfer)

    # --- store to host memory -----------------------------------------------------------------------------

    def load(self) -> bool:
        """Its turn has come. False: another one is loading the same blocks, which is to be waited for."""
        host, store = self.paths.host, self.paths.store
        found = host.find(self._ids[len(self.slots) :])  # others may have loaded them meanwhile
        host.hold(found)
        self.slots += found
        wanted = self.keys[len(self.slots) :]
        if wanted and host.knows(wanted[0].id):
            return False
        self._reserve(wanted)
        if not self.reservations or store is None:
            self.paths.loads.ended(self)
            self._want_copy()
            return True
        views = [self.paths.arena.bytes_of(reservation.slot) for reservation in self.reservations]
        self.since = self.paths.clock()
        self.operation = store.load(
            [reservation.key.id for reservation in self.reservations], views, adapter=self.keys[0].adapter
        )
        self.state = _State.LOADS
        return True

    def _reserve(self, wanted: Sequence[BlockKey]) -> None:
        """Slots up to the first block that there is none for, or that host memory has behind a gap: the rest of the
        prefix would not be found yet."""
        given = self.paths.host.reserve(wanted)
        end = next((at for at, reservation in enumerate(given) if reservation is None), len(given))
        self.reservations = [reservation for reservation in given[:end] if reservation is not None]
        self.paths.host.abandon([reservation for reservation in given[end:] if reservation is not None])
        if end < len(wanted) and not self.paths.host.knows(wanted[end].id):
            self._lack(wanted[end:], Reason.PRESSURE)

    def _end_load(self, outcomes: Sequence[Outcome]) -> None:
        self.paths.loads.ended(self)
        good = next((i for i, outcome in enumerate(outcomes) if outcome is not Outcome.OK), len(outcomes))
        self._count(outcomes, good)
        here, lost = self.reservations[:good], self.reservations[good:]
        for reservation, outcome in zip(lost, outcomes[good:], strict=True):
            self._lack([reservation.key], reason_of(outcome))
        self.loaded.update(reservation.key.id for reservation in here)
        self.paths.memory.note(reservation.key.id for reservation in here)
        fared = zip(lost, outcomes[good:], strict=True)
        self.paths.memory.missed(reservation.key.id for reservation, outcome in fared if outcome is Outcome.MISSING)
        self.paths.host.commit(here)
        self.paths.host.abandon(lost)
        arrived = self.paths.host.find(self._ids[len(self.slots) :])  # and what was there behind them
        self.paths.host.hold(arrived)
        self.slots += arrived
        self.reservations = []
        self._want_copy()

    def _count(self, outcomes: Sequence[Outcome], good: int) -> None:
        self.paths.counts["loaded"] += good
        self.paths.counts["failed"] += sum(o not in (Outcome.OK, Outcome.CANCELLED) for o in outcomes)
        if Outcome.TIMEOUT in outcomes:
            good = max(good, 1)  # that was slow, and has to count as such
        if good:
            self.paths.rates.loaded(good, self.since)

    # --- host memory to the device ------------------------------------------------------------------------

    def _want_copy(self) -> None:
        if self.cancelled or not self.slots:
            self._finish()
            return
        self.state = _State.WANTS_COPY
        self.paths.copies.want(self, self.tenant, self.weight, len(self.slots) * self.paths.arena.block_bytes)

    def copy(self, spilling: frozenset[int]) -> bool:
        """Its turn has come. False: the blocks that it got are still being read; it keeps them until they are not."""
        if not self.targets:
            self.targets = self._device_blocks()
        if not self.targets:
            self.paths.copies.ended(self)
            self._finish()
        elif spilling & frozenset(self.targets):
            return False
        else:
            self.transfer = self.paths.mover.promote(self.slots[: len(self.targets)], self.targets)
            self.state = _State.COPIES
        return True

    def _device_blocks(self) -> list[int]:
        """As many as it wants, or as there are."""
        try:
            return self.allocate(len(self.slots))
        except OutOfBlocks as shortage:
            return self._as_many_as(shortage.have)

    def _as_many_as(self, count: int) -> list[int]:
        try:
            return self.allocate(min(count, len(self.slots))) if count > 0 else []
        except OutOfBlocks:
            return []

    def _end_copy(self, transfer: Transfer) -> None:
        self.paths.copies.ended(self)
        try:
            transfer.wait()
        except RuntimeError:
            self.paths.counts["failed"] += len(self.targets)
            self._drop_targets()
        else:
            for block, key in zip(self.targets, self.keys, strict=False):
                self.paths.kv.publish(block, key.id, adapter=key.adapter)
                self.here[key.id] = block
                self.origins[key.id] = "store" if key.id in self.loaded else "host"
            self.paths.counts["promoted"] += len(self.targets)
            self.targets = []
        self._finish()

    def _drop_targets(self) -> None:
        self.paths.kv.release(self.targets)
        self.restore(len(self.targets))
        self.targets = []

    def _finish(self) -> None:
        self._drop_targets()
        self.paths.host.release(self.slots)
        self.slots = []
        self.state = _State.DONE

    @property
    def _ids(self) -> list[BlockId]:
        return [key.id for key in self.keys]

    def _lack(self, keys: Iterable[BlockKey], reason: Reason | None) -> None:
        if reason is not None:
            self.fates |= dict.fromkeys((key.id for key in keys), reason)
