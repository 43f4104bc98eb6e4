"""One waiting choice's blocks on their way up: looked up, loaded into host memory, promoted to the device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum, auto

from lamina.engine.request import Choice
from lamina_kernels.gpu.block_mover import BlockMover, HostBlocks, Transfer
from lamina_kvtier.errors import OutOfBlocks
from lamina_kvtier.host_tier import HostTier, Reservation
from lamina_kvtier.identity import BlockId
from lamina_kvtier.manager import KvManager
from lamina_kvtier.policies import Rate
from lamina_kvtier.reasons import Reason, reason_of
from lamina_kvtier.tier import NO_ADAPTER, BlockKey, Operation, Outcome, StoreTier, Tally

__all__ = ["Fetch", "FetchPlan", "Rates"]

_NO_PRIOR = 1e-9  # blocks: the first measurement outweighs the guess that a rate starts from


class Rates:
    """How fast blocks are computed and loaded, as measured lately."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._compute, self._load = (Rate(prior=1.0, prior_units=_NO_PRIOR) for _ in range(2))  # seconds per block

    def computed(self, tokens: int, seconds: float) -> None:
        """A step; those of few tokens say nothing about prefill."""
        if tokens >= 4 * self._block_size:
            self._compute.observe(tokens / self._block_size, seconds)

    def loaded(self, blocks: int, seconds: float) -> None:
        self._load.observe(blocks, seconds)

    def prefers_load(self) -> bool:
        """Whether loading a block takes no longer than computing it; yes while one of both is unknown."""
        if not self._compute.count or not self._load.count:
            return True
        return self._load.seconds_per_unit <= self._compute.seconds_per_unit


class _State(Enum):
    LOOKUP = auto()
    LOAD = auto()
    PROMOTE = auto()
    COPY = auto()
    DONE = auto()


