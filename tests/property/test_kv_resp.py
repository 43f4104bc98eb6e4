"""RESP: the same replies however the stream is cut, and nothing taken from a stranger that was not bargained for."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lamina_kvtier.redis_plane.resp import (
    Bounds,
    ErrorReply,
    ProtocolError,
    Reply,
    ReplyReader,
    ValueReply,
    ValueTooLong,
    encode,
    encode_set,
)

BOUNDS = Bounds(line=64, bulk=1000, elements=50, depth=3, drain=500)


class Pieces:
    """A source that gives its bytes in the given pieces, and then hangs up."""

    def __init__(self, data: bytes, cuts: Sequence[int] = ()) -> None:
        edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
        self.pieces = [piece for a, b in itertools.pairwise(edges) if (piece := data[a:b])]
        self.largest = 0

    def receive(self, into: memoryview) -> int:
        self.largest = max(self.largest, len(into))
        if not self.pieces:
            raise ConnectionError("the end")
        assert len(into)
        piece = self.pieces.pop(0)
        taken = piece[: len(into)]
        into[: len(taken)] = taken
        if rest := piece[len(taken) :]:
            self.pieces.insert(0, rest)
        return len(taken)

    def receive_all(self, into: Sequence[memoryview], size: int) -> None:
        assert size == sum(map(len, into))
        for view in into:
            self.largest = max(self.largest, len(view))
            while len(view):
                view = view[self.receive(view) :]


text = st.binary(max_size=20).filter(lambda data: b"\r" not in data and b"\n" not in data)
leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.binary(max_size=60),
    text.map(lambda data: ErrorReply(data.decode("utf-8", "replace"))),
    st.floats(allow_nan=False),
)
replies = st.recursive(leaves, lambda children: st.lists(children, max_size=4), max_leaves=12).filter(
    lambda reply: _depth(reply) <= BOUNDS.depth
)
cuts = st.lists(st.integers(0, 10_000), max_size=12)


def _depth(reply: Reply) -> int:
    return 1 + max(map(_depth, reply), default=0) if isinstance(reply, list) else 0


def _write(reply: Reply, spell: int) -> bytes:
    """The reply in RESP; `spell` chooses where there are several ways to write it."""
    if reply is None:
        return (b"_\r\n", b"$-1\r\n", b"*-1\r\n")[spell % 3]
    if isinstance(reply, bool):
        return b"#t\r\n" if reply else b"#f\r\n"
    if isinstance(reply, int):
        return b":%d\r\n" % reply
    if isinstance(reply, float):
        return b",%s\r\n" % repr(reply).encode()
    if isinstance(reply, ErrorReply):
        error = reply.text.encode()
        return b"-%b\r\n" % error if len(error) < 60 and spell % 2 else b"!%d\r\n%b\r\n" % (len(error), error)
    if isinstance(reply, bytes):
        if spell % 3 == 0 and len(reply) < 40 and b"\r" not in reply and b"\n" not in reply:
            return b"+%b\r\n" % reply
        if spell % 3 == 1:
            return b"=%d\r\ntxt:%b\r\n" % (len(reply) + 4, reply)
        return b"$%d\r\n%b\r\n" % (len(reply), reply)
    kind, count = (b"%", len(reply) // 2) if spell % 2 and len(reply) % 2 == 0 else (b"*", len(reply))
    return kind + b"%d\r\n" % count + b"".join(_write(child, spell + 1) for child in reply)


@given(st.lists(replies, max_size=5), st.integers(0, 5), cuts)
@settings(max_examples=200, deadline=None)
def test_replies_are_the_same_however_the_stream_is_cut(wanted: list[Reply], spell: int, where: list[int]) -> None:
    reader = ReplyReader(Pieces(b"".join(_write(reply, spell) for reply in wanted), where), BOUNDS)
    assert [reader.read() for _ in wanted] == wanted
    assert reader.unread == 0


@given(
    st.lists(
        st.one_of(st.none(), st.binary(max_size=300), text.map(lambda t: ErrorReply(t.decode("latin-1")))), max_size=6
    ),
    cuts,
    st.integers(0, 400),
)
@settings(max_examples=200, deadline=None)
def test_values_land_where_they_should_however_the_stream_is_cut(
    values: list[bytes | ErrorReply | None], where: list[int], expected: int
) -> None:
    data = b"".join(
        b"-%b\r\n" % value.text.encode() if isinstance(value, ErrorReply) else _write(value, 2) for value in values
    )
    reader = ReplyReader(Pieces(data.replace(b"*-1", b"$-1"), where), BOUNDS)
    for value in values:
        place = bytearray(300)
        reply = reader.read_value(
            expected,
            lambda length, place=place: [memoryview(place)[:7][:length], memoryview(place)[7 : max(7, length)]],
        )
        if isinstance(value, bytes):
            assert reply == ValueReply(len(value), True)
            assert place[: len(value)] == value
        else:
            assert reply == (ValueReply(-1, False) if value is None else value)
    assert reader.unread == 0


@given(st.binary(max_size=120), cuts)
@settings(max_examples=300, deadline=None)
def test_noise_ends_in_an_error_and_never_takes_memory(noise: bytes, where: list[int]) -> None:
    source = Pieces(noise, where)
    reader = ReplyReader(source, BOUNDS)
    with pytest.raises((ProtocolError, ConnectionError)):
        _read_all(reader)
    assert source.largest <= BOUNDS.bulk + 2


def _read_all(reader: ReplyReader) -> None:
    while True:
        reader.read()


@given(st.sampled_from([b"$", b"*", b"%", b"~", b">", b"=", b"!", b"|"]), st.integers(51, 10**19), st.booleans())
@settings(max_examples=100, deadline=None)
def test_a_hostile_length_is_refused_before_anything_is_allocated(kind: bytes, length: int, nested: bool) -> None:
    length += 0 if kind in b"*%~>|" else BOUNDS.bulk
    reader = ReplyReader(Pieces((b"*1\r\n" if nested else b"") + kind + b"%d\r\n" % length), BOUNDS)
    with pytest.raises(ProtocolError):
        reader.read()


def test_a_value_is_received_without_a_byte_of_the_next_reply() -> None:
    """That is what lets it go from the socket right to its place."""

    class Strict(Pieces):
        def receive(self, into: memoryview) -> int:
            assert len(into) <= len(b"$300\r\n")
            return super().receive(into)

        def receive_all(self, into: Sequence[memoryview], size: int) -> None:
            assert size == sum(map(len, into)) == 302
            for view in into:
                super().receive(view) if len(view) <= 6 else Pieces.receive(self, view)

    reader = ReplyReader(Strict(b"$300\r\n" + bytes(300) + b"\r\n" + b"$300\r\n" + bytes(300) + b"\r\n"), BOUNDS)
    for _ in range(2):
        place = memoryview(bytearray(300))
        assert reader.read_value(300, lambda _, place=place: [place]) == ValueReply(300, True)


@pytest.mark.parametrize("cut", range(30))
def test_an_unwanted_value_is_read_past_and_the_next_reply_is_right(cut: int) -> None:
    reader = ReplyReader(Pieces(b"$500\r\n" + bytes(500) + b"\r\n+after\r\n", [cut, cut * 20]), BOUNDS)
    assert reader.read_value(10, lambda _: None) == ValueReply(500, False)
    assert reader.read() == b"after"


def test_an_unwanted_value_beyond_the_bound_is_not_read() -> None:
    source = Pieces(b"$501\r\n" + bytes(501))
    with pytest.raises(ValueTooLong) as caught:
        ReplyReader(source, BOUNDS).read_value(10, lambda _: None)
    assert caught.value.length == 501
    assert source.largest <= BOUNDS.line + 2


LINES = (b"?", b":12x", b":", b"$-2", b"*-5", b"#x", b",e", b"", b"%26", b":1_0", b": 1", b"$+", b"+" + b"x" * 70)
DEEP, WIDE = b"*1\r\n" * 4 + b":1\r\n", b"*30\r\n" + b"*30\r\n" * 30


@pytest.mark.parametrize("stream", [*(line + b"\r\n" for line in LINES), DEEP, WIDE, b"$3\r\nabcXY"])
def test_what_is_no_resp_is_an_error(stream: bytes) -> None:
    with pytest.raises(ProtocolError):
        ReplyReader(Pieces(stream), BOUNDS).read()


@pytest.mark.parametrize("stream", [b":1\r\n", b"+OK\r\n", b"*1\r\n$1\r\na\r\n", b"$1x\r\n"])
def test_what_is_no_value_is_an_error_where_one_is_wanted(stream: bytes) -> None:
    with pytest.raises(ProtocolError):
        ReplyReader(Pieces(stream), BOUNDS).read_value(1, lambda _: None)


def test_pushes_and_attributes_are_passed_over() -> None:
    stream = b">2\r\n+invalidate\r\n_\r\n|1\r\n+ttl\r\n:3\r\n:7\r\n"
    assert ReplyReader(Pieces(stream), BOUNDS).read() == 7


def test_numbers_without_end_stay_text() -> None:
    assert (
        ReplyReader(Pieces(b"(123456789012345678901234567890\r\n"), BOUNDS).read() == b"123456789012345678901234567890"
    )
    assert ReplyReader(Pieces(b",inf\r\n"), BOUNDS).read() == math.inf


@given(st.lists(st.binary(max_size=50), min_size=1, max_size=5))
@settings(max_examples=50, deadline=None)
def test_a_command_reads_back_as_an_array_of_its_arguments(arguments: list[bytes]) -> None:
    assert ReplyReader(Pieces(encode(*arguments)), BOUNDS).read() == arguments


@given(st.binary(max_size=200), st.one_of(st.none(), st.integers(1, 10**12)))
@settings(max_examples=50, deadline=None)
def test_a_value_between_its_frames_is_a_set_command(value: bytes, ttl_ms: int | None) -> None:
    head, tail = encode_set(b"key", len(value), ttl_ms)
    expiry = [] if ttl_ms is None else [b"PX", b"%d" % ttl_ms]
    assert ReplyReader(Pieces(head + value + tail), BOUNDS).read() == [b"SET", b"key", value, *expiry]
