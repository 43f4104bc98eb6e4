"""Operations on blocks that are copied through memory of somebody else's, a window at a time, on one thread.

    submitted ──▶ queued ──▶ window by window: `carry` settles each of its blocks ──▶ ended
                                └── deadline, cancel, close: ended at once; `carry` finds its memory gone

A move's memory is only touched inside `hold`, which takes milliseconds and is refused once the move has ended. So its
deadline holds whatever the other library does: an operation that hangs there hangs the mover, never a caller.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from lamina_kvtier.identity import BlockId
from lamina_kvtier.tier import Outcome

__all__ = ["Move", "Mover"]

_log = logging.getLogger(__name__)


class Move:
    """An Operation: one outcome per block."""

    __slots__ = ("_conclude", "_ended", "_lock", "_open", "_outcomes", "_views", "deadline", "ids")

    def __init__(
        self,
        ids: Sequence[BlockId],
        views: Sequence[memoryview],
        deadline: float,
        conclude: Callable[[Sequence[Outcome]], None],
    ) -> None:
        """deadline: in seconds of time.monotonic(). `conclude` is told the outcomes, once, on any thread."""
        self.ids = tuple(ids)
        self.deadline = deadline
        self._views: Sequence[memoryview] = views
        self._conclude = conclude
        self._outcomes: list[Outcome | None] = [None] * len(self.ids)
        self._open = len(self.ids)
        self._lock = threading.RLock()
        self._ended = threading.Event()
        if not self.ids:
            self.end(Outcome.OK)

    def done(self) -> bool:
        if not self._ended.is_set() and time.monotonic() >= self.deadline:
            self.end(Outcome.TIMEOUT)
        return self._ended.is_set()

    def result(self, timeout: float | None = None) -> tuple[Outcome, ...]:
        end = math.inf if timeout is None else time.monotonic() + timeout
        while not self.done():
            if (now := time.monotonic()) >= end:
                raise TimeoutError(f"The operation is still under way after {timeout} s.")
            self._ended.wait(max(0.0, min(end, self.deadline) - now))
        return tuple(outcome for outcome in self._outcomes if outcome is not None)

    def cancel(self) -> None:
        self.end(Outcome.CANCELLED)

    @contextmanager
    def hold(self) -> Iterator[Sequence[memoryview] | None]:
        """The blocks' memory, which stays its owner's promise for as long; None: the move has ended."""
        with self._lock:
            yield None if self.done() else self._views

    def settle(self, at: int, outcome: Outcome) -> None:
        """How its block number `at` fared; the first answer counts."""
        with self._lock:
            if self._outcomes[at] is None:
                self._outcomes[at] = outcome
                self._open -= 1
                if not self._open:
                    self.end(outcome)

    def end(self, rest: Outcome) -> None:
        """What has no outcome yet has this one."""
        with self._lock:
            if self._ended.is_set():
                return
            self._outcomes = [rest if outcome is None else outcome for outcome in self._outcomes]
            self._conclude([outcome for outcome in self._outcomes if outcome is not None])
            self._views = ()  # lets go of the memory
            self._ended.set()


class Mover:
    """Carries moves out in the order in which they came."""

    def __init__(self, name: str, window: int, carry: Callable[[Move, range], None]) -> None:
        """window: blocks. `carry` moves those of one window, settles each, and returns soon after the deadline."""
        self._window, self._carry = window, carry
        self._moves: deque[Move] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._current: Move | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, move: Move) -> None:
        """After `close` it is CANCELLED."""
        with self._changed:
            if not self._closed:
                self._moves.append(move)
                self._changed.notify()
                return
        move.cancel()

    def close(self) -> None:
        """Ends all moves; `join` waits for the thread."""
        with self._changed:
            self._closed = True
            left = [*self._moves, *([self._current] if self._current is not None else [])]
            self._moves.clear()
            self._changed.notify()
        for move in left:
            move.cancel()

    def join(self, timeout: float) -> bool:
        """Whether the thread has ended. It holds nobody's memory in any case."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (move := self._next()) is not None:
            try:
                for start in range(0, len(move.ids), self._window):
                    if move.done():
                        break
                    self._carry(move, range(start, min(start + self._window, len(move.ids))))
            except Exception:  # noqa: BLE001 - another library's surprise must not end the thread
                _log.exception("a move of %d blocks failed", len(move.ids))
            move.end(Outcome.UNAVAILABLE)  # nothing is left open, unless `carry` failed

    def _next(self) -> Move | None:
        with self._changed:
            self._current = None
            self._changed.wait_for(lambda: self._closed or self._moves)
            if self._closed:
                return None
            self._current = self._moves.popleft()
            return self._current
