"""Blocks of the device that are no victims, on their way down all the same.

What a pin keeps never has to leave the device, and what every request uses does not for long: so nobody would save the
one or the other, nor put it again once the store has lost it. A store outlives the engine, and serves its replicas.

    first   pins with floor `host`    into host memory, where they are kept
            pins with floor `gpu`     through host memory into the store
            what the store lost       the same
    last    what is hot               the same, with as few blocks at a time as nobody else feels
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice

from lamina.engine.host_commons import HostCommons
from lamina.engine.store_memory import StoreMemory
from lamina.engine.tier_hot import HotPrefixes
from lamina.engine.tier_puts import Puts
from lamina.engine.tier_spill import SPILL_BATCH, Spills
from lamina_kvtier.host_tier import HostTier, Reservation
from lamina_kvtier.identity import BlockId
from lamina_kvtier.manager import KvManager
from lamina_kvtier.tier import BlockKey

__all__ = ["DeviceSaves", "Saves"]

_LOOK = 32  # blocks looked at in one step
_PAUSE_S = 1.0  # where host memory has no room, and between looks for what the store lost


class Saves:
    """Starts these copies, as far as transfers may start. O(1) in a step where nothing is due."""

    def __init__(
        self,
        kv: KvManager,
        host: HostTier,
        spills: Spills,
        puts: Puts,
        memory: StoreMemory,
        commons_of_host: HostCommons | None,
        clock: Callable[[], float],
    ) -> None:
        """`memory`: of what is in the store. `commons_of_host`: None: host memory is what a store works through."""
        self._kv, self._host, self._spills, self._puts = kv, host, spills, puts
        self._commons, self._memory = commons_of_host, memory
        self._device = DeviceSaves(kv, host, memory, clock)
        self._hot = HotPrefixes(memory, clock, most=kv.num_blocks)

    def keep(self, pinned: Callable[[], Iterable[BlockId]]) -> None:
        """From now on what `pinned` names goes to the store."""
        self._device.pinned = pinned

    def pinned(self) -> Iterable[BlockId]:
        """What `keep` was told of."""
        return self._device.pinned()

    def found(self, namespace: str, request: int, ids: Iterable[BlockId]) -> None:
        """See HotPrefixes."""
        if self._puts.has_store:
            self._hot.found(namespace, request, ids)

    def kept(self) -> None:
        """Copies down what pins keep, however much is free, and what the store lost."""
        if self._commons is not None and self._spills.has_room:
            due = self._commons.pins.due(SPILL_BATCH)
            if due:
                self._spills.save(due[::-1])
        if self._puts.has_store and self._spills.has_room:
            on_device = self._device.due()
            if on_device:
                self._spills.save_now(on_device)
                self._device.tried(on_device)

    def hot(self) -> None:
        """Copies a few blocks down while nothing else is, and nothing that is new waits for the store."""
        if self._hot.is_empty or self._spills.reading:
            return
        most = self._puts.slack()
        if not most:
            return
        namespace, ids = self._hot.next(most)
        ids = self._puts.lacking(ids)
        self._puts.put_stored(ids)  # before room is made for the others, which could be made of these
        on_device = (self._kv.find(identity) for identity in ids if not self._host.knows(identity))
        blocks = [block for block in on_device if block is not None]
        if blocks:
            given = self._room_for([self._spills.key_of(block) for block in blocks])
            self._spills.copy(blocks, given, passing=True)
            if None in given:
                self._hot.drop(namespace)

    def _room_for(self, keys: Sequence[BlockKey]) -> Sequence[Reservation | None]:
        """In place of other namespaces' blocks what the own reservation entitles to; beyond that, of those that the
        store has: the device has these."""
        if self._commons is None:
            return self._host.reserve(keys)
        account = self._commons.ledger.account(keys[0].namespace)
        own = max(0, account.quota.reserved - account.committed)
        entitled = self._host.reserve(keys[:own])
        return [*entitled, *self._host.reserve_beside_others(keys[own:], self._memory.believes)]


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
