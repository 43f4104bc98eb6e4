"""The engine process's end of the border: the socket its loop uses, and the heartbeat thread."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import zmq

from lamina.engine.wire import PULSE, FromCore, Garbled, Heartbeat, ToCore, decode_to_core, encode

__all__ = ["Link", "Pulse"]

_log = logging.getLogger(__name__)

_LINGER_S = 3  # for the last events on the way out


class Link:
    """The core's end of the socket. A signal wakes `wait`. Use from one thread."""

    def __init__(self, address: str, identity: bytes) -> None:
        """Connects to a client that may not have bound `address` yet."""
        self._context = zmq.Context()
        self._socket = _dealer(self._context, address, identity)
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._wake_read, zmq.POLLIN)

    def wake_on_signals(self) -> None:
        """Main thread only. Python retries an interrupted poll, so a handler alone would not end it."""
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)

    def send(self, message: FromCore) -> None:
        """Never waits: no high-water mark, what is queued is bounded by what requests may produce."""
        self._socket.send(encode(message))

    def receive(self) -> ToCore | None:
        """The next message, or None if there is none yet. Frames that are not messages are dropped."""
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return None
            try:
                return decode_to_core(frames[-1])
            except Garbled as error:
                _log.warning("dropped a garbled message: %s", error)

    def wait(self, timeout_s: float | None) -> bool:
        """Sleeps until a message or a signal comes. False: the time is over."""
        ready = self._poller.poll(None if timeout_s is None else round(timeout_s * 1000))
        with suppress(BlockingIOError):
            while os.read(self._wake_read, 64):
                pass
        return bool(ready)

    def close(self) -> None:
        """Gives what was sent up to three seconds to leave."""
        if threading.current_thread() is threading.main_thread():
            signal.set_wakeup_fd(-1)
        self._context.destroy(linger=_LINGER_S * 1000)
        os.close(self._wake_read)
        os.close(self._wake_write)


class Pulse(threading.Thread):
    """Tells the client that this process lives, and ends it when the parent is gone.

    It starts before the model is loaded. `on_orphaned` is called from this thread when the process that
    started us (`parent`, a process id) has died: the portable companion of Linux's parent-death signal.
    """

    def __init__(
        self,
        address: str,
        identity: bytes,
        *,
        interval_s: float,
        parent: int,
        on_orphaned: Callable[[], None],
    ) -> None:
        super().__init__(name="pulse", daemon=True)
        self._address, self._identity = address, identity + PULSE
        self._interval_s = interval_s
        self._parent = parent
        self._on_orphaned = on_orphaned
        self._ended = threading.Event()
        self._busy_since: float | None = None

    def turned(self, *, busy: bool) -> None:
        """The main loop turned. `busy`: it goes on to work, and not to wait for messages."""
        self._busy_since = time.monotonic() if busy else None

    def end(self) -> None:
        """Stops the thread and waits for it."""
        self._ended.set()
        self.join()

    def run(self) -> None:
        context = zmq.Context()
        socket = _dealer(context, self._address, self._identity)
        while not self._ended.wait(self._interval_s):
            if os.getppid() != self._parent:
                self._on_orphaned()
            since = self._busy_since
            stalled_s = 0.0 if since is None else time.monotonic() - since
            with suppress(zmq.Again):  # a full queue means that nobody listens; the next beat may do
                socket.send(encode(Heartbeat(stalled_s)), zmq.NOBLOCK)
        context.destroy(linger=0)


def _dealer(context: zmq.Context[zmq.Socket[bytes]], address: str, identity: bytes) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.DEALER)
    socket.set(zmq.IDENTITY, identity)
    socket.set(zmq.SNDHWM, 2 if identity.endswith(PULSE) else 0)
    socket.set(zmq.RCVHWM, 0)
    socket.set(zmq.RECONNECT_IVL, 20)  # ms; the client may bind a moment after we connect
    socket.set(zmq.RECONNECT_IVL_MAX, 500)
    socket.connect(address)
    return socket
