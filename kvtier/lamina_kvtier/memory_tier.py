"""The in-memory twin of a store: the same contract, real stored values, and time and order as a test wants them.

store = MemoryStore(limit=10_000, ttl_s=60.0, clock=clock)     the server: shared, outlives its tiers
tier = MemoryTier(store, codec, run=Steps())                   a client of it; `Steps`: nothing runs before it is told
"""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from lamina_kvtier.block_codec import BlockCodec
from lamina_kvtier.identity import BlockId
from lamina_kvtier.operations import Ended, Promise
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


@dataclass(frozen=True, slots=True)
class _Stored:
    value: bytes
    namespace: str
    expires_at: float


class MemoryStore:
    """Values by identity, within a limit: the least recently used goes when one is stored. Any thread may use it."""

    def __init__(
        self,
        limit: int | None = None,
        *,
        ttl_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """limit: bytes, headers included; None: any number. ttl_s: a value is gone so long after it was stored."""
        self.limit = limit
        self.bytes = 0
        self._ttl_s = float("inf") if ttl_s is None else ttl_s
        self._clock = clock
        self._values: OrderedDict[BlockId, _Stored] = OrderedDict()  # least recently used first
        self._lock = threading.RLock()

    def put(self, key: BlockKey, value: bytes) -> bool:
        """False if it does not fit, even alone."""
        with self._lock:
            if self.limit is not None and len(value) > self.limit:
                return False
            self.delete(key.id)
            while self.limit is not None and self.bytes + len(value) > self.limit:
                self.delete(next(iter(self._values)))
            self._values[key.id] = _Stored(value, key.namespace, self._clock() + self._ttl_s)
            self.bytes += len(value)
            return True

    def has(self, identity: BlockId) -> bool:
        with self._lock:
            stored = self._values.get(identity)
            if stored is not None and stored.expires_at <= self._clock():
                self.delete(identity)
                return False
            return stored is not None

    def get(self, identity: BlockId) -> bytes | None:
        """Reading is using: it moves to the end of the order of eviction."""
        with self._lock:
            if not self.has(identity):
                return None
            self._values.move_to_end(identity)
            return self._values[identity].value

    def delete(self, identity: BlockId) -> bool:
        """False if it was not there."""
        with self._lock:
            stored = self._values.pop(identity, None)
            self.bytes -= 0 if stored is None else len(stored.value)
            return stored is not None

    def tamper(self, identity: BlockId, change: Callable[[bytes], bytes]) -> None:
        """What a test wants to be there instead. Raises KeyError."""
        with self._lock:
            stored = self._values[identity]
            value = change(stored.value)
            self._values[identity] = _Stored(value, stored.namespace, stored.expires_at)
            self.bytes += len(value) - len(stored.value)

    def by_namespace(self) -> Counter[str]:
        """Bytes that are there; forgets what has expired. O(values)."""
        with self._lock:
            for identity in list(self._values):
                self.has(identity)
            found: Counter[str] = Counter()
            for stored in self._values.values():
                found[stored.namespace] += len(stored.value)
            return found

    def __len__(self) -> int:
        return len(self._values)


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
        return self._per_block(len(pairs), lambda at: self._put(*pairs[at]), self._puts)

    def load(self, ids: Sequence[BlockId], into: Sequence[memoryview]) -> Operation[tuple[Outcome, ...]]:
        """See StoreTier."""
        self._check(len(ids), into)
        if any(view.readonly for view in into):
            raise ValueError("blocks are loaded into memory that can be written")
        pairs = list(zip(ids, into, strict=True))
        return self._per_block(len(pairs), lambda at: self._load(*pairs[at]), self._loads)

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

    def usage(self) -> TierUsage:
        """See StoreTier. The whole store's, also what others put there. O(blocks)."""
        by_namespace = self.store.by_namespace()
        return TierUsage(
            bytes=self.store.bytes,
            limit=self.store.limit,
            blocks=len(self.store),
            by_namespace=by_namespace,
            puts=dict(self._puts),
            loads=dict(self._loads),
        )

    def close(self) -> None:
        """See StoreTier. Operations that were not told to run are CANCELLED."""
        with self._lock:
            self._closed = True
            for promise, result in self._waiting.items():
                promise.fulfil(result)
            self._waiting.clear()

    def _put(self, key: BlockKey, value: memoryview) -> Outcome:
        header, payload = self._codec.encode(key, value)
        return Outcome.OK if self.store.put(key, header + bytes(payload)) else Outcome.REFUSED

    def _load(self, identity: BlockId, into: memoryview) -> Outcome:
        value = self.store.get(identity)
        return Outcome.MISSING if value is None else self._codec.decode(value, identity, into)

    def _per_block(
        self, count: int, carry_out: Callable[[int], Outcome], counter: Counter[Outcome]
    ) -> Operation[tuple[Outcome, ...]]:
        def all_blocks(promise: Promise[tuple[Outcome, ...]]) -> tuple[Outcome, ...]:
            outcomes = tuple(Outcome.CANCELLED if promise.cancelled else carry_out(at) for at in range(count))
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
