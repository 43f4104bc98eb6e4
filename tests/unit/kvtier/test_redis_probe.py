"""The longest known prefix: exact whatever holes the store has, in few questions."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from lamina_kvtier.redis_plane.prefix_probe import PrefixProbe
from lamina_kvtier.redis_plane.resp import ErrorReply, Reply, ReplyReader
from lamina_kvtier.redis_plane.work import Step


class _Source:
    def __init__(self, data: bytes) -> None:
        self._data = data

    def receive(self, into: memoryview) -> int:
        if not self._data:
            raise ConnectionError("the end")
        taken, self._data = self._data[: len(into)], self._data[len(into) :]
        into[: len(taken)] = taken
        return len(taken)

    def receive_all(self, into: Sequence[memoryview], size: int) -> None:
        for view in into:
            assert self.receive(view) == len(view)


def _ask(probe: PrefixProbe, there: set[bytes]) -> tuple[Step, int]:
    """One round; how many keys it named."""
    (frame,) = probe.frames()
    reader = ReplyReader(_Source(bytes(frame)))
    answers, keys = [], 0
    while (command := _next(reader)) is not None:
        assert command[0] == b"EXISTS"
        answers.append(b":%d\r\n" % sum(key in there for key in command[1:]))
        keys += len(command) - 1
    return probe.receive(ReplyReader(_Source(b"".join(answers)))), keys


def _next(reader: ReplyReader) -> list[bytes] | None:
    try:
        command: Reply = reader.read()
    except ConnectionError:
        return None
    assert isinstance(command, list)
    return command  # type: ignore[return-value]


def _keys(count: int) -> list[bytes]:
    return [b"key%d" % number for number in range(count)]


@given(st.integers(1, 700), st.sets(st.integers(0, 700), max_size=6))
@settings(max_examples=100, deadline=None)
def test_it_is_exact_whatever_is_missing_in_three_rounds(count: int, holes: set[int]) -> None:
    keys = _keys(count)
    probe = PrefixProbe(keys)
    there = {key for number, key in enumerate(keys) if number not in holes}
    rounds = 1
    while _ask(probe, there)[0] is Step.AGAIN:
        rounds += 1
    assert probe.known == min([count, *holes])
    assert probe.trouble is None
    assert rounds <= 3


def test_a_cold_prefix_costs_few_questions() -> None:
    assert _ask(PrefixProbe(_keys(4096)), set()) == (Step.DONE, 16)


def test_a_refusal_ends_it_with_what_was_known() -> None:
    probe = PrefixProbe(_keys(200))
    _ask(probe, set(_keys(200)))  # the spread round
    probe.frames()
    stream = b":64\r\n:64\r\n-LOADING wait\r\n:8\r\n"
    assert probe.receive(ReplyReader(_Source(stream))) is Step.DONE
    assert probe.trouble == ErrorReply("LOADING wait")
