"""A Lua script on the server: named by its hash, and sent whole only where the server does not know it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from lamina_kvtier.redis_plane.resp import ErrorReply, Reply, ReplyReader, encode
from lamina_kvtier.redis_plane.stream import Frame
from lamina_kvtier.redis_plane.work import Failure, Request, Step

__all__ = ["Script", "ScriptCall"]

T = TypeVar("T")


class Script:
    """Source and hash."""

    def __init__(self, source: bytes) -> None:
        self.source = source
        self.digest = hashlib.sha1(source).hexdigest().encode()  # noqa: S324 - that is how servers name scripts


class ScriptCall(Request, Generic[T]):
    """EVALSHA, and EVAL after NOSCRIPT. Must be harmless to run twice, as all requests.

    `result` is what `parse` made of the last reply, an error, or why there was no reply.
    """

    __slots__ = ("_arguments", "_go_on", "_keys", "_parse", "_script", "_whole", "cost", "result")

    def __init__(
        self,
        script: Script,
        keys: Sequence[bytes],
        arguments: Sequence[bytes],
        parse: Callable[[Reply], T],
        go_on: Callable[[T], Sequence[bytes] | None] = lambda _: None,
    ) -> None:
        """Both are called on the lane's thread. parse: raises ProtocolError for what is no answer. go_on: arguments of
        the next round, or None when there is none."""
        super().__init__()
        self._script, self._keys, self._arguments = script, keys, arguments
        self._parse, self._go_on = parse, go_on
        self._whole = False
        self.cost = sum(map(len, arguments)) + 16 * len(arguments)
        self.result: T | ErrorReply | Failure = Failure.UNAVAILABLE

    def frames(self) -> Sequence[Frame]:
        how = (b"EVAL", self._script.source) if self._whole else (b"EVALSHA", self._script.digest)
        return [encode(*how, b"%d" % len(self._keys), *self._keys, *self._arguments)]

    def receive(self, reader: ReplyReader) -> Step:
        reply = reader.read()
        if isinstance(reply, ErrorReply):
            self.result = reply
            if reply.code != "NOSCRIPT" or self._whole:
                return Step.DONE
            self._whole = True
            return Step.AGAIN
        self._whole = False
        self.result = answer = self._parse(reply)
        following = self._go_on(answer)
        if following is None:
            return Step.DONE
        self._arguments = following
        return Step.AGAIN

    def fail(self, failure: Failure) -> None:
        self.result = failure
