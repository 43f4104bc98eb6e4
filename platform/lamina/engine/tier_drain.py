"""The last seconds of an engine that is told to stop: what the next one will want goes to the store.

    first   what was on its way: copies, puts and their queue, pins, hot prefixes, what the store lost
    then    what the device has, in the order in which it would be evicted, the last one first
    last    what else host memory has, the most recently used first

Stopping evicts all of it at once, and whatever is evicted goes to the store while an engine runs. It ends when all is
done, when the time is up, or with the first put that the store fails.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain

from lamina.engine.store_memory import StoreMemory
from lamina.engine.tier_puts import Puts
from lamina.engine.tier_spill import Spills
from lamina_kvtier.block_codec import HEADER_BYTES
from lamina_kvtier.host_tier import HostTier
from lamina_kvtier.identity import BlockId
from lamina_kvtier.manager import KvManager
from lamina_kvtier.tier import BlockKey, TierUsage

__all__ = ["Drain", "StoreRoom"]

_log = logging.getLogger(__name__)

_POLL_S = 0.002


@dataclass(frozen=True, slots=True)
class StoreRoom:
    """Blocks that the store may keep at most: of all together, and of those that have a limit. None: not known.

    `of` takes bytes. A stored block has a header, and a codec may make it smaller: what the store has now tells.
    """

    total: int | None
    by_namespace: Mapping[str, int]

    @staticmethod
    def of(usage: TierUsage, limits: Mapping[str, int], block_bytes: int) -> StoreRoom:
        has_some = usage.bytes > 0 and usage.blocks  # the two may be from different moments
        unit = -(-usage.bytes // has_some) if has_some else block_bytes + HEADER_BYTES
        total = None if usage.limit is None else usage.limit // unit
        return StoreRoom(total, {namespace: limit // unit for namespace, limit in limits.items()})


class Drain:
    """One use. Nothing runs any more but transfers, and no request comes."""

    def __init__(
        self,
        kv: KvManager,
        host: HostTier,
        spills: Spills,
        puts: Puts,
        memory: StoreMemory,
        *,
        pinned: Iterable[BlockId],
        room: StoreRoom,
    ) -> None:
        """`memory`: of what is in the store. `pinned`: what the device keeps for pins."""
        self._kv, self._host, self._spills, self._puts, self._memory = kv, host, spills, puts, memory
        self._line = deque(self._worth(chain(self._on_device(pinned), self._below()), room))

    def run(
        self,
        settle: Callable[[], bool],
        stored: Callable[[], int],
        *,
        seconds: float,
        clock: Callable[[], float],
        sleep: Callable[[float], object],
    ) -> None:
        """`settle` takes in what has ended and goes on with what was due anyway, and says whether more than blocks is
        waited for; `stored` counts blocks."""
        began, before, failures = clock(), stored(), self._puts.failures
        why = "the time was up"
        while clock() - began < seconds:
            waits = settle()
            if self._puts.failures > failures:
                why = "the store failed"
                break
            if not (self._go_on() or waits):
                why = "the store takes no more of them"
                break
            sleep(_POLL_S)
        self._report(stored() - before, clock() - began, why)

    def _report(self, saved: int, seconds: float, why: str) -> None:
        here = {*self._kv.known(), *(key.id for key in self._below())}
        left = sum(not self._memory.believes(identity) for identity in here)
        if saved or left:
            end = f"{left} are left: {why}" if left else "none is left"
            _log.info("saved %d blocks to the store before the end, in %.1f s; %s", saved, seconds, end)

    def _on_device(self, pinned: Iterable[BlockId]) -> Iterator[BlockKey]:
        """Pinned ones, then in the reclaim order from its end."""
        last_first = (identity for _, identity in reversed(self._kv.next_victims(self._kv.num_blocks)))
        blocks = map(self._kv.find, chain(pinned, last_first))
        return (self._spills.key_of(block) for block in blocks if block is not None)

    def _below(self) -> Iterator[BlockKey]:
        """The most recently used first, then what is held or pinned there."""
        host = self._host
        keys = map(host.key_of, chain(host.newest(host.num_slots), host.stored()))
        return (key for key in keys if key is not None)

    def _worth(self, keys: Iterable[BlockKey], room: StoreRoom) -> Iterator[BlockId]:
        """Those that the store lacks, but with what it has of these no more than it can keep: the last that come evict
        the first, or what was used before this engine began to save."""
        taken: Counter[str] = Counter()
        seen: set[BlockId] = set()
        for key in keys:
            if len(seen) == room.total:
                return
            if key.id in seen or taken[key.namespace] == room.by_namespace.get(key.namespace):
                continue
            seen.add(key.id)
            taken[key.namespace] += 1
            if not self._memory.believes(key.id):
                yield key.id

    def _go_on(self) -> bool:
        """Starts what may start. False: nothing is left to do."""
        if self._line:
            self._next()
        return bool(self._line) or self._is_moving

    @property
    def _is_moving(self) -> bool:
        return bool(self._spills.reading) or self._puts.is_busy

    def _next(self) -> None:
        """Some more, those of the device through slots of host memory: what was there dies with this engine as well."""
        most = 0 if self._spills.reading else self._puts.slack()
        ids = self._puts.lacking([self._line.popleft() for _ in range(min(most, len(self._line)))])
        self._puts.put_stored(ids)
        blocks = [block for at in ids if not self._host.knows(at) and (block := self._kv.find(at)) is not None]
        given = self._host.reserve([self._spills.key_of(block) for block in blocks])
        self._spills.copy(blocks, given, passing=True)
        if self._is_moving:  # then those without a slot may find one later
            without = (self._kv.identity_of(block) for block, slot in zip(blocks, given, strict=True) if slot is None)
            self._line.extendleft(reversed([identity for identity in without if identity is not None]))
