"""The quotas of a Redis tier: how much room there is, whether they can be kept, and that the server knows them.

Until the first are set the server rules alone. If it is away when they are set they are taken over all the same: it is
told when it is back, and until it knows a ledger nothing is stored.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence

from lamina_kvtier.block_codec import HEADER_BYTES
from lamina_kvtier.errors import QuotaNotCoverable
from lamina_kvtier.identity import BlockId
from lamina_kvtier.quota import Quota
from lamina_kvtier.redis_blocks import RedisBlocks
from lamina_kvtier.redis_keeping import Keeping, LedgerKeeping, PlainKeeping
from lamina_kvtier.redis_plane import Batch, ErrorReply, Request
from lamina_kvtier.redis_plane.ledger import NO_LEDGER, LedgerCalls, Sweep
from lamina_kvtier.redis_plane.script import ScriptCall
from lamina_kvtier.redis_usage import ServerUsage, room_for_values

__all__ = ["RedisPolicy", "bounded"]

_log = logging.getLogger(__name__)

_UNBOUNDED = 2**53  # bytes in a server without maxmemory: where whole numbers of Lua end
_SWEEP = 256  # values, and entries, of one part of a comparison
_INSTALL_S = 2.0


class RedisPolicy:
    """Which Keeping rules, and a Housekeeper for it. Any thread."""

    def __init__(self, blocks: RedisBlocks, usage: ServerUsage) -> None:
        self.keeping: Keeping = PlainKeeping(blocks)
        self.ledger: LedgerKeeping | None = None  # under quotas, the same
        self.calls = LedgerCalls(blocks.scope, ttl_ms=blocks.config.ttl_ms, lease_ms=blocks.config.lease_ms)
        self._blocks, self._usage = blocks, usage
        self._lock = threading.Lock()  # guards what follows
        self._capacity: int | None = None
        self._due: Mapping[str, Quota] | None = None  # quotas that the server was not told yet

    def set(self, quotas: Mapping[str, Quota], capacity: int | None) -> None:
        """See StoreTier. Waits for the server, if at all, as long as a look-up. Raises QuotaNotCoverable."""
        room = self._room(capacity)
        if room is not None:
            _require_coverable(quotas, room)
        with self._lock:
            self._capacity, self._due = capacity, dict(quotas)
            if self.ledger is None:
                self.ledger = self.keeping = LedgerKeeping(self._blocks, self.calls)
            self.ledger.policy = None if room is None else (room, self._due)
        if room is not None:
            self._install(room, self._due)  # ahead of all puts that follow: they wait in the same line

    def coverable(self) -> int | None:
        """Up to how much `set` takes over in reservations; None: the server has not said yet. Never waits."""
        with self._lock:
            capacity = self._capacity
        room = self._room_as_known(capacity)
        return None if room is None else bounded(room) or 0

    # Chores. See Housekeeper.

    def touch(self, ids: Sequence[BlockId]) -> Request:
        return self.keeping.touch(ids)

    def remove(self, ids: Sequence[BlockId]) -> Request | None:
        return None if self.ledger is None else self.calls.delete(ids)

    def catch_up(self) -> None:
        with self._lock:
            due, capacity, ledger = self._due, self._capacity, self.ledger
        if due is None or ledger is None:
            return
        room = self._room(capacity)
        if room is None:
            return
        try:
            _require_coverable(due, room)
        except QuotaNotCoverable as error:
            if self._blocks.last_refusal != str(error):
                _log.error("The store keeps nothing new: its quotas cannot be kept. %s", error)
                self._blocks.last_refusal = str(error)
            return
        with self._lock:
            if self._due is not due:
                return
            ledger.policy = room, due
        self._install(room, due).result()

    def sweep(self, at: Sweep) -> ScriptCall[Sweep] | None:
        return None if self.ledger is None else self.calls.sweep(at, _SWEEP)

    def swept(self, part: ScriptCall[Sweep]) -> None:
        if self.ledger is None:
            return
        if isinstance(part.result, Sweep):
            self.ledger.count_victims(part.result.victims)
        elif isinstance(part.result, ErrorReply) and part.result.code == NO_LEDGER:
            with self._lock:
                policy = self.ledger.policy
                self._due = self._due if policy is None else policy[1]

    # Inside

    def _install(self, room: int, quotas: Mapping[str, Quota]) -> Batch[None]:
        request = self.calls.install(room, quotas)

        def installed() -> None:
            with self._lock:
                if request.result == "OK" and self._due is quotas:
                    self._due = None

        return self._blocks.ask([request], _INSTALL_S, installed)

    def _room(self, capacity: int | None) -> int | None:
        """Bytes of values that may be kept; None: the server has to say, and does not answer."""
        known = self._room_as_known(capacity)
        if known is not None:
            return known
        self._usage.refresh(None, wait=True)
        return self._room_as_known(capacity)

    def _room_as_known(self, capacity: int | None) -> int | None:
        if capacity is not None:
            return capacity
        server_bytes = self._blocks.config.server_bytes
        if server_bytes is None:
            memory = self._usage.memory
            if memory is None:
                return None
            server_bytes = memory.limit
        if server_bytes is None:
            return _UNBOUNDED
        plane, codec = self._blocks.config.plane, self._blocks.codec
        in_flight = (plane.lanes + 1) * plane.window_bytes
        exact = codec.codec == "raw"
        value_bytes = HEADER_BYTES + (codec.block_bytes if exact else codec.block_bytes // 4)
        return room_for_values(server_bytes, value_bytes, in_flight, equal_lengths=exact)


def bounded(room: int) -> int | None:
    """A ledger's room; None: it is that of a server that may grow for ever, and fail, so it promises nothing."""
    return None if room >= _UNBOUNDED else room


def _require_coverable(quotas: Mapping[str, Quota], room: int) -> None:
    limit = bounded(room) or 0
    need = sum(quota.reserved for quota in quotas.values())
    if need > limit:
        raise QuotaNotCoverable(None, limit=limit, need=need, have=limit)
