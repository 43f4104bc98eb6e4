"""What a tier does beside its operations, on a thread of its own: nobody waits for it, and some of it may be lost.

- tells the server which blocks were loaded: last use and time to live; and removes what was found damaged
- installs quotas that could not be installed at once, when the server is back
- under quotas compares ledger and values, a few at a time: what the server evicted, what expired, what others stored

An upper bound on what waits here keeps a slow server from filling memory: then the oldest uses are forgotten.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from lamina_kvtier.identity import BlockId
from lamina_kvtier.redis_blocks import RedisBlocks
from lamina_kvtier.redis_plane import Request
from lamina_kvtier.redis_plane.ledger import Sweep
from lamina_kvtier.redis_plane.script import ScriptCall

__all__ = ["Housekeeper", "RedisChores"]


_TOGETHER = 512  # blocks in one call
_MOST_WAITING = 64 * 1024  # blocks
_LIMIT_S = 2.0  # of one call
_PAUSE_S = 0.05  # between two parts of a comparison
_REST_S = 60.0  # between two whole comparisons
_RETRY_S = 1.0


class Housekeeper(Protocol):
    """Which requests the chores are, at present."""

    def touch(self, ids: Sequence[BlockId]) -> Request:
        """These were loaded, head first."""
        ...

    def remove(self, ids: Sequence[BlockId]) -> Request | None:
        """These are damaged."""
        ...

    def catch_up(self) -> None:
        """Says what could not be said before. May wait for the server."""
        ...

    def sweep(self, at: Sweep) -> ScriptCall[Sweep] | None:
        """The next part of a comparison; None: there is nothing to compare."""
        ...

    def swept(self, part: ScriptCall[Sweep]) -> None:
        """How that went."""
        ...


class RedisChores:
    """Starts its thread when there is something to do."""

    def __init__(self, blocks: RedisBlocks, keeper: Housekeeper, *, name: str) -> None:
        self._blocks, self._keeper, self._name = blocks, keeper, name
        self._changed = threading.Condition()  # guards what follows
        self._used: deque[Sequence[BlockId]] = deque()
        self._damaged: deque[Sequence[BlockId]] = deque()
        self._waiting = 0  # blocks in `_used`
        self._busy = False
        self._closed = False
        self._thread: threading.Thread | None = None
        self._at = Sweep()
        self._next_sweep = 0.0

    def loaded(self, ids: Sequence[BlockId]) -> None:
        """Head first."""
        with self._changed:
            self._used.append(ids)
            self._waiting += len(ids)
            while self._waiting > _MOST_WAITING:
                self._waiting -= len(self._used.popleft())
        self._wake()

    def damaged(self, ids: Sequence[BlockId]) -> None:
        with self._changed:
            if len(self._damaged) < _MOST_WAITING // _TOGETHER:
                self._damaged.append(ids)
        self._wake()

    def compare(self) -> None:
        """Ledger and values, from the beginning, beginning now."""
        with self._changed:
            self._at, self._next_sweep = Sweep(), 0.0
        self._wake()

    def _wake(self) -> None:
        with self._changed:
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def settle(self, timeout: float) -> bool:
        """Waits until all that was put off has been said, or given up; False: it was not in time."""
        with self._changed:
            return self._changed.wait_for(
                lambda: self._closed or not (self._used or self._damaged or self._busy), timeout
            )

    def reconcile(self, timeout: float) -> bool:
        """One whole comparison of ledger and values, on the caller's thread; False: it was not completed."""
        end, at = time.monotonic() + timeout, Sweep()
        while not at.is_done:
            part = self._sweep(at) if time.monotonic() < end else None
            if part is None:
                return False
            at = part
        return True

    def close(self) -> None:
        """Close the plane first: then nothing is waited for."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                if not (self._used or self._damaged):
                    self._changed.wait(max(0.0, self._next_sweep - time.monotonic()))
                if self._closed:
                    return
                self._busy = True
                used, damaged = self._take_used(), self._damaged.popleft() if self._damaged else None
            self._keeper.catch_up()
            if used:
                self._ask(self._keeper.touch(used))
            if damaged and (request := self._keeper.remove(damaged)) is not None:
                self._ask(request)
            if time.monotonic() >= self._next_sweep:
                self._go_on_sweeping()

    def _take_used(self) -> Sequence[BlockId]:
        """Several loads for one call; those that came last are the newest, so they come first."""
        taken: list[Sequence[BlockId]] = []
        count = 0
        while self._used and (not taken or count + len(self._used[0]) <= _TOGETHER):
            taken.append(self._used.popleft())
            count += len(taken[-1])
        self._waiting -= count
        return [block for ids in reversed(taken) for block in ids]

    def _go_on_sweeping(self) -> None:
        part = self._sweep(self._at)
        pause = _RETRY_S if part is None else _REST_S if part.is_done else _PAUSE_S
        with self._changed:
            self._at = Sweep() if part is None or part.is_done else part
            self._next_sweep = time.monotonic() + pause

    def _sweep(self, at: Sweep) -> Sweep | None:
        """The next part; None: it failed."""
        request = self._keeper.sweep(at)
        if request is None:
            return Sweep(b"done", b"done")
        self._ask(request)
        self._keeper.swept(request)
        return request.result if isinstance(request.result, Sweep) else None

    def _ask(self, request: Request) -> None:
        self._blocks.ask([request], _LIMIT_S, lambda: None).result()
