"""KV blocks in a Redis or Valkey server: one value per block, header and payload.

Any replica with the same layout finds them, after a restart too. Without quotas nothing is written down about which
blocks there are, and the server may evict what it likes: that is a MISSING block. Under quotas a ledger beside the
blocks says who pays for what and whose go first, and the server never has to evict.

    RedisTier ──▶ load, look-up: here                        redis_blocks.py    keys and requests
        ├───────▶ put, delete, forget: a Keeping             redis_keeping.py   one of two
        ├───────▶ quotas: RedisPolicy                        redis_policy.py    which one, and installing them
        └───────▶ what nobody waits for: RedisChores         redis_chores.py    uses, comparing ledger and values

Deadlines, retries and breakers: `redis_plane`.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from lamina_kvtier.block_codec import HEADER_BYTES, BlockCodec
from lamina_kvtier.identity import BlockId
from lamina_kvtier.quota import Quota
from lamina_kvtier.redis_blocks import RedisBlocks, RedisTierConfig, largest_payload
from lamina_kvtier.redis_chores import RedisChores
from lamina_kvtier.redis_plane import ErrorReply, Failure, RedisAddress, RedisPlane
from lamina_kvtier.redis_plane.prefix_probe import PrefixProbe
from lamina_kvtier.redis_plane.requests import Fetch
from lamina_kvtier.redis_policy import RedisPolicy, bounded
from lamina_kvtier.redis_usage import ServerUsage
from lamina_kvtier.tier import BlockKey, Operation, Outcome, Tally, TierUsage

__all__ = ["RedisTier", "RedisTierConfig"]

T = TypeVar("T")


class RedisTier:
    """A StoreTier. Holds threads and sockets until `close`; connects when there is something to do."""

    def __init__(
        self, address: RedisAddress, codec: BlockCodec, config: RedisTierConfig | None = None, *, name: str = "redis"
    ) -> None:
        """Raises InvalidAddress if the address asks for TLS files that cannot be read."""
        self.config = config = config or RedisTierConfig()
        self._codec, self._name = codec, name
        self._plane = RedisPlane(address, config.plane, name=f"lamina-{name}")
        self._blocks = RedisBlocks(self._plane, codec, config)
        self._usage = ServerUsage(self._blocks)
        self._policy = RedisPolicy(self._blocks, self._usage)
        self._chores = RedisChores(self._blocks, self._policy, name=f"lamina-{name}-chores")
        self._lock = threading.Lock()  # guards what follows
        self._puts: Counter[Outcome] = Counter()
        self._loads: Counter[Outcome] = Counter()

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
        return self._blocks.last_refusal or self._plane.counters().trouble

    def put(self, keys: Sequence[BlockKey], values: Sequence[memoryview]) -> Operation[tuple[Outcome, ...]]:
        """See StoreTier."""
        views = self._views(len(keys), values, writable=False)
        return self._policy.keeping.put(keys, views, lambda outcomes: self._tally(self._puts, outcomes))

    def lookup(self, ids: Sequence[BlockId]) -> Operation[Tally]:
        """See StoreTier."""
        if not ids:
            return self._blocks.ask([], self.config.lookup_s, lambda: Tally(0, Outcome.OK))
        probe = PrefixProbe([self._blocks.key(block) for block in ids])
        return self._blocks.ask([probe], self.config.lookup_s, lambda: self._found(probe, len(ids)))

    def load(
        self, ids: Sequence[BlockId], into: Sequence[memoryview], *, adapter: bytes | None = None
    ) -> Operation[tuple[Outcome, ...]]:
        """See StoreTier."""
        views = self._views(len(ids), into, writable=True)
        landings = [_Landing(self._codec, block, view, adapter) for block, view in zip(ids, views, strict=True)]
        expected = HEADER_BYTES + self._codec.block_bytes
        fetches = [Fetch(self._blocks.key(at.identity), expected, at.place, at.check) for at in landings]

        def conclude() -> tuple[Outcome, ...]:
            outcomes = self._tally(self._loads, map(self._loaded, fetches, landings))
            self._note(ids, outcomes)
            return outcomes

        return self._blocks.move(fetches, self.config.load_s, conclude)

    def delete(self, ids: Sequence[BlockId]) -> Operation[Tally]:
        """See StoreTier."""
        return self._policy.keeping.delete(ids)

    def forget(self, namespace: str) -> Operation[Tally]:
        """See StoreTier. What does not get done within its time is counted, and the rest can be asked for again."""
        return self._policy.keeping.forget(namespace)

    def set_quotas(self, quotas: Mapping[str, Quota], *, capacity: int | None = None) -> None:
        """See StoreTier. capacity None: by `server_bytes`, or the server's maxmemory, less room for itself.

        A server without maxmemory can promise nothing: then every reservation is not coverable, and limits hold.
        """
        self._policy.set(quotas, capacity)
        self._chores.compare()

    def usage(self) -> TierUsage:
        """Under quotas `bytes` and `limit` are the ledger's: what is kept of this layout, and may be. Else they are the
        whole server's, by which it evicts."""
        ledger = self._policy.ledger
        self._usage.refresh(None if ledger is None else self._policy.calls)
        with self._lock:
            puts, loads = dict(self._puts), dict(self._loads)
        found, memory, coverable = self._usage.ledger, self._usage.memory, self._policy.coverable()
        if ledger is None:
            used, limit = (0, None) if memory is None else (memory.used, memory.limit)
            return TierUsage(bytes=used, limit=limit, coverable=coverable, puts=puts, loads=loads)
        with ledger.lock:
            refusals, evictions = dict(ledger.refusals), dict(ledger.evictions)
        return TierUsage(
            bytes=0 if found is None else found.total,  # None: no answer yet
            limit=None if found is None else bounded(found.room),
            coverable=coverable,
            blocks=None if found is None else found.blocks,
            by_namespace={} if found is None else dict(found.by_namespace),
            puts=puts,
            loads=loads,
            refusals=refusals,
            evictions=evictions,
        )

    def settle(self, timeout: float) -> bool:
        """Waits until the server knows which blocks were loaded, and asks it for its numbers; for tests and tools."""
        settled = self._chores.settle(timeout)
        self._usage.refresh(None if self._policy.ledger is None else self._policy.calls, wait=True)
        return settled

    def reconcile(self, timeout: float) -> bool:
        """Compares all that the ledger says with all that is there, and corrects it; False: not completed in time.

        The chores do the same all the time, a little at once.
        """
        return self._chores.reconcile(timeout)

    def close(self) -> None:
        """See StoreTier."""
        self._plane.close()
        self._chores.close()

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

    def _loaded(self, fetch: Fetch, landing: _Landing) -> Outcome:
        result = fetch.result
        if isinstance(result, Failure):
            return Outcome(result.value)
        if isinstance(result, ErrorReply):
            return Outcome.CORRUPT if result.code == "WRONGTYPE" else self._blocks.refusal(result)
        if result.length < 0:
            return Outcome.MISSING
        return landing.outcome if result.taken else Outcome.CORRUPT

    def _found(self, probe: PrefixProbe, wanted: int) -> Tally:
        if isinstance(probe.trouble, ErrorReply):
            return Tally(probe.known, self._blocks.refusal(probe.trouble))
        if isinstance(probe.trouble, Failure):
            return Tally(probe.known, Outcome(probe.trouble.value))
        return Tally(probe.known, Outcome.OK if probe.known == wanted else Outcome.MISSING)

    def _note(self, ids: Sequence[BlockId], outcomes: Sequence[Outcome]) -> None:
        """What the chores say about it later: what was used, what is gone, what is damaged."""
        if not self._policy.keeping.notes_uses:
            return
        fared = list(zip(ids, outcomes, strict=True))
        if found := [block for block, outcome in fared if outcome in (Outcome.OK, Outcome.MISSING)]:
            self._chores.loaded(found)
        if damaged := [block for block, outcome in fared if outcome is Outcome.CORRUPT]:
            self._chores.damaged(damaged)

    def _tally(self, counter: Counter[Outcome], outcomes: Iterable[Outcome]) -> tuple[Outcome, ...]:
        found = tuple(outcomes)
        with self._lock:
            counter.update(found)
        return found


