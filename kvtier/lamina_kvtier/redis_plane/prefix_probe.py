"""How many leading keys exist, in at most three round trips, and exactly.

Few keys are asked for one by one, all at once. Of many, first a few spread over the list: the first one that is missing
bounds the answer, so that a cold prefix costs 16 questions and not 4096. Below that bound the keys are counted in
groups (EXISTS with many keys answers how many there are), and only the first group that is short is asked one by one.
A plain binary search would be shorter, and wrong: a store evicts where it likes, and leaves holes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum

from lamina_kvtier.redis_plane.resp import ErrorReply, ProtocolError, Reply, ReplyReader, encode
from lamina_kvtier.redis_plane.stream import Frame
from lamina_kvtier.redis_plane.work import Failure, Request, Step

__all__ = ["PrefixProbe"]

_GROUP = 64
_PROBES = 16


class _Round(Enum):
    SPREAD = "spread"
    GROUPS = "groups"
    SINGLES = "singles"


class PrefixProbe(Request):
    """`known` leading keys exist; `trouble` tells why it may be more. All keys must be of one cluster slot."""

    __slots__ = ("_asked", "_bound", "_keys", "_round", "known", "trouble")

    def __init__(self, keys: Sequence[bytes]) -> None:
        super().__init__()
        self._keys = keys
        self._bound = len(keys)  # the answer is at most that
        self._round = _Round.SINGLES if len(keys) <= _GROUP else _Round.SPREAD
        self._asked: list[range] = []  # of this round: which keys each command names
        self.known = 0
        self.trouble: Failure | ErrorReply | None = None

    def frames(self) -> Sequence[Frame]:
        self._asked = list(self._questions())
        return [b"".join(encode(b"EXISTS", *self._keys[asked.start : asked.stop]) for asked in self._asked)]

    def receive(self, reader: ReplyReader) -> Step:
        replies = [reader.read() for _ in self._asked]
        for asked, reply in zip(self._asked, replies, strict=True):
            if isinstance(reply, ErrorReply):
                self.trouble = reply
                return Step.DONE
            if _count(reply, asked) < len(asked):
                return self._missing_in(asked)
        return self._all_there()

    def fail(self, failure: Failure) -> None:
        self.trouble = failure

    def _questions(self) -> Iterable[range]:
        if self._round is _Round.SPREAD:
            last = len(self._keys) - 1
            return (range(at, at + 1) for at in (last * probe // (_PROBES - 1) for probe in range(_PROBES)))
        size = _GROUP if self._round is _Round.GROUPS else 1
        starts = range(self.known, self._bound, size)
        return (range(start, min(start + size, self._bound)) for start in starts)

    def _missing_in(self, asked: range) -> Step:
        """The first command of this round that did not find all of its keys."""
        if self._round is _Round.SINGLES:
            self.known = asked.start
            return Step.DONE
        if self._round is _Round.SPREAD:
            self._bound = asked.start
            return self._then(_Round.GROUPS)
        self.known, self._bound = asked.start, asked.stop
        return self._then(_Round.SINGLES)

    def _all_there(self) -> Step:
        if self._round is _Round.SPREAD:
            return self._then(_Round.GROUPS)
        self.known = self._bound
        return Step.DONE

    def _then(self, following: _Round) -> Step:
        self._round = following
        return Step.AGAIN if self.known < self._bound else Step.DONE


def _count(reply: Reply, asked: range) -> int:
    if type(reply) is not int or not 0 <= reply <= len(asked):
        raise ProtocolError(f"EXISTS of {len(asked)} keys cannot be answered with {type(reply).__name__} {reply!r:.20}")
    return reply
