"""RESP2 and RESP3, as much as moving blocks needs: commands out, replies in, values straight into their memory.

    RESP2   +text  -error  :int  $n bulk  *n array  $-1 and *-1 nothing
    RESP3   _ nothing  ,double  #bool  (big  =n verbatim  !n error  %n map  ~n set  >n push  |n attribute

Whatever the other side sends is bounded *before* memory is taken for it: lines, bulks, elements, depth. A value is
never collected here: its receiver says where so many bytes may go, or refuses them. Source: redis.io/docs, "RESP
protocol specification".
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

__all__ = [
    "Bounds",
    "ErrorReply",
    "ProtocolError",
    "Reply",
    "ReplyReader",
    "Source",
    "ValueReply",
    "ValueTooLong",
    "encode",
    "encode_set",
]

CRLF = b"\r\n"
_BULK = ord("$")
_OK = b"+OK\r\n"
_NUMBER = re.compile(rb"[+-]?[0-9]{1,19}", re.ASCII)


class ProtocolError(Exception):
    """What arrived is no RESP, or more than was bargained for. Nothing after it can be trusted."""


class ValueTooLong(ProtocolError):
    """A value so long that closing the connection is cheaper than reading past it. The store may be all right."""

    def __init__(self, length: int) -> None:
        self.length = length
        super().__init__(f"a value of {length} bytes, which nobody wants")


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """The server said no. `code` is its first word: "OOM", "NOAUTH", "ERR"."""

    text: str

    @property
    def code(self) -> str:
        return self.text.partition(" ")[0]


Reply = None | bool | int | float | bytes | ErrorReply | list["Reply"]
"""A map is a list of keys and values by turns; text is bytes; numbers too big for an int64 stay text."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """The most that one reply may be."""

    line: int = 4096  # bytes, without the end of line
    bulk: int = 256 * 1024  # bytes of a bulk that is collected, such as the answer to INFO
    elements: int = 4096  # of all arrays in one reply together
    depth: int = 6
    drain: int = 4 * 1024 * 1024  # bytes of an unwanted value that are read and thrown away to keep the connection


class Source(Protocol):
    """Where bytes come from. Both raise OSError, at the end of the stream too; TimeoutError at the deadline."""

    def receive(self, into: memoryview) -> int:
        """Waits for at least one byte; how many were written to the front of `into`."""
        ...

    def receive_all(self, into: Sequence[memoryview], size: int) -> None:
        """Fills every view, `size` bytes together."""
        ...


Place = Callable[[int], Sequence[memoryview] | None]
"""Called with a value's length: the views it goes to (their lengths add up to it), or None to refuse it."""


@dataclass(frozen=True, slots=True)
class ValueReply:
    """How a wanted value came. `length` is -1 if there is none; `taken`: it lies where its place said."""

    length: int
    taken: bool


_NO_VALUE = ValueReply(-1, False)


def encode(*arguments: bytes) -> bytes:
    """One command."""
    parts = [b"*%d\r\n" % len(arguments)]
    for argument in arguments:
        parts += (b"$%d\r\n" % len(argument), argument, CRLF)
    return b"".join(parts)


def encode_set(key: bytes, length: int, ttl_ms: int | None) -> tuple[bytes, bytes]:
    """What goes before and after the `length` bytes of a value in a SET command. `ttl_ms` None: it never expires."""
    count = 3 if ttl_ms is None else 5
    head = b"*%d\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (count, len(key), key, length)
    if ttl_ms is None:
        return head, CRLF
    ttl = b"%d" % ttl_ms
    return head, b"\r\n$2\r\nPX\r\n$%d\r\n%b\r\n" % (len(ttl), ttl)