class _Landing:
    """Where one block comes in from the server, and whether it is the right one."""

    __slots__ = ("_adapter", "_body", "_codec", "_header", "_into", "identity", "outcome")

    def __init__(self, codec: BlockCodec, identity: BlockId, into: memoryview, adapter: bytes | None) -> None:
        self.identity = identity
        self.outcome = Outcome.MISSING
        self._codec, self._into, self._adapter = codec, into, adapter
        self._header = bytearray(HEADER_BYTES)
        self._body = into

    def place(self, length: int) -> Sequence[memoryview] | None:
        """A raw block goes right into its destination, one in another codec to memory of its own."""
        payload = length - HEADER_BYTES
        block = len(self._into)
        if payload == block:
            self._body = self._into
        elif 0 <= payload <= largest_payload(block):
            self._body = memoryview(bytearray(payload))
        else:
            return None
        return [memoryview(self._header), self._body]

    def check(self) -> bool:
        """Verifies what came; False if it is not even the header of this block."""
        length = HEADER_BYTES + len(self._body)
        header = self._codec.read_header(self._header, length, self.identity, adapter=self._adapter)
        if isinstance(header, Outcome):
            self.outcome = header
            return header is not Outcome.CORRUPT
        in_the_way = self._body is self._into and not header.in_place  # as long as a block, and yet no raw one
        payload = bytes(self._body) if in_the_way else self._body
        self.outcome = self._codec.finish(header, payload, self._into)
        return True
