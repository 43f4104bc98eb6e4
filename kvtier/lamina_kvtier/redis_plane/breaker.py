"""Whether a server is worth asking: after a few failures in a row nobody waits for it, until one try succeeds.

    closed ── `threshold` failures in a row ──▶ open ── a connection could be made ──▶ half open ── it worked ──▶ closed
                                                 ▲  ◀──────────── it failed ────────────┘
                                                 └── none could: wait longer

While it is open a lane tries to connect after each delay, by itself: no request is needed for a recovery. Connecting
proves little (a server may accept and then be slow), so the first operation afterwards goes alone, as a trial.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

__all__ = ["Backoff", "Breaker", "State"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """Doubling delays with jitter, so that many replicas do not all come back at one instant. Seconds."""

    first_s: float = 0.05
    limit_s: float = 5.0

    def delay_s(self, failures: int) -> float:
        """`failures` >= 1, in a row. Between half of the delay and all of it."""
        full = min(self.limit_s, self.first_s * 2.0 ** min(failures - 1, 32))
        return full * random.uniform(0.5, 1.0)  # noqa: S311 - not a secret


class State(Enum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Breaker:
    """Shared by all lanes to one server. Any thread may call anything."""

    def __init__(self, threshold: int, backoff: Backoff, clock: Callable[[], float] = time.monotonic) -> None:
        """threshold: failures in a row that open it."""
        self._threshold = threshold
        self._backoff = backoff
        self._clock = clock
        self._lock = threading.Lock()
        self._state = State.CLOSED
        self._failures = 0  # in a row
        self._rounds = 0  # how often it opened since it was closed last
        self._retry_at = 0.0
        self._trial_until = 0.0
        self.opened = 0  # times, for counters
        self.reason = ""  # of the last failure, for people

    @property
    def state(self) -> State:
        return self._state

    def admit(self, deadline: float) -> bool:
        """Whether an operation may be tried now. Half open: one at a time, until it ended or its deadline passed."""
        with self._lock:
            if self._state is State.CLOSED:
                return True
            if self._state is State.OPEN or self._clock() < self._trial_until:
                return False
            self._trial_until = deadline
            return True

    def succeeded(self) -> None:
        """An operation's reply came."""
        if self._state is State.CLOSED and not self._failures:
            return  # the common case, without the lock: nothing would change
        with self._lock:
            if self._state is not State.OPEN:
                self._state = State.CLOSED
                self._failures = self._rounds = 0

    def failed(self, reason: str) -> bool:
        """A connection failed, or could not be made. True if that opened the breaker."""
        with self._lock:
            self.reason = reason
            self._failures += 1
            if self._state is State.CLOSED and self._failures < self._threshold:
                return False
            was_open = self._state is State.OPEN
            if not was_open or self._clock() >= self._retry_at:  # a stray failure does not push the retry away
                self._rounds += 1
                self._retry_at = self._clock() + self._backoff.delay_s(self._rounds)
            self._state = State.OPEN
            self.opened += not was_open
            return not was_open

    def retry_in(self) -> float:
        """Seconds until the next connection may be tried; 0: now."""
        with self._lock:
            return max(0.0, self._retry_at - self._clock()) if self._state is State.OPEN else 0.0

    def connected(self) -> None:
        """A connection could be made: an open breaker lets a trial through."""
        with self._lock:
            if self._state is State.OPEN:
                self._state = State.HALF_OPEN
                self._trial_until = 0.0
