"""One connection on its own thread: sends requests ahead, reads their replies in order, and mends itself.

It takes work only when it is connected, so that nobody waits for a lane that waits for a server; and it never has more
bytes under way than its window, so that a slow reply delays little and a lost connection loses little.
"""

from __future__ import annotations

import logging
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from lamina_kvtier.redis_plane.address import RedisAddress
from lamina_kvtier.redis_plane.breaker import Backoff, Breaker, State
from lamina_kvtier.redis_plane.connection import Connection
from lamina_kvtier.redis_plane.resp import Bounds, ProtocolError
from lamina_kvtier.redis_plane.stream import Frame
from lamina_kvtier.redis_plane.work import Failure, Request, Step, WorkQueue

__all__ = ["Lane", "LaneCounters", "Server"]

_log = logging.getLogger(__name__)

# Bytes that share a system call. Each copy of a block pushes this code out of the CPU's caches, so some are encoded in
# a row; but not all of a window, as the server takes the first ones meanwhile. (64 KiB took 5 % more CPU.)
_TOGETHER = 1 << 20
_EARLY_S = 0.005  # a kernel timer may end this much before the deadline
_MOST_ATTEMPTS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """What all lanes to one server share. Seconds."""

    address: RedisAddress
    tls: ssl.SSLContext | None
    bounds: Bounds
    breaker: Breaker
    backoff: Backoff
    connect_s: float
    failed: Callable[[str], None]  # tells the breaker, and everybody whom it then concerns


@dataclass(slots=True)
class LaneCounters:
    """Since the start. Written by the lane's thread alone."""

    connected: int = 0
    lost: int = 0  # connections that failed with requests under way, or could not be made
    retried: int = 0  # requests
    moved_bytes: int = 0  # of answered requests, both directions
    answered: int = 0  # requests


