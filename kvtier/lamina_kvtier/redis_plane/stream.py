"""One connected socket, plain or TLS: bytes from and to memory as it lies, and an end to every wait.

A plain socket stays in blocking mode and the kernel keeps the time (SO_RCVTIMEO, SO_SNDTIMEO): a whole value is then
one system call, where a Python timeout would poll before every piece of it (measured: a tenth more CPU for a send).
Only that the timer of a send on a unix socket begins anew with each piece that the reader takes, about 36 KiB: one that
trickles could hold it for as many deadlines. So that timer is short whatever the deadline, and one call sends little:
on Linux a send ends at most 0.6 s late.
"""

from __future__ import annotations

import socket
import ssl
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, Protocol, TypeVar

from lamina_kvtier.redis_plane.address import RedisAddress

__all__ = ["ConnectionLost", "Frame", "Stream", "open_stream"]

Frame = bytes | memoryview
T = TypeVar("T", bound=Frame)

_MOST_FRAMES = 512  # buffers in one system call; 1024 are allowed
_MOST_BYTES = 1 << 21  # in one system call of a send
_SEND_TIMER_S = 0.01  # for a piece of about 36 KiB
_UNIX_BUFFER = 1 << 20  # bytes: fewer turns of us and the server for one block. TCP sizes its buffers itself
_SLACK_S = 0.02  # a kernel timer that ends this much past the deadline is not set anew
_SHORTEST_S = 0.001  # zero would mean "for ever"


class ConnectionLost(OSError):
    """The other side closed, or this one was told to stop."""


class Stream(Protocol):
    """What a connection needs. Every call raises OSError; TimeoutError when the deadline passed first."""

    def until(self, deadline: float) -> None:
        """From now on all waiting ends at `deadline`, in seconds of time.monotonic()."""
        ...

    def send(self, frames: Sequence[Frame], size: int) -> None:
        """Sends all of them, `size` bytes together; they may be changed when it returns."""
        ...

    def receive(self, into: memoryview) -> int:
        """At least one byte."""
        ...

    def receive_all(self, into: Sequence[memoryview], size: int) -> None:
        """Fills every view, `size` bytes together."""
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
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNIX_BUFFER)  # the system may grant less
    return _connected(sock, path, deadline)


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
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(_SEND_TIMER_S))
        self._deadline = 0.0
        self._timer_s = 0.0  # what the kernel was told
        self._fits_from = self._fits_until = 0.0  # when that ends at the deadline, or not long after it

    def until(self, deadline: float) -> None:
        self._deadline = deadline
        self._fit()

    def send(self, frames: Sequence[Frame], size: int) -> None:
        if size > _MOST_BYTES or len(frames) > _MOST_FRAMES:
            for part in _parts(frames):
                self._send(part, sum(map(len, part)))
        else:
            self._send(frames, size)

    def receive(self, into: memoryview) -> int:
        if not self._fits_from <= time.monotonic() < self._fits_until:
            self._arm()
        try:
            got = self._socket.recv_into(into)
        except BlockingIOError:
            raise TimeoutError("nothing came before the deadline") from None
        return got or _lost()

    def receive_all(self, into: Sequence[memoryview], size: int) -> None:
        got = self._recvmsg(into)
        while got < size:
            into, size = _after(into, got), size - got
            got = self._recvmsg(into)

    def is_stale(self) -> bool:
        return _peek(self._socket) is not None

    def interrupt(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()

    def _send(self, frames: Sequence[Frame], size: int) -> None:
        _left(self._deadline)
        while (sent := self._sendmsg(frames)) < size:
            frames, size = _after(frames, sent), size - sent
            _left(self._deadline)

    def _sendmsg(self, frames: Sequence[Frame]) -> int:
        try:
            return self._socket.sendmsg(frames)
        except BlockingIOError:  # the timer ended
            return 0

    def _recvmsg(self, into: Sequence[memoryview]) -> int:
        if not self._fits_from <= time.monotonic() < self._fits_until:
            self._arm()
        try:
            return self._socket.recvmsg_into(into, 0, socket.MSG_WAITALL)[0] or _lost()
        except BlockingIOError:
            raise TimeoutError("a value did not end before the deadline") from None

    def _arm(self) -> None:
        """Sets the kernel's timer, which does not fit any more. Raises TimeoutError past the deadline."""
        self._timer_s = left = _left(self._deadline)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(left))
        self._fit()

    def _fit(self) -> None:
        self._fits_from = self._deadline - self._timer_s
        self._fits_until = min(self._fits_from + _SLACK_S, self._deadline)


class _TlsStream:
    """TLS copies and cuts everything into records of 16 KiB anyway, so this one is merely correct."""

    def __init__(self, sock: ssl.SSLSocket) -> None:
        self._socket = sock
        self._deadline = 0.0

    def until(self, deadline: float) -> None:
        self._deadline = deadline

    def send(self, frames: Sequence[Frame], size: int) -> None:
        for frame in frames:
            self._socket.settimeout(_left(self._deadline))
            self._socket.sendall(frame)

    def receive(self, into: memoryview) -> int:
        self._socket.settimeout(_left(self._deadline))
        return self._socket.recv_into(into) or _lost()

    def receive_all(self, into: Sequence[memoryview], size: int) -> None:
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


def _timeval(seconds: float) -> bytes:
    return struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))


def _lost() -> int:
    raise ConnectionLost("the server closed the connection")


def _parts(frames: Sequence[Frame]) -> Iterator[Sequence[Frame]]:
    """For one system call each."""
    part: list[Frame] = []
    room = _MOST_BYTES
    for frame in frames:
        rest = memoryview(frame)
        while len(rest):
            if not room or len(part) == _MOST_FRAMES:
                yield part
                part, room = [], _MOST_BYTES
            part.append(rest[:room])
            rest = rest[room:]
            room -= len(part[-1])
    yield part


def _after(parts: Sequence[T], done: int) -> Sequence[T | memoryview]:
    """What is left of `parts` behind the first `done` bytes."""
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
