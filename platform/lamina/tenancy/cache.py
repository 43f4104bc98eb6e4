"""A small cache for what the database says, so that a request costs no round trip."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

__all__ = ["TtlCache"]

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class TtlCache(Generic[K, V]):
    """At most `capacity` entries for `ttl_s` seconds each; the least recently used leaves first.

    Invariant: what `forget` or `clear` named is not served again from knowledge older than that call, even if a
    look-up was under way: `epoch` is read before the look-up and must still hold when its result is stored.
    """

    def __init__(
        self, *, ttl_s: float = 5.0, capacity: int = 10_000, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self.ttl_s = ttl_s
        self.epoch = 0
        self._capacity = capacity
        self._monotonic = monotonic
        self._entries: OrderedDict[K, tuple[float, V]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: K) -> V | None:
        """The value, if it is young enough."""
        found = self._entries.get(key)
        if found is None:
            return None
        until, value = found
        if self._monotonic() >= until:
            del self._entries[key]
            return None
        self._entries.move_to_end(key)
        return value

    def put(self, key: K, value: V, *, epoch: int) -> None:
        """Remembers `value`, unless something was forgotten since `epoch` was read."""
        if epoch != self.epoch:
            return
        self._entries[key] = (self._monotonic() + self.ttl_s, value)
        self._entries.move_to_end(key)
        while len(self._entries) > self._capacity:
            self._entries.popitem(last=False)

    def forget(self, key: K) -> None:
        self.epoch += 1
        self._entries.pop(key, None)

    def clear(self) -> None:
        self.epoch += 1
        self._entries.clear()
