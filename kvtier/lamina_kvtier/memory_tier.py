"""The in-memory twin of a store: the same contract, real stored values, and time and order as a test wants them.

store = MemoryStore(limit=10_000, ttl_s=60.0, clock=clock)     the server: shared, outlives its tiers
tier = MemoryTier(store, codec, run=Steps())                   a client of it; `Steps`: nothing runs before it is told
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from lamina_kvtier.block_codec import BlockCodec
from lamina_kvtier.identity import BlockId
from lamina_kvtier.memory_store import MemoryStore
from lamina_kvtier.namespace_counts import NamespaceCounts
from lamina_kvtier.operations import Ended, Promise
from lamina_kvtier.quota import Quota
from lamina_kvtier.reasons import Reason
from lamina_kvtier.tier import BlockKey, Operation, Outcome, Tally, TierUsage

__all__ = ["MemoryStore", "MemoryTier", "Steps", "at_once"]

T = TypeVar("T")


def at_once(job: Callable[[], None]) -> None:
    """Every operation has ended when it is returned."""
    job()


class Steps:
    """Operations wait here until they are told to run, in the order in which they were asked for."""

    def __init__(self) -> None:
        self.waiting: deque[Callable[[], None]] = deque()

    def __call__(self, job: Callable[[], None]) -> None:
        self.waiting.append(job)

    def run(self, count: int | None = None) -> None:
        """The next `count` operations; None: all there are."""
        for _ in range(len(self.waiting) if count is None else count):
            self.waiting.popleft()()


class MemoryTier:
    """A StoreTier on a MemoryStore. Values are encoded and verified as in a real store."""

    def __init__(
        self,
        store: MemoryStore,
        codec: BlockCodec,
        *,
        name: str = "memory",
        run: Callable[[Callable[[], None]], None] = at_once,
    ) -> None:
        self.store = store
        self._codec, self._name, self._run = codec, name, run
        self._puts: Counter[Outcome] = Counter()
        self._loads: Counter[Outcome] = Counter()
        self._refusals: NamespaceCounts[Reason] = NamespaceCounts(store.has_quota)
        self._evictions: NamespaceCounts[Reason] = NamespaceCounts(store.has_quota)
        self._lock = threading.RLock()  # held while an operation runs, so that `close` ends all or waits for one
        self._waiting: dict[Promise[Any], Any] = {}  # and what they end with if they are never run
        self._closed = False

    @property
    def name(self) -> str:
        return self._name

    def put(self, keys: Sequence[BlockKey], values: Sequence[memoryview]) -> Operation[tuple[Outcome, ...]]:
        """See StoreTier."""
        self._check(len(keys), values)
        pairs = list(zip(keys, values, strict=True))
        return self._per_block(len(pairs), lambda: self._put(pairs), self._puts)

    def load(
        self, ids: Sequence[BlockId], into: Sequence[memoryview], *, adapter: bytes | None = None
    ) -> Operation[tuple[Outcome, ...]]:
        """See StoreTier."""
        self._check(len(ids), into)
        if any(view.readonly for view in into):
            raise ValueError("blocks are loaded into memory that can be written")
        pairs = list(zip(ids, into, strict=True))
        return self._per_block(len(pairs), lambda: self._load(pairs, adapter), self._loads)

    def lookup(self, ids: Sequence[BlockId]) -> Operation[Tally]:
        """See StoreTier."""
        wanted = list(ids)

        def look(promise: Promise[Tally]) -> Tally:
            if promise.cancelled:
                return Tally(0, Outcome.CANCELLED)
            found = next((at for at, identity in enumerate(wanted) if not self.store.has(identity)), len(wanted))
            return Tally(found, Outcome.OK if found == len(wanted) else Outcome.MISSING)

        return self._submit(look, Tally(0, Outcome.CANCELLED), Tally(0, Outcome.UNAVAILABLE))

    def delete(self, ids: Sequence[BlockId]) -> Operation[Tally]:
        """See StoreTier."""
        unwanted = list(ids)

        def remove(promise: Promise[Tally]) -> Tally:
            if promise.cancelled:
                return Tally(0, Outcome.CANCELLED)
            return Tally(sum(self.store.delete(identity) for identity in unwanted), Outcome.OK)

        return self._submit(remove, Tally(0, Outcome.CANCELLED), Tally(0, Outcome.UNAVAILABLE))

    def set_quotas(self, quotas: Mapping[str, Quota], *, capacity: int | None = None) -> None:
        """See StoreTier."""
        self.store.set_quotas(quotas, capacity)

    def forget(self, namespace: str) -> Operation[Tally]:
        """See StoreTier."""

        def forget(promise: Promise[Tally]) -> Tally:
            if promise.cancelled:
                return Tally(0, Outcome.CANCELLED)
            if not self.store.has_quotas:
                return Tally(0, Outcome.REFUSED)
            return Tally(self.store.forget(namespace), Outcome.OK)

        return self._submit(forget, Tally(0, Outcome.CANCELLED), Tally(0, Outcome.UNAVAILABLE))

    def usage(self) -> TierUsage:
        """See StoreTier. The whole store's, also what others put there. O(blocks)."""
        by_namespace = self.store.by_namespace()
        return TierUsage(
            bytes=self.store.bytes,
            limit=self.store.limit,
            coverable=self.store.limit or 0,
            blocks=len(self.store),
            by_namespace=by_namespace,
            puts=dict(self._puts),
            loads=dict(self._loads),
            refusals=dict(self._refusals),
            evictions=dict(self._evictions),
        )

    def close(self) -> None:
        """See StoreTier. Operations that were not told to run are CANCELLED."""
        with self._lock:
            self._closed = True
            for promise, result in self._waiting.items():
                promise.fulfil(result)
            self._waiting.clear()

    def _put(self, pairs: Sequence[tuple[BlockKey, memoryview]]) -> list[Outcome]:
        blocks = [(key, b"".join(self._codec.encode(key, value))) for key, value in pairs]
        stored = self.store.put(blocks)
        for (namespace, reason), count in stored.victims.items():
            self._evictions.add(namespace, reason, count)
        for (key, _), refusal in zip(pairs, stored.refused, strict=True):
            if refusal is not None and self.store.has_quotas:
                self._refusals.add(key.namespace, refusal)
        return [Outcome.OK if reason is None else Outcome.REFUSED for reason in stored.refused]

    def _load(self, pairs: Sequence[tuple[BlockId, memoryview]], adapter: bytes | None) -> list[Outcome]:
        outcomes: list[Outcome] = []
        for identity, into in pairs:
            value = self.store.get(identity)
            found = None if value is None else self._codec.decode(value, identity, into, adapter=adapter)
            outcomes.append(found or Outcome.MISSING)
        fared = list(zip(pairs, outcomes, strict=True))
        self.store.used([identity for (identity, _), outcome in fared if outcome is Outcome.OK])
        if self.store.has_quotas:  # nobody pays for what nobody can use
            for identity in [identity for (identity, _), outcome in fared if outcome is Outcome.CORRUPT]:
                self.store.delete(identity)
        return outcomes

    def _per_block(
        self, count: int, carry_out: Callable[[], list[Outcome]], counter: Counter[Outcome]
    ) -> Operation[tuple[Outcome, ...]]:
        def all_blocks(promise: Promise[tuple[Outcome, ...]]) -> tuple[Outcome, ...]:
            outcomes = (Outcome.CANCELLED,) * count if promise.cancelled else tuple(carry_out())
            counter.update(outcomes)
            return outcomes

        return self._submit(all_blocks, (Outcome.CANCELLED,) * count, (Outcome.UNAVAILABLE,) * count)

    def _submit(self, work: Callable[[Promise[T]], T], cancelled: T, unavailable: T) -> Operation[T]:
        promise: Promise[T] = Promise()
        with self._lock:
            if self._closed:
                return Ended(unavailable)
            self._waiting[promise] = cancelled

        def job() -> None:
            with self._lock:
                if promise in self._waiting:
                    del self._waiting[promise]
                    promise.fulfil(work(promise))

        self._run(job)
        return promise

    def _check(self, keys: int, views: Sequence[memoryview]) -> None:
        if keys != len(views):
            raise ValueError(f"{keys} blocks for {len(views)} pieces of memory")
        for view in views:
            if view.nbytes != self._codec.block_bytes or not view.contiguous or view.format != "B" or view.ndim != 1:
                raise ValueError(f"a block is a contiguous view of {self._codec.block_bytes} bytes, not {view!r}")
