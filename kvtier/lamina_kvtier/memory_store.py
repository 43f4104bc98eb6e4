"""The server behind the in-memory twin: values by identity, a limit, and the rules of quotas in plain words.

Without quotas whoever was used least recently goes, whoever pays for it, as in a server that evicts by itself. Under
quotas `_make_room` is the reference for `redis_plane/ledger.lua`: a test compares them, block by block.
"""

from __future__ import annotations

import heapq
import math
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from lamina_kvtier.errors import QuotaNotCoverable
from lamina_kvtier.identity import BlockId
from lamina_kvtier.over_shares import OverShares
from lamina_kvtier.quota import Quota
from lamina_kvtier.reasons import Reason
from lamina_kvtier.tier import BlockKey

__all__ = ["MemoryStore", "Stored"]

_UNBOUNDED = 2**53  # bytes
_DEFAULT = Quota(0, _UNBOUNDED)


@dataclass(slots=True)
class _Value:
    data: bytes
    namespace: str
    expires_at: float
    tick: int = 0  # of its last use


@dataclass(frozen=True, slots=True)
class Stored:
    """How a put fared: per block why it is not kept, or None; and who lost how many blocks for it."""

    refused: list[Reason | None] = field(default_factory=list)
    victims: Counter[tuple[str, Reason]] = field(default_factory=Counter)


