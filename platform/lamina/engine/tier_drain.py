"""The last seconds of an engine that is told to stop: what the next one will want goes to the store.

    first   what was on its way: copies, puts and their queue, pins, hot prefixes, what the store lost
    then    what only the device has, in the order in which it would be evicted, the last one first
    last    what only host memory has, the most recently used first

Stopping evicts all of it at once, and whatever is evicted goes to the store while an engine runs. It ends when all is
done, when the time is up, or with the first put that the store fails.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from lamina.engine.store_memory import StoreMemory
from lamina.engine.tier_puts import Puts
from lamina.engine.tier_spill import Spills
from lamina_kvtier.host_tier import HostTier
from lamina_kvtier.identity import BlockId
from lamina_kvtier.manager import KvManager

__all__ = ["Drain", "StoreRoom"]

_log = logging.getLogger(__name__)

_POLL_S = 0.002


@dataclass(frozen=True, slots=True)
class StoreRoom:
    """Blocks that the store may keep at most: of all together, and of those that have a limit. None: not known."""

    total: int | None
    by_namespace: Mapping[str, int]


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
        last_first = (identity for _, identity in reversed(kv.next_victims(kv.num_blocks)))
        self._line = deque(self._worth([*pinned, *last_first], room))
        self._looks_at_host = False

    def run(
        self,
        settle: Callable[[], object],
        stored: Callable[[], int],
        *,
        seconds: float,
        clock: Callable[[], float],
        sleep: Callable[[float], object],
    ) -> None:
        """`settle` takes in what has ended and goes on with what was due anyway; `stored` counts blocks."""
        began, before, failures = clock(), stored(), self._puts.failures
        why = "the time was up"
        while clock() - began < seconds:
            settle()
            if self._puts.failures > failures:
                why = "the store failed"
                break
            if not self._go_on():
                why = "there was no room for them"
                break
            sleep(_POLL_S)
        self._report(stored() - before, clock() - began, why)

    def _report(self, saved: int, seconds: float, why: str) -> None:
        left = sum(not self._memory.believes(identity) for identity in {*self._kv.known(), *self._below()})
        if saved or left:
            end = f"{left} are left: {why}" if left else "none is left"
            _log.info("saved %d blocks to the store before the end, in %.1f s; %s", saved, seconds, end)

    def _below(self) -> Iterator[BlockId]:
        keys = map(self._host.key_of, self._host.stored())
        return (key.id for key in keys if key is not None)

    def _worth(self, ids: Iterable[BlockId], room: StoreRoom) -> Iterator[BlockId]:
        """Those that the store lacks, but no more than it can keep: the last that come evict the first, which are worth
        more."""
        taken: Counter[str] = Counter()
        in_all = 0
        for identity in dict.fromkeys(ids):
            block = self._kv.find(identity)
            if block is None or self._memory.believes(identity):
                continue
            owner = self._kv.owner_of(block) or ""
            if in_all == room.total:
                return
            if taken[owner] != room.by_namespace.get(owner):
                taken[owner] += 1
                in_all += 1
                yield identity

    def _go_on(self) -> bool:
        """Starts what may start. False: nothing is left to do."""
        if self._line:
            self._from_device()
        elif not self._looks_at_host and not self._spills.reading:
            self._looks_at_host = True
            self._puts.renew_all()
        return bool(self._line) or self._is_moving

    @property
    def _is_moving(self) -> bool:
        return bool(self._spills.reading) or self._puts.is_busy

    def _from_device(self) -> None:
        """The next ones, through slots of host memory; whose blocks those were dies with this engine as well."""
        most = 0 if self._spills.reading else self._puts.slack()
        ids = self._puts.lacking([self._line.popleft() for _ in range(min(most, len(self._line)))])
        self._puts.put_stored(ids)
        blocks = [block for at in ids if not self._host.knows(at) and (block := self._kv.find(at)) is not None]
        given = self._host.reserve([self._spills.key_of(block) for block in blocks])
        self._spills.copy(blocks, given, passing=True)
        if self._is_moving:  # then those without a slot may find one later
            without = (self._kv.identity_of(block) for block, slot in zip(blocks, given, strict=True) if slot is None)
            self._line.extendleft(reversed([identity for identity in without if identity is not None]))