class Lane:
    """Starts its thread at once; connects when there is work."""

    def __init__(self, name: str, server: Server, queue: WorkQueue, *, window_bytes: int, window_requests: int) -> None:
        self.counters = LaneCounters()
        self._server = server
        self._queue = queue
        self._window_bytes, self._window_requests = window_bytes, window_requests
        self._pending: deque[Request] = deque()  # sent, in order; not yet answered
        self._pending_bytes = 0
        self._connection: Connection | None = None
        self._failures = 0  # connections that could not be made, in a row
        self._lock = threading.Lock()  # guards `_connection` against `stop`
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Interrupts what is under way. Close the queue first; then `join`."""
        self._stopping.set()
        with self._lock:
            if self._connection is not None:
                self._connection.interrupt()

    def join(self, timeout: float) -> bool:
        """Whether the thread has ended. One that has not is only waiting to connect and holds no request."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._turn()
            except Exception:  # noqa: BLE001 - a bug in one request must not silence the lane for ever
                _log.exception("a request to %s broke its lane; reconnecting", self._server.address)
                self._lose("a bug on our side", retry=False)
        self._lose("closed", retry=False)

    def _turn(self) -> None:
        if self._connection is None and self._server.breaker.state is State.OPEN:
            if not self._stopping.wait(self._server.breaker.retry_in()):
                self._connect()
            return
        if not self._pending:
            if not self._queue.wait():
                return
            if self._connection is not None and self._connection.is_stale():
                self._disconnect()  # it was idle and the server hung up: no failure
        if self._connection is not None or self._connect():
            self._exchange(self._connection)

    def _connect(self) -> bool:
        """Pauses when it fails, ever longer."""
        server = self._server
        try:
            connection = Connection.open(server.address, server.tls, server.bounds, time.monotonic() + server.connect_s)
        except (OSError, ProtocolError) as error:
            self._failures += 1
            self.counters.lost += 1
            server.failed(f"cannot connect: {error}")
            if server.breaker.state is not State.OPEN:
                self._stopping.wait(server.backoff.delay_s(self._failures))
            return False
        with self._lock:
            self._connection = connection
        if self._stopping.is_set():  # `stop` may not have seen it
            connection.interrupt()
        self._failures = 0
        self.counters.connected += 1
        server.breaker.connected()
        return True

    def _exchange(self, connection: Connection | None) -> None:
        """Fills the window, then receives until more can be sent: one visit to the queue serves many requests."""
        assert connection is not None
        try:
            self._send(connection)
            while self._pending:
                if not self._receive(connection):
                    self._disconnect()
                    self._release(list(self._pending))
                elif self._may_send():
                    break
        except (OSError, ProtocolError) as error:
            self._lose(str(error) or type(error).__name__, retry=True)

    def _send(self, connection: Connection) -> None:
        taken = self._queue.take(
            self._window_bytes - self._pending_bytes,
            self._window_requests - len(self._pending),
            at_least_one=not self._pending,
        )
        if not taken:
            return
        self._pending.extend(taken)
        self._pending_bytes += sum(request.cost for request in taken)
        self._keep_time(connection)
        frames: list[Frame] = []
        size = 0
        for request in taken:
            new = request.frames()
            frames += new
            size += sum(map(len, new))
            if size >= _TOGETHER:
                connection.send(frames, size)
                frames, size = [], 0
        if frames:
            connection.send(frames, size)

    def _receive(self, connection: Connection) -> bool:
        """Reads the oldest batch's replies until more can be sent: one account for many requests.

        False if no reply after these can be trusted.
        """
        pending, reader = self._pending, connection.reader
        batch, step = pending[0].batch, Step.DONE
        answered: list[Request] = []
        try:
            while pending and (request := pending[0]).batch is batch:
                step = request.receive(reader)
                self._pending_bytes -= request.cost
                answered.append(pending.popleft())
                if step is not Step.DONE or self._may_send():
                    break
        finally:
            if answered:
                self._account(answered, again=step is Step.AGAIN)
        if pending:
            self._keep_time(connection)
        return step is not Step.DISTRUST

    def _account(self, answered: list[Request], *, again: bool) -> None:
        """Of requests of one batch whose replies came; `again`: the last of them has more to ask."""
        self._server.breaker.succeeded()
        self.counters.answered += len(answered)
        self.counters.moved_bytes += sum(request.cost for request in answered)
        if again:
            self._queue.give_back([answered.pop()])
        self._queue.answered(answered)

    def _may_send(self) -> bool:
        """There is something, and half of the window is free."""
        return (
            self._pending_bytes <= self._window_bytes // 2
            and len(self._pending) <= self._window_requests // 2
            and self._queue.has_some()
        )

    def _keep_time(self, connection: Connection) -> None:
        """The first deadline of all that is under way counts: none may end late because another has more time."""
        connection.until(min(batch.deadline for batch in {request.batch for request in self._pending}))

    def _lose(self, reason: str, *, retry: bool) -> None:
        """The connection is no more. What was under way is tried once more, where there is time for it."""
        pending = list(self._pending)
        late = time.monotonic() + _EARLY_S
        again: list[Request] = []
        if pending and not self._stopping.is_set():
            self.counters.lost += 1
        self._disconnect()
        self._pending.clear()
        self._pending_bytes = 0
        for request in pending:
            request.attempts += 1
            if self._stopping.is_set():
                self._queue.end(request, Failure.CANCELLED)
            elif request.batch.deadline <= late:
                self._queue.end(request, Failure.TIMEOUT)
            elif not retry or request.attempts >= _MOST_ATTEMPTS:
                self._queue.end(request, Failure.UNAVAILABLE)
            else:
                again.append(request)
        self._release(again)
        self.counters.retried += len(again)
        if not self._stopping.is_set():
            self._server.failed(reason)  # last: if it opens the breaker, what was just given back is flushed

    def _release(self, requests: list[Request]) -> None:
        self._pending.clear()
        self._pending_bytes = 0
        self._queue.give_back(requests)

    def _disconnect(self) -> None:
        with self._lock:
            connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