class ReplyReader:
    """Reads one reply after the other from a source, wherever the stream was cut into pieces.

    After an exception the stream is out of step for good: close the connection.
    """

    __slots__ = (
        "_bounds",
        "_buffer",
        "_crlf",
        "_end",
        "_head",
        "_head_room",
        "_source",
        "_start",
        "_tail",
        "_view",
        "_wanted",
    )

    def __init__(self, source: Source, bounds: Bounds | None = None) -> None:
        self._source = source
        self._bounds = bounds or Bounds()
        self._buffer = bytearray(self._bounds.line + len(CRLF))
        self._view = memoryview(self._buffer)
        self._start = self._end = 0  # what was received and not yet read
        self._crlf = bytearray(CRLF)  # the end of line behind a bulk comes here
        self._tail = memoryview(self._crlf)
        self._expect(0)

    @property
    def unread(self) -> int:
        """Bytes received beyond the last reply: with no request under way, there should be none."""
        return self._end - self._start

    def read(self) -> Reply:
        """The next reply. Raises ProtocolError, or what the source raises."""
        if self._start == self._end:
            self._start, self._end = 0, self._source.receive(self._view)
        if self._buffer.startswith(_OK, self._start, self._end):  # the common case in few steps
            self._start += len(_OK)
            return b"OK"
        while True:
            line = self._line(len(self._buffer))
            reply = self._reply(line, _Budget(self._bounds.elements), 0)
            if not line.startswith((b">", b"|")):  # out of band, and not asked for
                return reply

    def read_value(self, expected: int, place: Place) -> ValueReply | ErrorReply:
        """The next reply, which is a value, nothing, or an error.

        `expected`, the likely length in bytes, is only a hint: with it the whole value goes from the source to its
        place, and no byte past it is received. A value that its place refuses is read past up to `bounds.drain` bytes.
        Raises ProtocolError, ValueTooLong beyond that, or what the source raises.
        """
        if expected != self._wanted.length:
            self._expect(expected)
        length = expected if self._begins_as_expected() else self._length()
        if not isinstance(length, int):
            return length
        views = place(length)
        if views is None:
            self._skip(length)
            return ValueReply(length, False)
        self._fill(views, length)
        return self._wanted if length == expected else ValueReply(length, True)

    def _expect(self, length: int) -> None:
        """What the next values of that length have in common."""
        self._wanted, self._head = ValueReply(length, True), b"$%d\r\n" % length
        self._head_room = self._view[: len(self._head)]

    def _begins_as_expected(self) -> bool:
        """The common case in few steps: nothing is buffered, and the line that begins a value of that length comes."""
        if self._start < self._end:
            return False
        self._start, self._end = 0, self._source.receive(self._head_room)
        if self._end < len(self._head) or not self._buffer.startswith(self._head):
            return False
        self._end = 0
        return True

    def _length(self) -> int | ValueReply | ErrorReply:
        """Of the value that follows, or what there is instead of one."""
        line = self._line(len(self._head))
        kind = line[:1]
        if kind == b"-":
            return _error(line[1:])
        if kind == b"_" or line == b"$-1":
            return _NO_VALUE
        if kind != b"$":
            raise ProtocolError(f"a value was expected, not {_shown(line)}")
        return _count(line)

    def _line(self, want: int) -> bytes:
        """The next line without its end. At most `want` bytes are received at a time: no value behind it with them."""
        searched = self._start
        while (stop := self._buffer.find(CRLF, searched, self._end)) < 0:
            searched = max(self._start, self._end - 1)  # its CR may have come already
            searched -= self._compact()
            if self._end == len(self._buffer):
                raise ProtocolError(f"a line of more than {self._bounds.line} bytes")
            if self.unread and self._buffer[self._start] != _BULK:
                want = len(self._buffer)  # no value will follow
            room = self._view[self._end : self._end + max(1, want - self.unread)]
            self._end += self._source.receive(room)
        line = bytes(self._view[self._start : stop])
        self._start = stop + len(CRLF)
        return line

    def _compact(self) -> int:
        """Moves what is unread to the front; by how much."""
        moved = self._start
        if moved:
            self._buffer[: self._end - moved] = self._buffer[moved : self._end]
            self._start, self._end = 0, self._end - moved
        return moved

    def _reply(self, line: bytes, budget: _Budget, depth: int) -> Reply:
        kind, rest = line[:1], line[1:]
        if kind == b":":
            return _int(rest)
        if kind == b"-":
            return _error(rest)
        if kind in (b"+", b"("):
            return rest
        if kind == b"_" or line in (b"$-1", b"*-1"):
            return None
        if kind in (b"$", b"=", b"!"):
            return self._bulk(kind, _count(line))
        if kind == b"#" and rest in (b"t", b"f"):
            return rest == b"t"
        if kind == b",":
            return _float(rest)
        if kind in (b"*", b"~", b">", b"%", b"|"):
            return self._elements(_count(line) * (2 if kind in (b"%", b"|") else 1), budget, depth + 1)
        raise ProtocolError(f"no reply starts like {_shown(line)}")

    def _elements(self, count: int, budget: _Budget, depth: int) -> list[Reply]:
        if depth > self._bounds.depth:
            raise ProtocolError(f"a reply nested more than {self._bounds.depth} deep")
        budget.spend(count)
        return [self._reply(self._line(len(self._buffer)), budget, depth) for _ in range(count)]

    def _bulk(self, kind: bytes, length: int) -> Reply:
        if length > self._bounds.bulk:
            raise ProtocolError(f"a bulk of {length} bytes where {self._bounds.bulk} are the most")
        data = bytearray(length)
        self._fill([memoryview(data)], length)
        if kind == b"!":
            return _error(bytes(data))
        return bytes(data[4:] if kind == b"=" else data)  # verbatim text has its format in front: "txt:"

    def _fill(self, views: Sequence[memoryview], length: int) -> None:
        """Fills the views with the next `length` bytes, and reads the end of line behind them."""
        if sum(map(len, views)) != length:
            raise ValueError(f"{length} bytes do not fit a place of {[len(view) for view in views]}")
        whole: Sequence[memoryview] = [*views, self._tail]
        left = length + len(CRLF)
        if self._start < self._end:
            whole = self._from_buffer(whole)
            left = sum(map(len, whole))
        if whole:
            self._source.receive_all(whole, left)
        if self._crlf != CRLF:
            raise ProtocolError(f"a bulk that goes on after its {length} bytes: {_shown(bytes(self._crlf))}")

    def _from_buffer(self, views: Sequence[memoryview]) -> Sequence[memoryview]:
        """Copies what was received already; what is left to fill."""
        views = list(views)
        while views and self.unread:
            part = min(len(views[0]), self.unread)
            views[0][:part] = self._view[self._start : self._start + part]
            self._start += part
            if part < len(views[0]):
                views[0] = views[0][part:]
                break
            views.pop(0)
        return [view for view in views if len(view)]

    def _skip(self, length: int) -> None:
        """Reads past a value that nobody wants, through the small buffer."""
        if length > self._bounds.drain:
            raise ValueTooLong(length)
        scratch = memoryview(bytearray(min(length, 64 * 1024)))
        while length > len(scratch):
            self._piece(scratch)
            length -= len(scratch)
        self._fill([scratch[:length]], length)

    def _piece(self, view: memoryview) -> None:
        if rest := self._from_buffer([view]):
            self._source.receive_all(rest, sum(map(len, rest)))


class _Budget:
    """Elements that one reply may still have."""

    __slots__ = ("_left",)

    def __init__(self, elements: int) -> None:
        self._left = elements

    def spend(self, count: int) -> None:
        self._left -= count
        if self._left < 0:
            raise ProtocolError("a reply of too many elements")


def _count(line: bytes) -> int:
    """The length after a reply's first byte. Raises ProtocolError if it is none."""
    count = _int(line[1:])
    if count < 0:
        raise ProtocolError(f"no length is negative: {_shown(line)}")
    return count


def _int(digits: bytes) -> int:
    if not _NUMBER.fullmatch(digits):
        raise ProtocolError(f"no number: {_shown(digits)}")
    return int(digits)


def _float(digits: bytes) -> float:
    try:
        return float(digits)
    except ValueError:
        raise ProtocolError(f"no number: {_shown(digits)}") from None


def _error(text: bytes) -> ErrorReply:
    return ErrorReply(text.decode("utf-8", "replace"))


def _shown(data: bytes) -> str:
    """For messages: never more than a few bytes of what a stranger sent."""
    return repr(data[:32])
