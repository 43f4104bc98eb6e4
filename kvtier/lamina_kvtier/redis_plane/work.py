"""Requests, the batches they belong to, and the queue where lanes find them.

    submitted ──▶ queued ──take──▶ with a lane ──reply──▶ ended
                    │  ◀──give_back──┘   └──the connection is lost──▶ ended, or tried once more
                    └──withdraw: deadline, cancel, breaker, close──▶ ended

Who may touch a request's memory is decided by this state, under the queue's lock: a queued request can be ended by
anybody at once, one that a lane has only by that lane. So a batch never ends while bytes still move.
"""

from __future__ import annotations

import math
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, Generic, TypeVar

from lamina_kvtier.redis_plane.resp import ReplyReader
from lamina_kvtier.redis_plane.stream import Frame

__all__ = ["Batch", "Failure", "Request", "Step", "WorkQueue"]

T = TypeVar("T")


class Failure(Enum):
    """Why a request ended without a reply."""

    UNAVAILABLE = "unavailable"
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"


class Step(Enum):
    """What follows a reply."""

    DONE = "done"
    AGAIN = "again"  # the request has more to ask: `frames` gives the next round
    DISTRUST = "distrust"  # done, but whatever else comes over this connection may be anything


class _State(Enum):
    QUEUED = "queued"
    TAKEN = "taken"
    ENDED = "ended"


class Request(ABC):
    """Something to ask a server. Must be harmless to ask twice: a lost connection may have carried it already."""

    __slots__ = ("_state", "attempts", "batch")

    cost = 0  # bytes that it moves, in both directions; bounds how much is under way

    def __init__(self) -> None:
        self.attempts = 0
        self._state = _State.QUEUED
        self.batch: Batch[Any]

    @abstractmethod
    def frames(self) -> Sequence[Frame]:
        """What to send. Called by the lane right before, so that encoding overlaps with the server's work."""

    @abstractmethod
    def receive(self, reader: ReplyReader) -> Step:
        """Reads the reply. Raises what the reader raises."""

    @abstractmethod
    def fail(self, failure: Failure) -> None:
        """There will be no (further) reply."""


class Batch(Generic[T]):
    """An operation: some requests with one deadline. `conclude` makes its result when all have ended, on any thread."""

    __slots__ = ("_conclude", "_ended", "_lock", "_queue", "_remaining", "_result", "deadline", "requests", "withdrawn")

    def __init__(self, requests: Sequence[Request], deadline: float, conclude: Callable[[], T]) -> None:
        """deadline: in seconds of time.monotonic()."""
        self.requests: Sequence[Request] = requests
        self.deadline = deadline
        self.withdrawn: Failure | None = None  # nothing of it is tried again
        self._conclude = conclude
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._queue: WorkQueue | None = None
        self._remaining = len(requests)
        for request in requests:
            request.batch = self
        if not requests:
            self._end()

    def enter(self, queue: WorkQueue) -> None:
        """Queues its requests; on a closed queue they are cancelled."""
        self._queue = queue
        if not queue.put(self.requests):
            self.withdraw(Failure.CANCELLED)

    def refuse(self, failure: Failure) -> None:
        """Ends it without having tried."""
        for request in self.requests:
            request.fail(failure)
        self.ended(len(self.requests))

    def done(self) -> bool:
        if not self._ended.is_set() and time.monotonic() >= self.deadline:
            self.withdraw(Failure.TIMEOUT)
        return self._ended.is_set()

    def result(self, timeout: float | None = None) -> T:
        end = math.inf if timeout is None else time.monotonic() + timeout
        while not self.done():
            now = time.monotonic()
            if now >= end:
                raise TimeoutError(f"The operation is still under way after {timeout} s.")
            # At its deadline what is still queued is taken back; what is under way ends with its lane, by itself.
            until = min(end, self.deadline if now < self.deadline else math.inf)
            self._ended.wait(None if until == math.inf else max(0.0, until - now))
        return self._result

    def cancel(self) -> None:
        self.withdraw(Failure.CANCELLED)

    def withdraw(self, failure: Failure) -> None:
        """Ends all that no lane has; the rest follows when its reply came or failed."""
        if self._queue is not None:
            self._queue.withdraw(self, failure)

    def ended(self, count: int = 1) -> None:
        """So many more of its requests have ended."""
        with self._lock:
            self._remaining -= count
            last = self._remaining == 0 and count > 0
        if last:
            self._end()

    def _end(self) -> None:
        self._result = self._conclude()
        self.requests, self._conclude = (), _concluded  # lets go of the memory that they name
        self._ended.set()


