"""TextStream against a naive oracle that looks at the whole text after every character."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from fixtures.tokenizers import byte_level, sentencepiece
from lamina.engine.detokenize import TextStream
from lamina.models.tokenizer import Tokenizer

BYTES = byte_level(("a", "b"), ("ab", "c"), ("b", "a"), ("\u0120", "a"))
PIECES = sentencepiece("\u2581a", "a", "b", "ab", "\u2581", "\u2581\u2581b")
SMALL = "ab c\u00e9\U0001f600"  # few characters, so that texts and stop strings overlap

token_ids = st.lists(st.integers(0, BYTES.vocab_size), max_size=40)
stops = st.lists(st.text(SMALL, min_size=1, max_size=5), max_size=4)


@st.composite
def pieces(draw: st.DrawFn) -> list[int]:
    """Tokens of the SentencePiece-style tokenizer whose bytes are whole characters."""
    text_token = st.integers(257, PIECES.vocab_size - 1).map(lambda token_id: [token_id])
    character = st.sampled_from("\u00e9\U0001f600z").map(lambda c: [byte + 1 for byte in c.encode()])
    return [i for part in draw(st.lists(text_token | character | st.just([0]))) for i in part]


def split(ids: Sequence[int], cuts: Sequence[int]) -> list[list[int]]:
    """`ids` in consecutive groups; `cuts` are any numbers."""
    edges = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
    return [list(ids[a:b]) for a, b in pairwise(edges)]


def first_stop(text: str, stop: Sequence[str]) -> tuple[str, str | None]:
    """The text before the stop string that is complete first (the longest such), and that stop string."""
    for end in range(1, len(text) + 1):
        complete = [s for s in stop if text[:end].endswith(s)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, None


def run(tokenizer: Tokenizer, pushes: list[list[int]], stop: Sequence[str]) -> tuple[str, str | None, int]:
    stream = TextStream(tokenizer, stop=stop)
    shown, used, found = "", 0, None
    for push in pushes:
        delta = stream.push(push)
        shown, used, found = shown + delta.text, used + delta.tokens_used, delta.stop_string
    return shown + stream.finish(), found, used


@given(token_ids, st.lists(st.integers(0, 1000), max_size=8))
def test_any_bytes_stream_as_they_decode(ids: list[int], cuts: list[int]) -> None:
    """Whatever the tokens and the pushes, the parts are the decoded whole."""
    shown, _, used = run(BYTES, split(ids, cuts), [])
    assert shown == BYTES.decode(ids)
    assert used == len(ids)


@given(st.text(SMALL, max_size=30), stops, st.lists(st.integers(0, 1000), max_size=8))
def test_stop_strings_like_the_oracle(text: str, stop: list[str], cuts: list[int]) -> None:
    """The stop string and the text before it are the oracle's, however the tokens come."""
    ids = BYTES.encode(text)
    shown, found, used = run(BYTES, split(ids, cuts), stop)
    assert (shown, found) == first_stop(text, stop)
    if found is not None:  # the tokens used spell the stop string, and one fewer does not
        assert first_stop(BYTES.decode(ids[:used]), stop) == (shown, found)
        assert first_stop(BYTES.decode(ids[: used - 1]), stop)[1] is None


@given(st.lists(st.sampled_from([0x61, 0x62, 0xF0, 0x9F, 0x98, 0x80, 0xC3, 0xA9, 256]), max_size=30), stops)
def test_stop_strings_among_broken_characters(ids: list[int], stop: list[str]) -> None:
    """Also where bytes don't make characters."""
    shown, found, _ = run(BYTES, [[token_id] for token_id in ids], stop)
    assert (shown, found) == first_stop(BYTES.decode(ids), stop)


@given(st.text(SMALL, max_size=30), stops)
def test_nothing_is_shown_that_must_be_taken_back(text: str, stop: list[str]) -> None:
    """At any moment, what is shown begins the final text, and no more is held back than needed."""
    ids = BYTES.encode(text)
    final, _ = first_stop(text, stop)
    stream, shown = TextStream(BYTES, stop=stop), ""
    for count, token_id in enumerate(ids, start=1):
        delta = stream.push([token_id])
        shown += delta.text
        assert final.startswith(shown)
        assert "\ufffd" not in shown
        if not delta.stopped:
            held = BYTES.decode(ids[:count])[len(shown) :].rstrip("\ufffd")
            assert held == "" or any(s.startswith(held) for s in stop)


@given(pieces(), stops, st.lists(st.integers(0, 1000), max_size=8))
def test_sentencepiece_streams_as_it_decodes(ids: list[int], stop: list[str], cuts: list[int]) -> None:
    """The same with spaces as U+2581, byte tokens, and the dropped first space."""
    shown, found, _ = run(PIECES, split(ids, cuts), stop)
    assert (shown, found) == first_stop(PIECES.decode(ids), stop)
