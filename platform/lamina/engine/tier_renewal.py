"""Blocks of host memory that the store should get once more: it lost them, or putting them failed.

    a few blocks are looked for ── all there ──▶ again in 2 s
        ▲      │ missing
        │      ▼
        │   those are put again; or, if they were half of them, all: the store came back empty
        └── in 4, 8, ... s, up to ten minutes: a store that is too small is not filled over and over

A killed server, FLUSHALL and eviction by the server look alike from here, and nobody tells of them: so it is asked.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Collection, Iterator
from itertools import chain, islice

from lamina.engine.store_memory import StoreMemory
from lamina_kvtier.host_tier import HostTier
from lamina_kvtier.identity import BlockId
from lamina_kvtier.manager import KvManager
from lamina_kvtier.tier import BlockKey, Operation, Outcome, StoreTier, Tally

__all__ = ["Renewals"]

_PROBE_S = 2.0  # between looks at a sound store
_MAX_PAUSE_S = 600.0
_SAMPLE = 8  # blocks of one look
_RETRY_S = 1.0  # after a put that failed, first
_MAX_RETRY_S = 16.0
_LOOK = 256  # slots looked at in one step
_NEWEST = 1 << 14  # blocks put in the order of their use; what is older than these, in no order


class Renewals:
    """Says which blocks to put again. Bounded work in each step, and none without a reason."""

    def __init__(
        self, kv: KvManager, host: HostTier, store: StoreTier, memory: StoreMemory, clock: Callable[[], float]
    ) -> None:
        self._kv, self._host, self._store, self._memory, self._clock = kv, host, store, memory, clock
        self._dice = random.Random(0)  # noqa: S311 - not a secret
        self._probes: list[tuple[BlockId, Operation[Tally]]] = []
        self._pause = _PROBE_S
        self._probe_at = clock() + _PROBE_S
        self._surprises = memory.surprises
        self._slots: Iterator[int] = iter(())  # still to be looked at
        self._is_looking = False  # whether there may be some
        self._found: deque[BlockKey] = deque()
        self._retry_at: float | None = None
        self._retry_s = _RETRY_S

    @property
    def is_busy(self) -> bool:
        """Whether it waits for an answer, or has more to look at."""
        return bool(self._probes or self._found or self._is_looking)

    def settle(self) -> None:
        """Takes in what the store has answered, and asks it if it is time."""
        now = self._clock()
        if self._probes:
            if all(operation.done() for _, operation in self._probes):
                self._end_probe(now)
        elif now >= self._probe_at or (self._memory.surprises > self._surprises and self._pause == _PROBE_S):
            self._probes = [(identity, self._store.lookup([identity])) for identity in self._sample()]
            self._surprises = self._memory.surprises
            self._probe_at = now + self._pause
        if self._retry_at is not None and now >= self._retry_at:
            self._begin()

    def next(self, count: int, under_way: Collection[BlockId]) -> list[BlockKey]:
        """Up to `count` blocks of one namespace to put, most recently used first, head before tail."""
        if self._is_looking and len(self._found) < count:
            slots = list(islice(self._slots, _LOOK))
            self._is_looking = len(slots) == _LOOK
            keys_there = (key for slot in slots if (key := self._host.key_of(slot)) is not None)
            self._found.extend(filter(self._wants, keys_there))
        keys: dict[BlockId, BlockKey] = {}
        while self._found and len(keys) < count:
            key = self._found[0]
            if keys and key.namespace != next(iter(keys.values())).namespace:
                break
            self._found.popleft()
            if self._wants(key) and key.id not in under_way:  # found some steps ago, or twice
                keys[key.id] = key
        return list(keys.values())

    def failed(self) -> None:
        """A put did not work out, for no reason of the block's own: later, all that is missing then."""
        self._is_looking = False
        self._found.clear()
        if self._retry_at is None:
            self._retry_at = self._clock() + self._retry_s
            self._retry_s = min(2 * self._retry_s, _MAX_RETRY_S)

    def worked(self) -> None:
        """A put did."""
        self._retry_s = _RETRY_S

    def _begin(self) -> None:
        """Goes over host memory once, the most recently used first; then what is held, pinned or older than those."""
        self._slots = chain(self._host.newest(_NEWEST), range(self._host.num_slots))
        self._is_looking = True
        self._found.clear()
        self._retry_at = None

    def _wants(self, key: BlockKey) -> bool:
        return self._host.stores(key.id) and not self._memory.believes(key.id)

    def _sample(self) -> list[BlockId]:
        """A few blocks that are here and should be there, of all ages: up to half of them on the device."""
        slots = (self._dice.randrange(self._host.num_slots) for _ in range(4 * _SAMPLE))
        keys = (self._host.key_of(slot) for slot in slots)
        below = (key.id for key in keys if key is not None and self._host.stores(key.id))
        blocks = (self._dice.randrange(self._kv.num_blocks) for _ in range(4 * _SAMPLE))
        above = (identity for identity in map(self._kv.identity_of, blocks) if identity is not None)
        believed = self._memory.believes
        found = [*islice(filter(believed, above), _SAMPLE // 2), *islice(filter(believed, below), _SAMPLE)]
        return list(dict.fromkeys(found[:_SAMPLE]))

    def _end_probe(self, now: float) -> None:
        answers = [(identity, operation.result().outcome) for identity, operation in self._probes]
        self._probes = []
        answered = [identity for identity, outcome in answers if outcome in (Outcome.OK, Outcome.MISSING)]
        missing = [identity for identity, outcome in answers if outcome is Outcome.MISSING]
        self._memory.missed(missing)
        if missing and 2 * len(missing) >= len(answered):
            self._memory.doubt_all()
        self._surprises = self._memory.surprises
        if missing:
            self._pause = min(2 * self._pause, _MAX_PAUSE_S)
            self._begin()
        elif answered:
            self._pause = _PROBE_S
        self._probe_at = now + self._pause
