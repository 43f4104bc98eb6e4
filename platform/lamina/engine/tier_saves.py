"""Blocks of the device that are no victims, on their way to the store: pins keep them, or requests use them.

What a pin keeps never has to leave the device, and what every request uses does not for long: so nobody would save the
one, nor, once the store has lost it, the other. A store outlives the engine, and serves its replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice

from lamina.engine.store_memory import StoreMemory
from lamina_kvtier.host_tier import HostTier
from lamina_kvtier.identity import BlockId
from lamina_kvtier.manager import KvManager

__all__ = ["DeviceSaves"]

_LOOK = 32  # blocks looked at in one step
_PAUSE_S = 1.0  # where host memory has no room, and between looks for what the store lost


class DeviceSaves:
    """Goes round and round over what is pinned, a few blocks in each step, and names what is nowhere below. When the
    store turns out to have lost blocks, it goes once over all that the device has of what was there.

    Best effort, and no guard: the device keeps these blocks as long as it would without.
    """

    def __init__(self, kv: KvManager, host: HostTier, memory: StoreMemory, clock: Callable[[], float]) -> None:
        """`memory`: of what is in the store."""
        self._kv, self._host, self._memory, self._clock = kv, host, memory, clock
        self.pinned: Callable[[], Iterable[BlockId]] = tuple
        self._round: Iterator[BlockId] = iter(())
        self._lost: Iterator[BlockId] = iter(())
        self._surprises = memory.surprises
        self._look_at = self._not_before = clock()

    def due(self) -> list[tuple[int, BlockId]]:
        """Device blocks to save, in the pins' order. O(1), but for O(pool) after a loss, at most once a second."""
        now = self._clock()
        if now < self._not_before:
            return []
        if self._memory.surprises > self._surprises and now >= self._look_at:
            self._surprises, self._look_at = self._memory.surprises, now + _PAUSE_S
            self._lost = iter([identity for identity in self._kv.known() if self._memory.lost(identity) is not None])
        ids = list(islice(self._lost, _LOOK)) or self._next_pinned()
        wanted = [identity for identity in ids if not self._host.knows(identity)]
        found = ((self._kv.find(identity), identity) for identity in wanted if not self._memory.believes(identity))
        return [(block, identity) for block, identity in found if block is not None]

    def tried(self, due: Iterable[tuple[int, BlockId]]) -> None:
        """These were to be saved."""
        if not all(self._host.knows(identity) for _, identity in due):
            self._not_before = self._clock() + _PAUSE_S

    def _next_pinned(self) -> list[BlockId]:
        ids = list(islice(self._round, _LOOK))
        if len(ids) < _LOOK:  # once round
            self._round = iter(list(self.pinned()))
            ids = list(dict.fromkeys([*ids, *islice(self._round, _LOOK - len(ids))]))
        return ids
