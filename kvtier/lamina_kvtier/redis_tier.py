"""KV blocks in a Redis or Valkey server: one value per block, header and payload.

    lamina:{a1b2c3d4e5f60718}:kv1:<identity, 64 hex digits>        header (192 bytes) | payload

The part in braces is a hash of the block layout and of the deployment's name. It is the tag by which a Redis cluster
places keys, so all blocks of one tier live in one slot: EXISTS and UNLINK may name many of them in one command, and one
server answers for a whole prefix. The price is that one tier never spreads over the servers of a cluster. It keeps
nobody apart: identities do that, they cover the base model, adapter, tenant and tokens.

Nothing is kept here about which blocks there are. Any replica with the same layout finds them, after a restart too, and
the server may evict what it likes: that is a MISSING block. Deadlines, retries and breakers: `redis_plane`.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from lamina_kvtier.block_codec import HEADER_BYTES, BlockCodec
from lamina_kvtier.identity import BlockId
from lamina_kvtier.redis_plane import Ask, Batch, ErrorReply, Failure, PlaneConfig, RedisAddress, RedisPlane, Request
from lamina_kvtier.redis_plane.prefix_probe import PrefixProbe
from lamina_kvtier.redis_plane.requests import Fetch, Store
from lamina_kvtier.tier import BlockKey, Operation, Outcome, Tally, TierUsage

__all__ = ["RedisTier", "RedisTierConfig"]

T = TypeVar("T")

_GROUP = 64  # keys in one command
_USAGE_S = 1.0  # how old an answer about the server's memory may be
_FULL = "OOM"


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisTierConfig:
    """Raises ValueError. Seconds; each is the longest that an operation of its kind takes, whatever happens."""

    deployment: str = ""  # replicas with equal names share blocks
    ttl_s: float | None = None  # a block expires so long after it was stored; None: only eviction removes it
    lookup_s: float = 0.25
    load_s: float = 2.0
    put_s: float = 5.0
    delete_s: float = 2.0
    plane: PlaneConfig = field(default_factory=PlaneConfig)

    def __post_init__(self) -> None:
        for name in ("lookup_s", "load_s", "put_s", "delete_s", "ttl_s"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name} must be more than 0 seconds, not {value}")


class RedisTier:
    """A StoreTier. Holds threads and sockets until `close`; connects when there is something to do."""

    def __init__(
        self, address: RedisAddress, codec: BlockCodec, config: RedisTierConfig | None = None, *, name: str = "redis"
    ) -> None:
        """Raises InvalidAddress if the address asks for TLS files that cannot be read."""
        self._config = config or RedisTierConfig()
        self._codec = codec
        self._name = name
        self._prefix = _key_prefix(codec.layout, self._config.deployment)
        self._ttl_ms = None if self._config.ttl_s is None else max(1, round(self._config.ttl_s * 1000))
        self._plane = RedisPlane(address, self._config.plane, name=f"lamina-{name}")
        self._lock = threading.Lock()  # guards what follows
        self._puts: Counter[Outcome] = Counter()
        self._loads: Counter[Outcome] = Counter()
        self._memory = _Memory(0, None, asked_at=-_USAGE_S)
        self._last_refusal = ""

    @property
    def name(self) -> str:
        return self._name

    @property
    def plane(self) -> RedisPlane:
        """For its counters."""
        return self._plane

    @property
    def trouble(self) -> str:
        """The last thing that went wrong, for people; "" if nothing did."""
        return self._last_refusal or self._plane.counters().trouble

    def put(self, keys: Sequence[BlockKey], values: Sequence[memoryview]) -> Operation[tuple[Outcome, ...]]:
        """See StoreTier."""
        views = self._views(len(keys), values, writable=False)
        stores = [self._store(key, view) for key, view in zip(keys, views, strict=True)]
        return self._move(stores, self._config.put_s, lambda: self._tally(self._puts, map(self._stored, stores)))

    def lookup(self, ids: Sequence[BlockId]) -> Operation[Tally]:
        """See StoreTier."""
        if not ids:
            return self._ask([], self._config.lookup_s, lambda: Tally(0, Outcome.OK))
        probe = PrefixProbe([self._key(block) for block in ids])
        return self._ask([probe], self._config.lookup_s, lambda: self._found(probe, len(ids)))

    def load(self, ids: Sequence[BlockId], into: Sequence[memoryview]) -> Operation[tuple[Outcome, ...]]:
        """See StoreTier."""
        views = self._views(len(ids), into, writable=True)
        landings = [_Landing(self._codec, block, view) for block, view in zip(ids, views, strict=True)]
        expected = HEADER_BYTES + self._codec.block_bytes
        fetches = [Fetch(self._key(at.identity), expected, at.place, at.check) for at in landings]

        def conclude() -> tuple[Outcome, ...]:
            return self._tally(self._loads, map(self._loaded, fetches, landings))

        return self._move(fetches, self._config.load_s, conclude)

    def delete(self, ids: Sequence[BlockId]) -> Operation[Tally]:
        """See StoreTier."""
        keys = [self._key(block) for block in ids]
        groups = [keys[start : start + _GROUP] for start in range(0, len(keys), _GROUP)]
        request = Ask([(b"UNLINK", *group) for group in groups], int)
        return self._ask([request] if groups else [], self._config.delete_s, lambda: self._deleted(request))

    def usage(self) -> TierUsage:
        """`bytes` and `limit` are the whole server's: that is what its eviction goes by."""
        self._refresh_memory()
        with self._lock:
            return TierUsage(
                bytes=self._memory.used, limit=self._memory.limit, puts=dict(self._puts), loads=dict(self._loads)
            )

    def close(self) -> None:
        """See StoreTier."""
        self._plane.close()

    def _key(self, block: BlockId) -> bytes:
        return self._prefix + block.hex().encode()

    def _store(self, key: BlockKey, view: memoryview) -> Store:
        def value() -> tuple[Any, ...]:
            return self._codec.encode(key, view)

        return Store(self._key(key.id), value, HEADER_BYTES + len(view), self._ttl_ms)

    def _move(self, requests: Sequence[Request], limit_s: float, conclude: Callable[[], T]) -> Batch[T]:
        batch = Batch(requests, time.monotonic() + limit_s, conclude)
        self._plane.move(batch)
        return batch

    def _ask(self, requests: Sequence[Request], limit_s: float, conclude: Callable[[], T]) -> Batch[T]:
        batch = Batch(requests, time.monotonic() + limit_s, conclude)
        self._plane.ask(batch)
        return batch

    def _views(self, count: int, views: Sequence[memoryview], *, writable: bool) -> list[memoryview]:
        """The same memory as plain bytes. Raises ValueError."""
        if len(views) != count:
            raise ValueError(f"{count} blocks, but {len(views)} pieces of memory")
        size = self._codec.block_bytes
        for view in views:
            if view.nbytes != size or not view.c_contiguous or (writable and view.readonly):
                raise ValueError(f"a block needs {size} contiguous{' writable' if writable else ''} bytes")
        return [view if view.format == "B" and view.ndim == 1 else view.cast("B") for view in views]

    # Outcomes. Called when an operation ends, on whatever thread.

    def _stored(self, store: Store) -> Outcome:
        if isinstance(store.result, ErrorReply):
            return self._refusal(store.result)
        if isinstance(store.result, Failure):
            return Outcome(store.result.value)
        return Outcome.OK

    def _loaded(self, fetch: Fetch, landing: _Landing) -> Outcome:
        result = fetch.result
        if isinstance(result, Failure):
            return Outcome(result.value)
        if isinstance(result, ErrorReply):
            return Outcome.CORRUPT if result.code == "WRONGTYPE" else self._refusal(result)
        if result.length < 0:
            return Outcome.MISSING
        return landing.outcome if result.taken else Outcome.CORRUPT

    def _found(self, probe: PrefixProbe, wanted: int) -> Tally:
        if isinstance(probe.trouble, ErrorReply):
            return Tally(probe.known, self._refusal(probe.trouble))
        if isinstance(probe.trouble, Failure):
            return Tally(probe.known, Outcome(probe.trouble.value))
        return Tally(probe.known, Outcome.OK if probe.known == wanted else Outcome.MISSING)

    def _deleted(self, request: Ask) -> Tally:
        if isinstance(request.result, Failure):
            return Tally(0, Outcome.OK if not request.cost else Outcome(request.result.value))
        refusals = [self._refusal(reply) for reply in request.result if isinstance(reply, ErrorReply)]
        gone = sum(reply for reply in request.result if isinstance(reply, int))
        return Tally(gone, refusals[0] if refusals else Outcome.OK)

    def _refusal(self, error: ErrorReply) -> Outcome:
        self._last_refusal = error.text[:200]
        return Outcome.REFUSED if error.code == _FULL else Outcome.UNAVAILABLE

    def _tally(self, counter: Counter[Outcome], outcomes: Iterable[Outcome]) -> tuple[Outcome, ...]:
        found = tuple(outcomes)
        with self._lock:
            counter.update(found)
        return found

    def _refresh_memory(self) -> None:
        """Asks the server at most once a second, and waits no longer than for a look-up."""
        now = time.monotonic()
        with self._lock:
            if now - self._memory.asked_at < _USAGE_S:
                return
            self._memory = _Memory(self._memory.used, self._memory.limit, asked_at=now)
        request = Ask([(b"INFO", b"memory")], bytes)
        answer = self._ask([request], self._config.lookup_s, lambda: request.result).result()
        if isinstance(answer, list) and isinstance(answer[0], bytes):
            with self._lock:
                self._memory = _Memory.parse(answer[0], now)


