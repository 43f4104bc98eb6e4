"""What every way of keeping blocks in a Redis server needs: keys, requests, and what a refusal means.

    lamina:{a1b2c3d4e5f60718}:kv1:<identity, 64 hex digits>        header (192 bytes) | payload
    lamina:{a1b2c3d4e5f60718}:ledger1:...                          who pays for it, under quotas

The part in braces is a hash of the block layout and of the deployment's name. It is the tag by which a Redis cluster
places keys, so all blocks of one tier live in one slot: EXISTS and UNLINK may name many of them in one command, one
server answers for a whole prefix, and a script may judge all of them. The price is that one tier never spreads over
the servers of a cluster. It keeps nobody apart: identities do that, they cover the base model, adapter, tenant and
tokens.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from lamina_kvtier.block_codec import HEADER_BYTES, BlockCodec
from lamina_kvtier.identity import BlockId
from lamina_kvtier.redis_plane import Batch, ErrorReply, Failure, PlaneConfig, RedisPlane, Request
from lamina_kvtier.redis_plane.ledger import VALUES
from lamina_kvtier.redis_plane.requests import Store
from lamina_kvtier.tier import BlockKey, Outcome

__all__ = ["COMMIT_GRACE_S", "GROUP", "RedisBlocks", "RedisTierConfig", "largest_payload"]

T = TypeVar("T")

GROUP = 64  # keys in one command

COMMIT_GRACE_S = 1.0
"""What a put under quotas may take past its deadline, to commit what it has written and to give back the room for the
rest: one script call of milliseconds, on the connection for small questions. Without it values that came in time would
be thrown away and written again, and the room would be nobody's until the lease ends. A server that does not answer it
within that is sick."""

_FULL = "OOM"


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisTierConfig:
    """Raises ValueError. Seconds; each is the longest that an operation of its kind takes, whatever happens.

    Only a put under quotas may take `COMMIT_GRACE_S` more: no value is sent then any more.
    """

    deployment: str = ""  # replicas with equal names share blocks
    ttl_s: float | None = None  # a block expires so long after it was used last; None: only eviction removes it
    server_bytes: int | None = None  # of the server's memory, ours under quotas; None: its maxmemory
    lookup_s: float = 0.25
    load_s: float = 2.0
    put_s: float = 5.0
    delete_s: float = 2.0
    plane: PlaneConfig = field(default_factory=PlaneConfig)

    def __post_init__(self) -> None:
        for name in ("lookup_s", "load_s", "put_s", "delete_s", "ttl_s", "server_bytes"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name} must be more than 0, not {value}")

    @property
    def ttl_ms(self) -> int | None:
        return None if self.ttl_s is None else max(1, round(self.ttl_s * 1000))

    @property
    def lease_ms(self) -> int:
        """How long a put that was not brought to an end takes room: longer than any can be under way."""
        return round((2 * self.put_s + COMMIT_GRACE_S) * 1000)


class RedisBlocks:
    """Keys and requests of one tier. Any thread."""

    def __init__(self, plane: RedisPlane, codec: BlockCodec, config: RedisTierConfig) -> None:
        self.plane, self.codec, self.config = plane, codec, config
        scope = hashlib.blake2b(codec.layout + config.deployment.encode(), digest_size=8).hexdigest().encode()
        self.scope = b"lamina:{%b}:" % scope
        self.values = self.scope + VALUES
        self.last_refusal = ""

    @property
    def value_bytes(self) -> int:
        """The most that one block takes, header included."""
        exact = self.codec.codec == "raw"
        return HEADER_BYTES + (self.codec.block_bytes if exact else largest_payload(self.codec.block_bytes))

    def key(self, block: BlockId) -> bytes:
        return self.values + block.hex().encode()

    def store(self, key: BlockKey, view: memoryview, ttl_ms: int | None) -> Store:
        def value() -> tuple[Any, ...]:
            return self.codec.encode(key, view)

        return Store(self.key(key.id), value, HEADER_BYTES + len(view), ttl_ms)

    def stored(self, store: Store) -> Outcome:
        if isinstance(store.result, ErrorReply):
            return self.refusal(store.result)
        return Outcome(store.result.value) if isinstance(store.result, Failure) else Outcome.OK

    def refusal(self, error: ErrorReply) -> Outcome:
        """What an error means for a block; people find it in `last_refusal`."""
        self.last_refusal = error.text[:200]
        return Outcome.REFUSED if error.code == _FULL else Outcome.UNAVAILABLE

    def fate(self, result: ErrorReply | Failure) -> Outcome:
        """Of all blocks of a request that brought no answer."""
        return self.refusal(result) if isinstance(result, ErrorReply) else Outcome(result.value)

    def move(self, requests: Sequence[Request], limit_s: float, conclude: Callable[[], T]) -> Batch[T]:
        """Starts requests that carry values."""
        batch = Batch(requests, time.monotonic() + limit_s, conclude)
        self.plane.move(batch)
        return batch

    def ask(self, requests: Sequence[Request], limit_s: float, conclude: Callable[[], T]) -> Batch[T]:
        """Starts small requests."""
        batch = Batch(requests, time.monotonic() + limit_s, conclude)
        self.plane.ask(batch)
        return batch


def largest_payload(block_bytes: int) -> int:
    """The worst that a compressor does to noise."""
    return block_bytes + block_bytes // 128 + 1024
