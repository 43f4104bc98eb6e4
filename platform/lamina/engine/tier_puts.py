"""Blocks of host memory on their way to the store: what is new first, tenants in fair turns, within bounds."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from lamina.engine.store_memory import StoreMemory
from lamina.engine.tier_renewal import Renewals
from lamina.engine.tier_shares import Shares
from lamina_kernels.gpu.block_mover import HostBlocks
from lamina_kvtier.host_tier import HostTier
from lamina_kvtier.identity import BlockId
from lamina_kvtier.manager import KvManager
from lamina_kvtier.tier import BlockKey, Operation, Outcome, StoreTier

__all__ = ["Puts"]

_PUT_BYTES = 16 << 20  # of one put, so that tenants take turns
_MAX_PUT_BYTES = 256 << 20  # on their way to the store
_MAX_QUEUED_BYTES = 256 << 20  # of one tenant, waiting for that; what comes beyond stays in host memory only
_SLACK_PART = 4  # of what may be on its way, and of host memory: no more than this is for what is not new


@dataclass(slots=True, eq=False)
class _Put:
    keys: list[BlockKey]
    slots: list[int]
    passing: bool  # only the store wants it: the slots are the next victims afterwards
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
        self.failures = 0  # puts that the store did not manage; only grows

    @property
    def has_store(self) -> bool:
        """Or nothing is ever put."""
        return self._store is not None

    def want(self, keys: Sequence[BlockKey], *, passing: bool = False) -> None:
        """These blocks of host memory are to be put, in a table's order. `passing`: which is no use of them there."""
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

    def put_stored(self, ids: Iterable[BlockId]) -> None:
        """Starts to put those of these that host memory has: from then on no eviction takes them. Nobody wants them
        there any longer for that."""
        slots = (slot for identity in ids for slot in self._host.find([identity]))
        self.want([key for slot in slots if (key := self._host.key_of(slot)) is not None], passing=True)
        self.start()

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

    def lacking(self, ids: Iterable[BlockId]) -> list[BlockId]:
        """Those that the store does not have, as far as we know, nor is writing."""
        writing = {key.id for key in self.keys_under_way()}
        return [identity for identity in ids if identity not in writing and not self._memory.believes(identity)]

    def keys_under_way(self) -> Iterator[BlockKey]:
        """Of blocks that the store is writing."""
        return (key for put in self._under_way for key in put.keys)

    def settle(self) -> None:
        """Takes in what has ended, and starts what may start."""
        self._under_way = [put for put in self._under_way if not self._end(put)]
        self.start()
        if self._renewals is not None:
            self._renewals.settle()
            self._renew(self._renewals)

    def start(self) -> None:
        """Starts what may start. From then on its slots are held, and no eviction takes them."""
        while (put := self._shares.start()) is not None:
            self._start(put)

    def _renew(self, renewals: Renewals) -> None:
        """Puts once more what has to be, as far as there is slack."""
        while most := self.slack():
            keys = renewals.next(most, {key.id for key in self.keys_under_way()})
            if not keys:
                return
            self.want(keys, passing=True)
            self.start()

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
            self.failures += 1
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