class _Landing:
    """Where one block comes in from the server, and whether it is the right one."""

    __slots__ = ("_body", "_codec", "_header", "_into", "identity", "outcome")

    def __init__(self, codec: BlockCodec, identity: BlockId, into: memoryview) -> None:
        self.identity = identity
        self.outcome = Outcome.MISSING
        self._codec, self._into = codec, into
        self._header = bytearray(HEADER_BYTES)
        self._body = into

    def place(self, length: int) -> Sequence[memoryview] | None:
        """A raw block goes right into its destination. One in another codec goes to memory of its own, which may be a
        little more than a block: that is the worst that a compressor does to noise."""
        payload = length - HEADER_BYTES
        block = len(self._into)
        if payload == block:
            self._body = self._into
        elif 0 <= payload <= block + block // 128 + 1024:
            self._body = memoryview(bytearray(payload))
        else:
            return None
        return [memoryview(self._header), self._body]

    def check(self) -> bool:
        """Verifies what came; False if it is not even the header of this block."""
        header = self._codec.read_header(self._header, HEADER_BYTES + len(self._body), self.identity)
        if isinstance(header, Outcome):
            self.outcome = header
            return header is not Outcome.CORRUPT
        in_the_way = self._body is self._into and not header.in_place  # as long as a block, and yet no raw one
        payload = bytes(self._body) if in_the_way else self._body
        self.outcome = self._codec.finish(header, payload, self._into)
        return True


@dataclass(frozen=True, slots=True)
class _Memory:
    """What the server said about its memory."""

    used: int
    limit: int | None
    asked_at: float  # time.monotonic()

    @staticmethod
    def parse(info: bytes, asked_at: float) -> _Memory:
        fields = dict(line.partition(b":")[::2] for line in info.splitlines())
        limit = _number(fields.get(b"maxmemory", b""))
        return _Memory(_number(fields.get(b"used_memory", b"")), limit or None, asked_at)


def _number(digits: bytes) -> int:
    return int(digits) if digits.isdigit() and len(digits) < 20 else 0


def _key_prefix(layout: bytes, deployment: str) -> bytes:
    scope = hashlib.blake2b(layout + deployment.encode(), digest_size=8).hexdigest()
    return b"lamina:{%b}:kv1:" % scope.encode()
