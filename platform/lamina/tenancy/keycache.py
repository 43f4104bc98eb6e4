"""Verified keys, remembered for a few seconds so that a request costs no round trip to the database."""

from __future__ import annotations

import hmac
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

from lamina.tenancy.principal import Principal

__all__ = ["CachedKey", "KeyCache"]


@dataclass(frozen=True, slots=True)
class CachedKey:
    mac: bytes
    expires_at: datetime | None
    principal: Principal


class KeyCache:
    """Least recently used first out, at most `capacity` keys for `ttl_s` seconds each.

    Invariant: a key that `forget` named is not served again from knowledge older than that call, even if a
    look-up was under way: `epoch` is read before the look-up and must still hold when its result is stored.
    Only keys that exist get in, so strangers cannot fill it. Holds HMACs, never raw keys.
    """

    def __init__(
        self, *, ttl_s: float = 5.0, capacity: int = 10_000, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self.ttl_s = ttl_s
        self.epoch = 0
        self._capacity = capacity
        self._monotonic = monotonic
        self._entries: OrderedDict[str, tuple[float, CachedKey]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key_id: str, mac: bytes) -> CachedKey | None:
        """The entry, if it is young enough and its HMAC matches."""
        found = self._entries.get(key_id)
        if found is None:
            return None
        until, entry = found
        if self._monotonic() >= until:
            del self._entries[key_id]
            return None
        if not hmac.compare_digest(entry.mac, mac):
            return None
        self._entries.move_to_end(key_id)
        return entry

    def put(self, key_id: str, entry: CachedKey, *, epoch: int) -> None:
        """Remembers `entry`, unless something was forgotten since `epoch` was read."""
        if epoch != self.epoch:
            return
        self._entries[key_id] = (self._monotonic() + self.ttl_s, entry)
        self._entries.move_to_end(key_id)
        while len(self._entries) > self._capacity:
            self._entries.popitem(last=False)

    def forget(self, key_id: str) -> None:
        self.epoch += 1
        self._entries.pop(key_id, None)

    def clear(self) -> None:
        self.epoch += 1
        self._entries.clear()
