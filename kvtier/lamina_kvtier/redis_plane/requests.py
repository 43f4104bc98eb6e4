"""The requests that blocks need: store a value, fetch one, and ask for small things."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lamina_kvtier.redis_plane.resp import (
    ErrorReply,
    Place,
    ProtocolError,
    Reply,
    ReplyReader,
    ValueReply,
    ValueTooLong,
    encode,
    encode_set,
)
from lamina_kvtier.redis_plane.stream import Frame
from lamina_kvtier.redis_plane.work import Failure, Request, Step

__all__ = ["Ask", "Fetch", "Store"]


class Store(Request):
    """SET. The value's parts go out as they lie in memory."""

    __slots__ = ("_key", "_ttl_ms", "_value", "cost", "result")

    def __init__(self, key: bytes, value: Callable[[], Sequence[Frame]], cost: int, ttl_ms: int | None) -> None:
        """value: called on the lane's thread right before sending; parts are bytes, or views of format "B".

        cost: about how many bytes that will be.
        """
        super().__init__()
        self._key, self._value, self._ttl_ms = key, value, ttl_ms
        self.cost = cost
        self.result: Reply | Failure = Failure.UNAVAILABLE

    def frames(self) -> Sequence[Frame]:
        parts = self._value()
        head, tail = encode_set(self._key, sum(map(len, parts)), self._ttl_ms)
        return [head, *parts, tail]

    def receive(self, reader: ReplyReader) -> Step:
        self.result = reader.read()
        if self.result != b"OK" and not isinstance(self.result, ErrorReply):
            raise ProtocolError("SET is answered with OK or an error, and with nothing else")
        return Step.DONE

    def fail(self, failure: Failure) -> None:
        self.result = failure


class Fetch(Request):
    """GET. The value goes right where its place says, and is checked there before the next one is read."""

    __slots__ = ("_check", "_expected", "_key", "_place", "cost", "result")

    def __init__(self, key: bytes, expected: int, place: Place, check: Callable[[], bool] | None = None) -> None:
        """expected: the value's likely length in bytes.

        check: called on the lane's thread when the value is in its place; False if it cannot be the answer to this
        request, so that the stream of replies seems to be out of step.
        """
        super().__init__()
        self._key, self._expected, self._place, self._check = key, expected, place, check
        self.cost = expected
        self.result: ValueReply | ErrorReply | Failure = Failure.UNAVAILABLE

    def frames(self) -> Sequence[Frame]:
        return [b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(self._key), self._key)]

    def receive(self, reader: ReplyReader) -> Step:
        try:
            self.result = reader.read_value(self._expected, self._place)
        except ValueTooLong as error:
            self.result = ValueReply(error.length, False)
            return Step.DISTRUST
        if isinstance(self.result, ErrorReply) or not self.result.taken or self._check is None:
            return Step.DONE
        return Step.DONE if self._check() else Step.DISTRUST

    def fail(self, failure: Failure) -> None:
        self.result = failure


class Ask(Request):
    """Commands with small replies, all at once. Each reply is an error or of type `wanted`."""

    __slots__ = ("_commands", "_wanted", "cost", "result")

    def __init__(self, commands: Sequence[Sequence[bytes]], wanted: type) -> None:
        super().__init__()
        self._commands, self._wanted = commands, wanted
        self.cost = sum(len(argument) + 16 for command in commands for argument in command)
        self.result: list[Reply] | Failure = Failure.UNAVAILABLE

    def frames(self) -> Sequence[Frame]:
        return [b"".join(encode(*command) for command in self._commands)]

    def receive(self, reader: ReplyReader) -> Step:
        replies = [reader.read() for _ in self._commands]
        if any(type(reply) not in (self._wanted, ErrorReply) for reply in replies):
            raise ProtocolError(f"{self._commands[0][0].decode()} is not answered like that")
        self.result = replies
        return Step.DONE

    def fail(self, failure: Failure) -> None:
        self.result = failure
