"""KV blocks below the device: spilled before they are evicted, promoted before the request that wants them starts.

    device pool ──spill──▶ host memory ──put──▶ store (Redis, ...)
                ◀─promote──            ◀─load──

A spill copies blocks that would be evicted next; they stay where they are until somebody needs the room. A promotion is
a *fetch* of one waiting choice: its blocks are copied into newly allocated ones and published, so that the choice finds
them as any cached prefix when it is admitted. Others run meanwhile. Every transfer is ordered by the lanes of
`BlockMover`; a step that writes into a block which is still being spilled waits on the device (`before_step`).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from lamina.engine.provenance import Provenance, Unasked
from lamina.engine.request import Choice
from lamina.engine.tier_fetch import Fetch, FetchPlan
from lamina_kernels.gpu.block_mover import BlockMover, HostBlocks, Transfer
from lamina_kvtier.host_tier import HostTier, Reservation
from lamina_kvtier.manager import KvManager
from lamina_kvtier.tier import BlockKey, Operation, Outcome, StoreTier

__all__ = ["KvTiers", "NoTiers", "TierGate", "TierStats", "Tiers"]

_MAX_SPILLS = 4  # transfers under way
_SPILL_BATCH = 256  # blocks of one transfer
_MAX_PUT_BYTES = 256 << 20  # on their way to the store; what comes beyond stays in host memory only


class TierGate(Protocol):
    """What the scheduler asks of the tiers."""

    def is_ready(self, choice: Choice) -> bool:
        """False while blocks for this waiting choice are on their way up; the first call starts that."""
        ...

    def started(self, choice: Choice) -> None:
        """The choice holds its prefix itself now."""
        ...

    def left(self, choice: Choice) -> None:
        """The choice will not start, or ended."""
        ...

    def give_back(self) -> bool:
        """Lets go of blocks that were fetched for choices which have not started; True if there were any."""
        ...

    def held_tables(self) -> list[list[int]]:
        """Device blocks that are held for fetches, for `KvManager.check_integrity`."""
        ...


@dataclass(frozen=True, slots=True)
class TierStats:
    """Blocks; all but the first two only grow."""

    host_total: int = 0
    host_used: int = 0
    spilled: int = 0
    promoted: int = 0
    stored: int = 0
    loaded: int = 0
    declined: int = 0  # recomputing was cheaper
    failed: int = 0  # put, load or copy that did not work out


class Tiers(TierGate, Protocol):
    """What the engine core asks of them."""

    def settle(self) -> None:
        """Takes in what has ended since the last call."""
        ...

    def before_step(self, written: Iterable[int]) -> None:
        """The next step writes into these device blocks."""
        ...

    def after_step(self, tokens: int, seconds: float) -> None:
        """A step of so many tokens was launched and took so long."""
        ...

    @property
    def is_busy(self) -> bool:
        """Whether a waiting choice's blocks are on their way."""
        ...

    def stats(self) -> TierStats: ...

    def check_integrity(self) -> None: ...

    def close(self) -> None: ...


class NoTiers:
    """The device pool alone."""

    def is_ready(self, choice: Choice) -> bool:
        return True

    def started(self, choice: Choice) -> None:
        """Nothing was fetched."""

    def left(self, choice: Choice) -> None:
        """Nothing was fetched."""

    def give_back(self) -> bool:
        return False

    def held_tables(self) -> list[list[int]]:
        return []

    def settle(self) -> None:
        """Nothing is under way."""

    def before_step(self, written: Iterable[int]) -> None:
        """Nothing is read beside a step."""

    def after_step(self, tokens: int, seconds: float) -> None:
        """Nothing is spilled."""

    @property
    def is_busy(self) -> bool:
        return False

    def stats(self) -> TierStats:
        return TierStats()

    def check_integrity(self) -> None:
        """Nothing to check."""

    def close(self) -> None:
        """Nothing to close."""


@dataclass(frozen=True, slots=True)
class _Spill:
    transfer: Transfer
    reservations: list[Reservation]
    blocks: frozenset[int]


@dataclass(frozen=True, slots=True)
class _Put:
    operation: Operation[tuple[Outcome, ...]]
    slots: list[int]


