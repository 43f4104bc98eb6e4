"""One connection to a Redis server: open, introduced, and ready for requests."""

from __future__ import annotations

import ssl
from collections.abc import Sequence

from lamina_kvtier.redis_plane.address import RedisAddress
from lamina_kvtier.redis_plane.resp import Bounds, ErrorReply, ProtocolError, Reply, ReplyReader, encode
from lamina_kvtier.redis_plane.stream import Frame, Stream, open_stream

__all__ = ["Connection", "Refused"]

# What a server older than RESP3, or a proxy, answers to HELLO.
_NO_HELLO = ("ERR", "NOPROTO")


class Refused(OSError):
    """The server is there and says no: wrong password, no such database, loading, a cluster."""

    def __init__(self, what: str, error: ErrorReply) -> None:
        self.code = error.code
        super().__init__(f"the server refused {what}: {error.text[:200]}")


class Connection:
    """Owned by one thread; only `interrupt` may be called from another."""

    __slots__ = ("_stream", "reader")

    def __init__(self, stream: Stream, bounds: Bounds) -> None:
        self._stream = stream
        self.reader = ReplyReader(stream, bounds)

    @staticmethod
    def open(address: RedisAddress, tls: ssl.SSLContext | None, bounds: Bounds, deadline: float) -> Connection:
        """Connects, introduces itself, selects the database, and makes sure that commands are served.

        deadline: in seconds of time.monotonic(). Raises OSError (TimeoutError, Refused) or ProtocolError.
        """
        connection = Connection(open_stream(address, tls, deadline), bounds)
        try:
            connection.until(deadline)
            connection._introduce(address)
            if address.database:
                connection._must("SELECT", encode(b"SELECT", b"%d" % address.database))
            connection._must("PING", encode(b"PING"))  # refused while the server loads, or before we are known to it
        except BaseException:
            connection.close()
            raise
        return connection

    def until(self, deadline: float) -> None:
        """From now on all waiting ends at `deadline`."""
        self._stream.until(deadline)

    def send(self, frames: Sequence[Frame], size: int) -> None:
        """`size`: bytes, of all frames together. Raises OSError."""
        self._stream.send(frames, size)

    def ask(self, command: bytes) -> Reply:
        """One command, one reply, with nothing else under way. Raises OSError or ProtocolError."""
        self._stream.send([command], len(command))
        return self.reader.read()

    def is_stale(self) -> bool:
        """With nothing under way: hung up, or out of step. Never blocks."""
        return self.reader.unread > 0 or self._stream.is_stale()

    def interrupt(self) -> None:
        """Makes whatever is under way fail, on whatever thread."""
        self._stream.interrupt()

    def close(self) -> None:
        self._stream.close()

    def _introduce(self, address: RedisAddress) -> None:
        """RESP3 where the server speaks it: it knows nothing from empty. Proves who we are if there is a password."""
        user, password = (address.user or "default").encode(), address.password
        secret = () if password is None else (b"AUTH", user, password.encode())
        answer = self.ask(encode(b"HELLO", b"3", *secret))
        if not isinstance(answer, ErrorReply):
            return
        if answer.code not in _NO_HELLO:
            raise Refused("to know us", answer)
        if password is not None:
            names = () if address.user is None else (user,)  # AUTH had one argument before there were users
            self._must("to know us", encode(b"AUTH", *names, password.encode()))

    def _must(self, what: str, command: bytes) -> None:
        answer = self.ask(command)
        if isinstance(answer, ErrorReply):
            raise Refused(what, answer)
        if answer not in (b"OK", b"PONG"):
            raise ProtocolError(f"an unheard-of answer to {what}")