@dataclass(slots=True, eq=False)
class Fetch:
    """Holds the device blocks of the prefix that is there, and the host slots of what follows."""

    plan: FetchPlan
    ids: list[BlockId]  # of what is missing on the device, from the first on
    key: Callable[[BlockId], BlockKey]
    blocks: list[int]  # on the device, held
    slots: list[int]  # in host memory, held; slots[i] has ids[i]
    state: _State
    lookup: Operation[Tally] | None = None
    load: Operation[tuple[Outcome, ...]] | None = None
    reservations: list[Reservation] = field(default_factory=list)
    transfer: Transfer | None = None
    targets: list[int] = field(default_factory=list)
    since: float = 0.0
    loaded: set[BlockId] = field(default_factory=set)
    origins: dict[BlockId, str] = field(default_factory=dict)  # "host" or "store": where what it brought up came from
    fates: dict[BlockId, Reason] = field(default_factory=dict)  # why what was asked for below did not come
    cancelled: bool = False

    @property
    def is_done(self) -> bool:
        return self.state is _State.DONE

    @property
    def held(self) -> list[int]:
        """Device blocks."""
        return [*self.blocks, *self.targets]

    def advance(self, spilling: frozenset[int]) -> None:
        """Goes on as far as it can without waiting. `spilling`: device blocks that are being read."""
        steps = {
            _State.LOOKUP: self._end_lookup,
            _State.LOAD: self._end_load,
            _State.PROMOTE: lambda: self._promote(spilling),
            _State.COPY: self._end_copy,
        }
        while self.state in steps:
            before = self.state
            steps[before]()
            if self.state is before:
                return

    def cancel(self) -> None:
        """Stops early; what is under way still has to end."""
        self.cancelled = True
        for operation in (self.lookup, self.load):
            if operation is not None:
                operation.cancel()

    def let_go(self) -> None:
        """Gives back the device blocks; for one that is done."""
        self.plan.kv.release(self.blocks)
        self.blocks = []

    def _end_lookup(self) -> None:
        if self.lookup is None or not self.lookup.done():
            return
        tally = self.lookup.result()
        found = 0 if self.cancelled else tally.blocks
        self._lack(self.ids[len(self.slots) + found :], reason_of(tally.outcome))
        self.state = _State.PROMOTE
        if found and self.plan.store is not None:
            self._start_load(self.plan.store, found)

    def _start_load(self, store: StoreTier, found: int) -> None:
        wanted = self.ids[len(self.slots) :][:found]
        if not self.plan.rates.prefers_load():
            self.plan.counts["declined"] += found
            self._lack(wanted, Reason.CHEAPER)
            return
        for reservation in self.plan.host.reserve([self.key(identity) for identity in wanted]):
            if reservation is None:
                break
            self.reservations.append(reservation)
        self._lack(wanted[len(self.reservations) :], Reason.PRESSURE)
        if self.reservations:
            views = [self.plan.arena.bytes_of(reservation.slot) for reservation in self.reservations]
            self.since = self.plan.clock()
            self.load = store.load(wanted[: len(self.reservations)], views)
            self.state = _State.LOAD

    def _end_load(self) -> None:
        if self.load is None or not self.load.done():
            return
        outcomes = self.load.result()
        good = next((i for i, outcome in enumerate(outcomes) if outcome is not Outcome.OK), len(outcomes))
        self.plan.counts["loaded"] += good
        self.plan.counts["failed"] += len(outcomes) - good
        if good:
            self.plan.rates.loaded(good, self.plan.clock() - self.since)
        for reservation, outcome in zip(self.reservations, outcomes, strict=True):
            self._lack([reservation.key.id], reason_of(outcome))
        here, lost = self.reservations[:good], self.reservations[good:]
        self.loaded.update(reservation.key.id for reservation in here)
        self.plan.host.commit(here)
        self.plan.host.abandon(lost)
        arrived = self.plan.host.find([reservation.key.id for reservation in here])
        self.plan.host.hold(arrived)
        self.slots += arrived
        self.reservations = []
        self.state = _State.PROMOTE

    def _promote(self, spilling: frozenset[int]) -> None:
        count = 0 if self.cancelled else min(len(self.slots), self.plan.kv.available_to(self._owner))
        try:
            targets = self.plan.kv.allocate(count, owner=self._owner) if count else []
        except OutOfBlocks:
            targets = []
        if not targets:
            self._finish()
        elif spilling & frozenset(targets):
            self.plan.kv.release(targets)  # they are being read: another moment
        else:
            self.targets = targets
            self.transfer = self.plan.mover.promote(self.slots[: len(targets)], targets)
            self.state = _State.COPY

    @property
    def _owner(self) -> str:
        return self.key(self.ids[0]).namespace

    def _end_copy(self) -> None:
        if self.transfer is None or not self.transfer.done():
            return
        try:
            self.transfer.wait()
        except RuntimeError:
            self.plan.counts["failed"] += len(self.targets)
            self.plan.kv.release(self.targets)
        else:
            for block, identity in zip(self.targets, self.ids, strict=False):
                self.plan.kv.publish(block, identity)
                self.origins[identity] = "store" if identity in self.loaded else "host"
            self.blocks += self.targets
            self.plan.counts["promoted"] += len(self.targets)
        self.targets = []
        self._finish()

    def _lack(self, ids: Iterable[BlockId], reason: Reason | None) -> None:
        if reason is not None:
            self.fates |= dict.fromkeys(ids, reason)

    def _finish(self) -> None:
        self.plan.host.release(self.slots)
        self.slots = []
        self.state = _State.DONE


class FetchPlan:
    """Begins fetches, and has what they work with."""

    def __init__(
        self,
        kv: KvManager,
        host: HostTier,
        arena: HostBlocks,
        mover: BlockMover,
        store: StoreTier | None,
        counts: Counter[str],
        clock: Callable[[], float],
    ) -> None:
        self.kv, self.host, self.arena, self.mover, self.store = kv, host, arena, mover, store
        self.counts, self.clock = counts, clock
        self.rates = Rates(kv.block_size)

    def begin(self, choice: Choice) -> Fetch | None:
        """None if nothing below the device can help."""
        known = choice.known_ids(self.kv.block_size)
        on_device = self.kv.match(known)
        missing = known[on_device:]
        slots = self.host.find(missing)
        below = missing[len(slots) :]
        if not missing or not (slots or (below and self.store is not None)):
            return None
        self.host.hold(slots)
        lookup = self.store.lookup(below) if below and self.store is not None else None
        return Fetch(
            plan=self,
            ids=missing,
            key=_namer(choice),
            blocks=self.kv.acquire(known[:on_device]),
            slots=slots,
            state=_State.LOOKUP if lookup is not None else _State.PROMOTE,
            lookup=lookup,
        )


def _namer(choice: Choice) -> Callable[[BlockId], BlockKey]:
    request = choice.request.request
    adapter = NO_ADAPTER if request.adapter is None else bytes.fromhex(request.adapter)
    return lambda identity: BlockKey(identity, request.namespace, adapter)
