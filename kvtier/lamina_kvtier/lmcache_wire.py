"""KV blocks in a Redis or Valkey server as LMCache keeps them there, spoken over our own data plane.

    <model>@<kv rank, 8 hex>@<object group, hex>@<hash, hex>[@<salt>]        [2, layers, tokens, heads * dim], raw

That is the format of LMCache 0.4.7 to 0.5.6 (its RESP and Valkey adapters). A value has no header: its length is all
that can be checked, and nothing is added here, for a header would make it another value. LMCache's own clients never
notice that a key is missing and do not reconnect; this one answers with an Outcome, within its deadline.

LMCache itself is not needed for any of this.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lamina_kvtier.identity import BlockId
from lamina_kvtier.redis_plane import (
    Ask,
    Batch,
    ErrorReply,
    Failure,
    Fetch,
    PlaneConfig,
    RedisAddress,
    RedisPlane,
    Reply,
    Store,
)
from lamina_kvtier.redis_plane.prefix_probe import PrefixProbe
from lamina_kvtier.tier import Outcome, Tally

__all__ = ["ALONE", "LmcacheNames", "LmcacheWire"]

ALONE = 0x01000100  # LMCache's kv rank of one worker: world size, rank, local world size, local rank, a byte each

_SALT_CHARACTERS = 128
_NEVER_IN_A_SALT = frozenset("@/\\\0")
_RENEW_S = 1.0
_MEMORY_S = 1.0  # how old an answer about the server's memory may be

Block = tuple[BlockId, memoryview]
Conclude = Callable[[Sequence[Outcome]], None]


@dataclass(frozen=True, slots=True)
class LmcacheNames:
    """What stands beside the hash in a key: blocks with other names never match. Raises ValueError."""

    model: str
    salt: str = ""
    kv_rank: int = ALONE
    group: int = 0

    def __post_init__(self) -> None:
        if not self.model or "@" in self.model:
            raise ValueError(f"LMCache's model name is not empty and has no '@': {self.model!r}")
        if len(self.salt) > _SALT_CHARACTERS or _NEVER_IN_A_SALT & set(self.salt):
            raise ValueError(f"LMCache's salt has at most {_SALT_CHARACTERS} characters, and no '@', '/', '\\' or NUL")
        if not 0 <= self.kv_rank < 2**32 or self.group < 0:
            raise ValueError(f"no kv rank or object group: {self.kv_rank}, {self.group}")

    @staticmethod
    def of_layout(layout: bytes, salt: str = "") -> LmcacheNames:
        """For blocks under our own identities. layout: its digest, which covers shape and dtype of what is stored."""
        return LmcacheNames(f"lamina-kv1-{layout.hex()[:32]}", salt)

    def key(self, block: BlockId) -> bytes:
        salt = f"@{self.salt}" if self.salt else ""
        return f"{self.model}@{self.kv_rank:08x}@{self.group:x}@{block.hex()}{salt}".encode()


class LmcacheWire:
    """Holds threads and sockets until `close`; connects when there is something to do. Any thread may call it."""

    def __init__(
        self,
        address: RedisAddress,
        names: LmcacheNames,
        block_bytes: int,
        *,
        ttl_s: float | None = None,
        plane: PlaneConfig | None = None,
        name: str = "lmcache",
    ) -> None:
        """ttl_s: a block expires so long after its last use. Raises InvalidAddress for unreadable TLS files."""
        self.names, self.block_bytes = names, block_bytes
        self._ttl_ms = None if ttl_s is None else max(1, round(ttl_s * 1000))
        self._plane = RedisPlane(address, plane, name=f"lamina-{name}")
        self._refused = ""
        self._lock = threading.Lock()  # guards what follows
        self._memory: tuple[int, int | None] = (0, None)
        self._memory_at = -_MEMORY_S

    @property
    def trouble(self) -> str:
        """The last thing that went wrong, for people; "" if nothing did."""
        return self._refused or self._plane.counters().trouble

    def store(self, blocks: Sequence[Block], deadline: float, conclude: Conclude) -> Batch[None]:
        """`conclude` is told one outcome per block, on any thread. The views belong to the batch until then."""
        stores = [Store(self.names.key(id), _constant(view), len(view), self._ttl_ms) for id, view in blocks]
        batch = Batch(stores, deadline, lambda: conclude([self._outcome(store.result) for store in stores]))
        self._plane.move(batch)
        return batch

    def fetch(self, blocks: Sequence[Block], deadline: float, conclude: Conclude) -> Batch[None]:
        """The same the other way. Only OK says what a view holds."""
        size = self.block_bytes
        fetches = [Fetch(self.names.key(id), size, _only_into(view)) for id, view in blocks]

        def ended() -> None:
            outcomes = [self._fetched(fetch) for fetch in fetches]
            self._renew([id for (id, _), outcome in zip(blocks, outcomes, strict=True) if outcome is Outcome.OK])
            conclude(outcomes)

        batch = Batch(fetches, deadline, ended)
        self._plane.move(batch)
        return batch

    def lookup(self, ids: Sequence[BlockId], limit_s: float) -> Batch[Tally]:
        """How many leading blocks are there."""
        probe = PrefixProbe([self.names.key(block) for block in ids])

        def found() -> Tally:
            known = probe.known if ids else 0
            if probe.trouble is not None:
                return Tally(known, self._trouble(probe.trouble))
            return Tally(known, Outcome.OK if known == len(ids) else Outcome.MISSING)

        return self._ask([probe] if ids else [], limit_s, found)

    def delete(self, ids: Sequence[BlockId], limit_s: float) -> Batch[Tally]:
        """How many were there. One key a command: LMCache's keys lie anywhere in a cluster."""
        request = Ask([(b"UNLINK", self.names.key(block)) for block in ids], int)

        def deleted() -> Tally:
            replies = [] if not ids else request.result
            if isinstance(replies, Failure):
                return Tally(0, Outcome(replies.value))
            refusals = [self._trouble(reply) for reply in replies if isinstance(reply, ErrorReply)]
            gone = sum(reply for reply in replies if isinstance(reply, int))
            return Tally(gone, refusals[0] if refusals else Outcome.OK)

        return self._ask([request] if ids else [], limit_s, deleted)

    def memory(self, limit_s: float) -> tuple[int, int | None]:
        """Bytes that the whole server uses, and its limit if it has one.

        Asked for at most once a second and not waited for, but for the first time, up to `limit_s`.
        """
        now = time.monotonic()
        with self._lock:
            if now - self._memory_at < _MEMORY_S:
                return self._memory
            first, self._memory_at = self._memory_at < 0, now
        request = Ask([(b"INFO", b"memory")], bytes)

        def learn() -> None:
            if isinstance(request.result, list) and isinstance(request.result[0], bytes):
                with self._lock:
                    self._memory = _memory(request.result[0])

        batch = self._ask([request], limit_s, learn)
        if first:
            batch.result()
        with self._lock:
            return self._memory

    def close(self) -> None:
        """Ends every batch."""
        self._plane.close()

    def _renew(self, ids: Sequence[BlockId]) -> None:
        """They were used: their time starts anew. Nobody waits for that."""
        if self._ttl_ms is not None and ids:
            ttl = b"%d" % self._ttl_ms
            self._ask([Ask([(b"PEXPIRE", self.names.key(block), ttl) for block in ids], int)], _RENEW_S, lambda: None)

    def _ask(self, requests: Sequence[Any], limit_s: float, conclude: Callable[[], Any]) -> Batch[Any]:
        batch = Batch(requests, time.monotonic() + limit_s, conclude)
        self._plane.ask(batch)
        return batch

    def _fetched(self, fetch: Fetch) -> Outcome:
        if isinstance(fetch.result, (Failure, ErrorReply)):
            return self._trouble(fetch.result)
        if fetch.result.length < 0:
            return Outcome.MISSING
        return Outcome.OK if fetch.result.taken else Outcome.CORRUPT

    def _outcome(self, result: Reply | Failure) -> Outcome:
        return self._trouble(result) if isinstance(result, (Failure, ErrorReply)) else Outcome.OK

    def _trouble(self, result: Failure | ErrorReply) -> Outcome:
        if isinstance(result, Failure):
            return Outcome(result.value)
        self._refused = result.text[:200]
        return {"OOM": Outcome.REFUSED, "WRONGTYPE": Outcome.CORRUPT}.get(result.code, Outcome.UNAVAILABLE)


def _constant(view: memoryview) -> Callable[[], Sequence[memoryview]]:
    return lambda: (view,)


def _only_into(view: memoryview) -> Callable[[int], Sequence[memoryview] | None]:
    """A value of any other length is none of ours."""
    return lambda length: (view,) if length == len(view) else None


def _memory(info: bytes) -> tuple[int, int | None]:
    fields = dict(line.partition(b":")[::2] for line in info.splitlines())
    used, limit = (int(digits) if digits.isdigit() else 0 for digits in map(fields.get, _MEMORY_FIELDS, (b"", b"")))
    return used, limit or None


_MEMORY_FIELDS = (b"used_memory", b"maxmemory")
