"""What a server last said about its memory and, under quotas, about who has how much of it."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

from lamina_kvtier.redis_blocks import RedisBlocks
from lamina_kvtier.redis_plane import Ask, Batch, Request
from lamina_kvtier.redis_plane.ledger import LedgerCalls, LedgerUsage

__all__ = ["ServerMemory", "ServerUsage", "room_for_values"]

_FRESH_S = 1.0  # how old an answer may be
_PER_BLOCK = 1024  # bytes beside the value: its key, and its lines in the ledger
_SPARE_PART = 16  # of the server's memory, for itself and for what is on its way to clients


@dataclass(frozen=True, slots=True)
class ServerMemory:
    """Bytes. `limit`: its maxmemory; None: it has none."""

    used: int
    limit: int | None


class ServerUsage:
    """Asked for at most once a second and not waited for, but for the first time. Any thread."""

    def __init__(self, blocks: RedisBlocks) -> None:
        self.memory: ServerMemory | None = None  # None: no answer yet
        self.ledger: LedgerUsage | None = None
        self._blocks = blocks
        self._lock = threading.Lock()
        self._asked_at = -_FRESH_S
        self._first = True

    def refresh(self, calls: LedgerCalls | None, *, wait: bool = False) -> None:
        """wait: whatever is known, ask now, and wait no longer than for a look-up."""
        with self._lock:
            now = time.monotonic()
            if not wait and now - self._asked_at < _FRESH_S:
                return
            wait, self._first, self._asked_at = wait or self._first, False, now
        batch = self._ask(calls)
        if wait:
            batch.result()

    def _ask(self, calls: LedgerCalls | None) -> Batch[None]:
        info = Ask([(b"INFO", b"memory")], bytes)
        found = LedgerUsage()
        requests: list[Request] = [info]
        ledger = None if calls is None else calls.usage(found)
        if ledger is not None:
            requests.append(ledger)

        def learn() -> None:
            with self._lock:
                if isinstance(info.result, list) and isinstance(info.result[0], bytes):
                    self.memory = _parse(info.result[0])
                if ledger is not None and isinstance(ledger.result, bytes):
                    self.ledger = found

        return self._blocks.ask(requests, self._blocks.config.lookup_s, learn)


def room_for_values(server_bytes: int, value_bytes: int, in_flight: int, *, equal_lengths: bool = True) -> int:
    """Bytes of values that a server with so much memory keeps without ever evicting by itself.

    in_flight: bytes that it may hold for clients. Allocators have four sizes between two powers of two, and a value a
    little longer than one of them takes the next: 2 MiB and a header take 2.5 MiB. If lengths differ, all may do that.
    """
    spare = max(server_bytes // _SPARE_PART, min(server_bytes // 4, in_flight))
    step = 1 << max(0, (value_bytes - 1).bit_length() - 3)
    taken = -(-value_bytes // step) * step if equal_lengths else value_bytes * 5 // 4
    return (server_bytes - spare) * value_bytes // (taken + _PER_BLOCK)


def _parse(info: bytes) -> ServerMemory:
    fields: dict[bytes, bytes] = {}
    for line in info.splitlines():
        name, _, value = line.partition(b":")
        fields[name] = value
    return ServerMemory(_number(fields.get(b"used_memory", b"")), _number(fields.get(b"maxmemory", b"")) or None)


def _number(digits: bytes) -> int:
    return int(digits) if digits.isdigit() and len(digits) < 20 else 0