def _concluded() -> Any:
    raise AssertionError("a batch ends once")


class WorkQueue:
    """First come, first served by whichever lane has room."""

    def __init__(self, lanes: int) -> None:
        """lanes: how many share the work, so that none takes a batch for itself."""
        self._lanes = lanes
        self._requests: deque[Request] = deque()  # withdrawn ones stay until they come to the front
        self._changed = threading.Condition()
        self._closed = False

    def put(self, requests: Sequence[Request]) -> bool:
        """False if it is closed."""
        with self._changed:
            self._requests.extend(requests)
            self._changed.notify(min(len(requests), self._lanes))
            return not self._closed

    def wait(self) -> bool:
        """Sleeps until there is work; False: it was closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._drop_ended())
            return not self._closed

    def has_some(self) -> bool:
        """Without the lock: withdrawn requests count, and in the next moment it may be otherwise."""
        return bool(self._requests)

    def take(self, room: int, most: int, *, at_least_one: bool) -> list[Request]:
        """A fair share of what is queued, at most `most` requests that cost `room` bytes together. Never waits.

        What is late already ends here: a lane that sent it would have to give up its connection at once.
        """
        taken: list[Request] = []
        late: list[Request] = []
        now = time.monotonic()
        with self._changed:
            self._drop_ended()
            share = min(most, -(-len(self._requests) // self._lanes))
            while self._requests and len(taken) < share:
                request = self._requests[0]
                if request.batch.deadline <= now and self._claim(request):
                    late.append(request)
                elif request._state is _State.QUEUED:
                    if request.cost > room and not (at_least_one and not taken):
                        break
                    request._state = _State.TAKEN
                    room -= request.cost
                    taken.append(request)
                self._requests.popleft()
        self._fail(late, Failure.TIMEOUT)
        return taken

    def give_back(self, requests: Sequence[Request]) -> None:
        """They are the next ones again, unless their batch was withdrawn meanwhile."""
        hopeless: list[Request] = []
        with self._changed:
            for request in reversed(requests):
                if request.batch.withdrawn is None and not self._closed:
                    request._state = _State.QUEUED
                    self._requests.appendleft(request)
                else:
                    hopeless.append(request)
            self._changed.notify(len(requests))
        for request in hopeless:
            self.end(request, request.batch.withdrawn or Failure.CANCELLED)

    def answered(self, requests: Sequence[Request]) -> None:
        """A lane has received all replies to these requests that it took, all of one batch."""
        for request in requests:
            request._state = _State.ENDED
        if requests:
            requests[0].batch.ended(len(requests))

    def end(self, request: Request, failure: Failure) -> None:
        """A lane gives up a request that it took."""
        request._state = _State.ENDED
        request.fail(failure)
        request.batch.ended()

    def withdraw(self, batch: Batch[T], failure: Failure) -> None:
        with self._changed:
            batch.withdrawn = batch.withdrawn or failure
            mine = [request for request in batch.requests if self._claim(request)]
        self._fail(mine, failure)

    def flush(self, failure: Failure) -> None:
        """Ends everything that is queued."""
        with self._changed:
            mine = [request for request in self._requests if self._claim(request)]
            self._requests.clear()
        self._fail(mine, failure)

    def close(self) -> None:
        """Wakes everybody; what is queued is cancelled."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self.flush(Failure.CANCELLED)

    def _claim(self, request: Request) -> bool:
        """Under the lock: from queued to ended."""
        if request._state is not _State.QUEUED:
            return False
        request._state = _State.ENDED
        return True

    def _fail(self, requests: Sequence[Request], failure: Failure) -> None:
        for request in requests:
            request.fail(failure)
            request.batch.ended()

    def _drop_ended(self) -> bool:
        """Forgets withdrawn requests in front; whether any other is there."""
        while self._requests and self._requests[0]._state is _State.ENDED:
            self._requests.popleft()
        return bool(self._requests)