class MemoryStore:
    """Any thread may use it."""

    def __init__(
        self,
        limit: int | None = None,
        *,
        ttl_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """limit: bytes, headers included; None: any number. ttl_s: a value is gone so long after its last use."""
        self.limit = limit
        self.bytes = 0
        self._ttl_s = float("inf") if ttl_s is None else ttl_s
        self._clock = clock
        self._values: dict[BlockId, _Value] = {}
        self._queues: defaultdict[str, list[tuple[int, BlockId]]] = defaultdict(list)  # heaps; old entries stay a while
        self._used: Counter[str] = Counter()
        self._quotas: dict[str, Quota] | None = None
        self._over = OverShares(self._over_share)
        self._tick = 0
        self._lock = threading.RLock()

    def set_quotas(self, quotas: Mapping[str, Quota], capacity: int | None) -> None:
        """capacity None: what `limit` is. Raises QuotaNotCoverable; then nothing changed."""
        with self._lock:
            limit = self.limit if capacity is None else capacity
            coverable = 0 if limit is None else limit
            need = sum(quota.reserved for quota in quotas.values())
            if need > coverable:
                raise QuotaNotCoverable(None, limit=coverable, need=need, have=coverable)
            self.limit, self._quotas = limit, dict(quotas)
            for namespace in self._used:
                self._over.changed(namespace)
            self._drop_expired()
            while self.bytes > self._room and (victim := self._furthest_over(self._tick)) is not None:
                self._evict(victim, self._tick, Reason.PRESSURE, Counter())

    @property
    def has_quotas(self) -> bool:
        return self._quotas is not None

    def has_quota(self, namespace: str) -> bool:
        """Whether this one has."""
        return namespace in (self._quotas or {})

    def put(self, blocks: Sequence[tuple[BlockKey, bytes]]) -> Stored:
        """Head of the prefix first. Under quotas what is there already is left as it is, and only used."""
        with self._lock:
            stored = Stored()
            if self._quotas is None:
                for key, data in blocks:
                    stored.refused.append(None if self._put_freely(key, data) else Reason.PRESSURE)
                return stored
            self._drop_expired()
            base = self._tick
            self._tick += len(blocks)
            for at, (key, data) in enumerate(blocks):
                stored.refused.append(self._put_by_quota(key, data, base, self._tick - at, stored.victims))
            return stored

    def has(self, identity: BlockId) -> bool:
        with self._lock:
            value = self._values.get(identity)
            if value is not None and value.expires_at <= self._clock():
                self.delete(identity)
                return False
            return value is not None

    def get(self, identity: BlockId) -> bytes | None:
        """Reading alone is no use of it: see `used`."""
        with self._lock:
            return self._values[identity].data if self.has(identity) else None

    def used(self, ids: Sequence[BlockId]) -> None:
        """They were loaded, head first: their time to live begins anew, and they go last, the tail before the head."""
        with self._lock:
            base = self._tick
            self._tick += len(ids)
            for at, identity in enumerate(ids):
                if self.has(identity):
                    self._use(identity, base + at + 1 if self._quotas is None else self._tick - at)

    def delete(self, identity: BlockId) -> bool:
        """False if it was not there."""
        with self._lock:
            value = self._values.pop(identity, None)
            if value is None:
                return False
            self._charge(value.namespace, -len(value.data))
            return True

    def forget(self, namespace: str) -> int:
        """All that it pays for; how many there were."""
        with self._lock:
            self._drop_expired()
            return sum(map(self.delete, [id for id, value in self._values.items() if value.namespace == namespace]))

    def tamper(self, identity: BlockId, change: Callable[[bytes], bytes]) -> None:
        """What a test wants to be there instead. Raises KeyError."""
        with self._lock:
            value = self._values[identity]
            data = change(value.data)
            self._charge(value.namespace, len(data) - len(value.data))
            value.data = data

    def by_namespace(self) -> Counter[str]:
        """Bytes that are there; forgets what has expired. O(values)."""
        with self._lock:
            self._drop_expired()
            return Counter(self._used)

    def __len__(self) -> int:
        return len(self._values)

    # Without quotas

    def _put_freely(self, key: BlockKey, data: bytes) -> bool:
        """False if it does not fit, even alone."""
        if self.limit is not None and len(data) > self.limit:
            return False
        self.delete(key.id)
        while self.limit is not None and self.bytes + len(data) > self.limit:
            fronts = ((self._oldest(namespace, self._tick), namespace) for namespace in list(self._used))
            _, oldest = min((self._values[front].tick, front) for front, _ in fronts if front is not None)
            self.delete(oldest)
        self._tick += 1
        self._add(key, data, self._tick)
        return True

    # Under quotas

    def _put_by_quota(
        self, key: BlockKey, data: bytes, base: int, tick: int, victims: Counter[tuple[str, Reason]]
    ) -> Reason | None:
        if self.has(key.id):
            if len(self._values[key.id].data) == len(data):
                self._use(key.id, tick)
                return None
            self.delete(key.id)  # not what was stored
        refusal = self._make_room(key.namespace, len(data), base, victims)
        if refusal is None:
            self._add(key, data, tick)
        return refusal

    def _make_room(self, namespace: str, size: int, base: int, victims: Counter[tuple[str, Reason]]) -> Reason | None:
        """Evicts for `size` more bytes of `namespace`, nothing that was used after tick `base`; or why it cannot."""
        limit, room = self._quota(namespace).limit, self._room
        if size > room:
            return Reason.PRESSURE
        if size > limit:
            return Reason.OWN_QUOTA
        while self._used[namespace] + size > limit:
            if not self._evict(namespace, base, Reason.OWN_QUOTA, victims):
                return Reason.OWN_QUOTA
        while self.bytes + size > room:
            if not self._evict(self._furthest_over(base) or namespace, base, Reason.PRESSURE, victims):
                return Reason.PRESSURE
        return None

    def _furthest_over(self, base: int) -> str | None:
        """Who has a block that may go beyond its reservation, and is furthest over its share; by name among equals."""
        return next((name for _, name in self._over if self._oldest(name, base) is not None), None)

    def _over_share(self, namespace: str) -> float | None:
        """None: it has nothing beyond its reservation."""
        used, quota = self._used[namespace], self._quota(namespace)
        if not namespace and used:  # nobody's: first of all
            return math.inf
        return (used - quota.reserved) / quota.weight if used > quota.reserved else None

    def _evict(self, namespace: str, base: int, reason: Reason, victims: Counter[tuple[str, Reason]]) -> bool:
        victim = self._oldest(namespace, base)
        if victim is None:
            return False
        victims[namespace, reason] += 1
        return self.delete(victim)

    @property
    def _room(self) -> int:
        return _UNBOUNDED if self.limit is None else self.limit

    def _quota(self, namespace: str) -> Quota:
        return (self._quotas or {}).get(namespace, _DEFAULT)

    # Both

    def _oldest(self, namespace: str, base: int) -> BlockId | None:
        """The namespace's least recently used value, unless that is after tick `base`. O(log values), amortised."""
        queue = self._queues[namespace]
        while queue:
            tick, identity = queue[0]
            value = self._values.get(identity)
            if value is not None and (value.tick, value.namespace) == (tick, namespace):
                return identity if tick <= base else None
            heapq.heappop(queue)
        return None

    def _add(self, key: BlockKey, data: bytes, tick: int) -> None:
        self._values[key.id] = _Value(data, key.namespace, self._clock() + self._ttl_s)
        self._charge(key.namespace, len(data))
        self._use(key.id, tick)

    def _charge(self, namespace: str, size: int) -> None:
        self.bytes += size
        self._used[namespace] += size
        if not self._used[namespace]:
            del self._used[namespace]
        if self._quotas is not None:  # else nobody asks
            self._over.changed(namespace)

    def _use(self, identity: BlockId, tick: int) -> None:
        value = self._values[identity]
        value.expires_at = self._clock() + self._ttl_s
        if tick > value.tick:  # twice in one put: the one nearer to the head counts
            value.tick = tick
            heapq.heappush(self._queues[value.namespace], (tick, identity))

    def _drop_expired(self) -> None:
        for identity in [identity for identity, value in self._values.items() if value.expires_at <= self._clock()]:
            self.delete(identity)