class KvTiers:
    """Host memory, and below it a store if there is one. Owned by the engine's thread."""

    def __init__(
        self,
        kv: KvManager,
        host: HostTier,
        arena: HostBlocks,
        mover: BlockMover,
        store: StoreTier | None = None,
        *,
        low_water: int,
        provenance: Provenance | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`low_water`: free device blocks below which the next victims are spilled. `provenance` hears of fetches."""
        self._kv, self._host, self._arena, self._mover, self._store = kv, host, arena, mover, store
        self._low_water = low_water
        self._provenance: Provenance = Unasked() if provenance is None else provenance
        self._counts: Counter[str] = Counter()
        self._plan = FetchPlan(kv, host, arena, mover, store, self._counts, clock)
        self._spills: list[_Spill] = []
        self._puts: list[_Put] = []
        self._fetches: dict[Choice, Fetch] = {}
        self._orphans: list[Fetch] = []  # of choices that left: their transfers have to end first

    # --- the scheduler's side -----------------------------------------------------------------------------

    def is_ready(self, choice: Choice) -> bool:
        fetch = self._fetches.get(choice)
        if fetch is None:
            fetch = self._plan.begin(choice)
            if fetch is None:
                return True
            self._fetches[choice] = fetch
        fetch.advance(self._spilling())
        return fetch.is_done

    def started(self, choice: Choice) -> None:
        fetch = self._fetches.pop(choice, None)
        if fetch is not None:
            self._provenance.arrived(choice, fetch.origins, fetch.fates)
            fetch.let_go()

    def left(self, choice: Choice) -> None:
        fetch = self._fetches.pop(choice, None)
        if fetch is not None:
            fetch.cancel()
            self._orphans.append(fetch)

    def give_back(self) -> bool:
        idle = [fetch for fetch in self._fetches.values() if fetch.is_done and fetch.blocks]
        for fetch in idle:
            fetch.let_go()  # they stay cached, and are found if nobody takes them
        return bool(idle)

    # --- the step's side ----------------------------------------------------------------------------------

    def settle(self) -> None:
        """Takes in what has ended since the last call."""
        self._spills = [spill for spill in self._spills if not self._end_spill(spill)]
        self._puts = [put for put in self._puts if not self._end_put(put)]
        for fetch in [*self._fetches.values(), *self._orphans]:
            fetch.advance(self._spilling())
        for fetch in self._orphans:
            if fetch.is_done:
                fetch.let_go()
        self._orphans = [fetch for fetch in self._orphans if not fetch.is_done]

    def before_step(self, written: Iterable[int]) -> None:
        """Lets the step wait, on the device, for spills of blocks that it overwrites."""
        targets = frozenset(written)
        for spill in self._spills:
            if spill.blocks & targets:
                spill.transfer.gate()

    def after_step(self, tokens: int, seconds: float) -> None:
        """Notes how fast steps compute, and spills ahead of need."""
        self._plan.rates.computed(tokens, seconds)
        if self._kv.usage().free >= self._low_water or len(self._spills) >= _MAX_SPILLS:
            return
        busy = self._spilling()
        victims = [
            (block, BlockKey(identity, self._kv.owner_of(block) or ""))
            for block, identity in self._kv.next_victims(self._low_water)
            if block not in busy and not self._host.knows(identity)
        ][:_SPILL_BATCH]
        if victims:
            self._spill(victims[::-1])

    @property
    def is_busy(self) -> bool:
        """Whether a waiting choice's blocks are on their way."""
        return bool(self._fetches)

    def _spilling(self) -> frozenset[int]:
        return frozenset[int]().union(*(spill.blocks for spill in self._spills))

    def _spill(self, victims: Sequence[tuple[int, BlockKey]]) -> None:
        """Blocks and what they hold, head first, as tables have them."""
        given = self._host.reserve([key for _, key in victims])
        pairs = zip(victims, given, strict=True)
        reserved = [(block, reservation) for (block, _), reservation in pairs if reservation is not None]
        if not reserved:
            return
        reservations = [reservation for _, reservation in reserved]
        sources = [block for block, _ in reserved]
        transfer = self._mover.spill(sources, [reservation.slot for reservation in reservations])
        self._spills.append(_Spill(transfer, reservations, frozenset(sources)))
        self._spills = [spill for spill in self._spills if not self._end_spill(spill)]

    def _end_spill(self, spill: _Spill) -> bool:
        if not spill.transfer.done():
            return False
        try:
            spill.transfer.wait()
        except RuntimeError:
            self._host.abandon(spill.reservations)
            self._counts["failed"] += len(spill.reservations)
            return True
        self._host.commit(spill.reservations)
        self._counts["spilled"] += len(spill.reservations)
        self._put(spill.reservations)
        return True

    def _put(self, reservations: Sequence[Reservation]) -> None:
        """Writes through to the store, as long as it keeps up."""
        if self._store is None:
            return
        under_way = sum(len(put.slots) for put in self._puts) * self._arena.block_bytes
        room = max(0, (_MAX_PUT_BYTES - under_way) // self._arena.block_bytes)
        found = [slot for reservation in reservations[:room] for slot in self._host.find([reservation.key.id])]
        if not found:
            return
        self._host.hold(found)
        keys = [self._host.key_of(slot) for slot in found]
        operation = self._store.put(
            [key for key in keys if key is not None], [self._arena.bytes_of(slot) for slot in found]
        )
        self._puts.append(_Put(operation, found))

    def _end_put(self, put: _Put) -> bool:
        if not put.operation.done():
            return False
        outcomes = put.operation.result()
        kept = sum(outcome is Outcome.OK for outcome in outcomes)
        self._counts["stored"] += kept
        self._counts["failed"] += len(outcomes) - kept
        self._host.put_back(put.slots)
        return True

    # --- reports ------------------------------------------------------------------------------------------

    def stats(self) -> TierStats:
        usage = self._host.usage()
        return TierStats(
            host_total=usage.total,
            host_used=usage.total - usage.free,
            **{name: self._counts[name] for name in ("spilled", "promoted", "stored", "loaded", "declined", "failed")},
        )

    def held_tables(self) -> list[list[int]]:
        return [fetch.held for fetch in [*self._fetches.values(), *self._orphans]]

    def check_integrity(self) -> None:
        """Raises IntegrityError unless host memory's books agree."""
        self._host.check_integrity()

    def close(self) -> None:
        """Ends the store; nothing may be called afterwards."""
        if self._store is not None:
            self._store.close()
