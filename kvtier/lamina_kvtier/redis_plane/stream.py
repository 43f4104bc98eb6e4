"""One connected socket, plain or TLS: bytes from and to memory as it lies, and an end to every wait.

A plain socket stays in blocking mode and the kernel keeps the time (SO_RCVTIMEO, SO_SNDTIMEO): a whole value is then
one system call with MSG_WAITALL, where a Python timeout would poll before every piece of it.
"""

from __future__ import annotations

import socket
import ssl
import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Protocol, TypeVar

from lamina_kvtier.redis_plane.address import RedisAddress

__all__ = ["ConnectionLost", "Frame", "Stream", "open_stream"]

Frame = bytes | memoryview
T = TypeVar("T", bound=Frame)

_MOST_FRAMES = 512  # buffers in one system call; 1024 are allowed
_SLACK_S = 0.02  # a kernel timer that ends this much past the deadline is not set anew
_SHORTEST_S = 0.001  # zero would mean "for ever"


class ConnectionLost(OSError):
    """The other side closed, or this one was told to stop."""


class Stream(Protocol):
    """What a connection needs. Every call raises OSError; TimeoutError when the deadline passed first."""

    def until(self, deadline: float) -> None:
        """From now on all waiting ends at `deadline`, in seconds of time.monotonic()."""
        ...

    def send(self, frames: Sequence[Frame]) -> None:
        """Sends all of them; they may be changed when it returns."""
        ...

    def receive(self, into: memoryview) -> int:
        """At least one byte."""
        ...

    def receive_all(self, into: Sequence[memoryview]) -> None:
        """Fills every view."""
        ...

    def is_stale(self) -> bool:
        """With nothing under way: the other side has hung up, or said something unasked. Never blocks."""
        ...

    def interrupt(self) -> None:
        """Makes every call fail, the one under way on another thread too."""
        ...

    def close(self) -> None: ...


def open_stream(address: RedisAddress, tls: ssl.SSLContext | None, deadline: float) -> Stream:
    """Connects. Raises OSError (TimeoutError at the deadline; the system's name resolver may take longer)."""
    if address.path is not None:
        return _PlainStream(_connect_unix(address.path, deadline))
    sock = _connect_tcp(address.host or "", address.port, deadline)
    try:
        if tls is None:
            return _PlainStream(sock)
        sock.settimeout(_left(deadline))
        return _TlsStream(tls.wrap_socket(sock, server_hostname=address.host))
    except BaseException:
        sock.close()
        raise


def _connect_unix(path: str, deadline: float) -> socket.socket:
    return _connected(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), path, deadline)


def _connect_tcp(host: str, port: int, deadline: float) -> socket.socket:
    """Tries the host's addresses one after the other, all before the deadline."""
    trouble: OSError = ConnectionLost(f"{host} has no address")
    for family, kind, protocol, _, where in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        try:
            sock = _connected(socket.socket(family, kind, protocol), where, deadline)
        except OSError as error:
            trouble = error
            continue
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        return sock
    raise trouble


def _connected(sock: socket.socket, where: Any, deadline: float) -> socket.socket:
    try:
        sock.settimeout(_left(deadline))
        sock.connect(where)
    except BaseException:
        sock.close()
        raise
    return sock


class _PlainStream:
    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(None)
        self._socket = sock
        self._deadline = 0.0
        self._timer_s = 0.0  # what the kernel was told

    def until(self, deadline: float) -> None:
        self._deadline = deadline

    def send(self, frames: Sequence[Frame]) -> None:
        for first in range(0, len(frames), _MOST_FRAMES):
            rest = frames[first : first + _MOST_FRAMES]
            while rest:
                self._arm()
                try:
                    sent = self._socket.sendmsg(rest)
                except BlockingIOError:
                    raise TimeoutError("the server took nothing more before the deadline") from None
                rest = _after(rest, sent)

    def receive(self, into: memoryview) -> int:
        self._arm()
        try:
            got = self._socket.recv_into(into)
        except BlockingIOError:
            raise TimeoutError("nothing came before the deadline") from None
        return _some(got)

    def receive_all(self, into: Sequence[memoryview]) -> None:
        rest: Sequence[memoryview] = into
        while rest:
            self._arm()
            try:
                got, _, _, _ = self._socket.recvmsg_into(rest, 0, socket.MSG_WAITALL)
            except BlockingIOError:
                raise TimeoutError("a value did not end before the deadline") from None
            rest = _after(rest, _some(got))

    def is_stale(self) -> bool:
        return _peek(self._socket) is not None

    def interrupt(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()

    def _arm(self) -> None:
        """Sets the kernel's timers, unless they end at the deadline or not long after it as they are."""
        left = self._deadline - time.monotonic()
        if 0 < left <= self._timer_s <= left + _SLACK_S:
            return
        self._timer_s = left = _left(self._deadline)
        timeval = struct.pack("ll", int(left), int(left % 1 * 1e6))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)


class _TlsStream:
    """TLS copies and cuts everything into records of 16 KiB anyway, so this one is merely correct."""

    def __init__(self, sock: ssl.SSLSocket) -> None:
        self._socket = sock
        self._deadline = 0.0

    def until(self, deadline: float) -> None:
        self._deadline = deadline

    def send(self, frames: Sequence[Frame]) -> None:
        for frame in frames:
            self._socket.settimeout(_left(self._deadline))
            self._socket.sendall(frame)

    def receive(self, into: memoryview) -> int:
        self._socket.settimeout(_left(self._deadline))
        return _some(self._socket.recv_into(into))

    def receive_all(self, into: Sequence[memoryview]) -> None:
        for view in into:
            rest = view
            while len(rest):
                rest = rest[self.receive(rest) :]

    def is_stale(self) -> bool:
        # Session tickets may lie there unread at any time: only the end of the stream says something.
        self._socket.settimeout(0)  # with any other timeout Python would wait for something to peek at
        return _peek(self._socket) == b""

    def interrupt(self) -> None:
        with suppress(OSError):  # the plain socket's method: TLS's own would take the session from the other thread
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("the deadline has passed")
    return max(left, _SHORTEST_S)


def _some(received: int) -> int:
    if received == 0:
        raise ConnectionLost("the server closed the connection")
    return received


def _after(parts: Sequence[T], done: int) -> Sequence[T | memoryview]:
    """What is left of `parts` behind the first `done` bytes."""
    if done == sum(map(len, parts)):
        return ()
    for index, part in enumerate(parts):
        if done < len(part):
            return [memoryview(part)[done:], *parts[index + 1 :]]
        done -= len(part)
    return ()


def _peek(sock: socket.socket) -> bytes | None:
    """What the next receive would find: a byte, b"" at the end, or None if it would wait."""
    try:
        return socket.socket.recv(sock, 1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return None
    except OSError:
        return b""
