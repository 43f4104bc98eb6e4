"""TextStream: whole characters, no piece of a stop string, and the tokens that count."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from fixtures.tokenizers import byte_level, sentencepiece
from lamina.engine.detokenize import TextDelta, TextStream
from lamina.errors import InvalidRequest
from lamina.models.tokenizer import Tokenizer

BYTES = byte_level()
END = 256  # BYTES' control token


def bytes_of(text: str) -> list[int]:
    return list(text.encode())


def one_by_one(stream: TextStream, ids: Sequence[int]) -> list[str]:
    """What each token released, then what the end released."""
    return [stream.push([token_id]).text for token_id in ids] + [stream.finish()]


def test_a_character_comes_whole() -> None:
    """The bytes of an emoji are held back until it is complete."""
    assert one_by_one(TextStream(BYTES), bytes_of("a😀b")) == ["a", "", "", "", "😀", "b", ""]


def test_half_a_character_at_the_end_is_shown_as_replacement() -> None:
    """What never completes comes out at the end, as decode shows it."""
    ids = bytes_of("a😀")[:-1]
    assert one_by_one(TextStream(BYTES), ids) == ["a", "", "", "", "\ufffd"]
    assert BYTES.decode(ids) == "a\ufffd"


def test_a_replacement_character_that_is_meant_is_not_held() -> None:
    """U+FFFD written by the model is a character like any other."""
    assert one_by_one(TextStream(BYTES), bytes_of("\ufffd!"))[2:] == ["\ufffd", "!", ""]


def test_endless_rubbish_is_not_hoarded() -> None:
    """Bytes that can't become a character are released as soon as that is known."""
    stream = TextStream(BYTES)
    assert sum(len(stream.push([0xFF]).text) for _ in range(100)) == 100


def test_control_tokens_are_skipped_or_shown() -> None:
    """Skipped by default, even between the bytes of one character, as decode does."""
    ids = [*bytes_of("a"), END, 0xC3, END, 0xA9]
    assert "".join(one_by_one(TextStream(BYTES), ids)) == "aé" == BYTES.decode(ids)
    shown = "".join(one_by_one(TextStream(BYTES, skip_special_tokens=False), ids))
    assert shown == BYTES.decode(ids, skip_special_tokens=False)


def test_unknown_ids_are_silent() -> None:
    """Ids beyond the vocabulary, which padded embeddings can yield, add nothing."""
    assert TextStream(BYTES).push([999_999, *bytes_of("x")]) == TextDelta("x", False, None, 2)


def test_stop_string_across_tokens() -> None:
    """A stop string is found across tokens; nothing of it is shown, nothing after it counts."""
    stream = TextStream(BYTES, stop=["END"])
    assert stream.push(bytes_of("go E")) == TextDelta("go ", False, None, 4)
    assert stream.push(bytes_of("ND, more")) == TextDelta("", True, "END", 2)
    assert stream.push(bytes_of("x")) == TextDelta("", True, "END", 0)
    assert stream.finish() == ""


def test_stop_string_inside_one_token() -> None:
    """Text before the stop string in the same token is shown, text after it is not."""
    tokenizer = byte_level(("a", "\u010a"), ("a\u010a", "b"))  # U+010A spells a newline
    token = next(i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) == b"a\nb")
    assert TextStream(tokenizer, stop=["\n"]).push([token, token]) == TextDelta("a", True, "\n", 1)


def test_stop_string_can_be_included() -> None:
    """include_stop_str shows it, and nothing after it."""
    stream = TextStream(BYTES, stop=["b"], include_stop_str=True)
    assert stream.push(bytes_of("abc")) == TextDelta("ab", True, "b", 2)


def test_false_alarm_is_released() -> None:
    """What turns out not to be the stop string is shown at once."""
    parts = one_by_one(TextStream(BYTES, stop=["abc"]), bytes_of("xababd"))
    assert parts == ["x", "", "", "ab", "", "abd", ""]


def test_what_is_held_back_comes_at_the_end() -> None:
    """An unfinished stop string is ordinary text."""
    stream = TextStream(BYTES, stop=["\n\nUser:"])
    assert stream.push(bytes_of("bye\n\nUser")).text == "bye"
    assert stream.finish() == "\n\nUser"
    assert stream.finish() == ""


@pytest.mark.parametrize(
    ("text", "stop", "shown", "found"),
    [
        ("xabcdy", ["bc", "abcd"], "xa", "bc"),  # complete first
        ("xabcy", ["c", "bc", "abc"], "x", "abc"),  # complete together: the longest
        ("aab", ["ab"], "a", "ab"),  # the beginning repeats itself
        ("abababc", ["ababc"], "ab", "ababc"),
        ("aaaab", ["aaab", "zzz"], "a", "aaab"),
        ("stop", ["stop"], "", "stop"),
        ("é😀!", ["😀"], "é", "😀"),
        ("ABC", ["abc"], "ABC", None),
    ],
)
def test_which_stop_string_wins(text: str, stop: list[str], shown: str, found: str | None) -> None:
    """The one complete first wins; of those complete together, the longest. In one push or in many."""
    for pushes in ([bytes_of(text)], [[token_id] for token_id in bytes_of(text)]):
        stream = TextStream(BYTES, stop=stop)
        deltas = [stream.push(push) for push in pushes]
        assert "".join(delta.text for delta in deltas) + stream.finish() == shown
        assert deltas[-1].stop_string == found


def test_a_stop_string_in_the_flushed_end_is_found() -> None:
    """The replacement for half a character can complete a stop string."""
    stream = TextStream(BYTES, stop=["!\ufffd"])
    assert stream.push([*bytes_of("a!"), 0xF0]).text == "a"
    assert stream.finish() == ""


def test_empty_stop_strings_are_refused() -> None:
    """An empty one would match everywhere."""
    with pytest.raises(InvalidRequest, match="empty") as refused:
        TextStream(BYTES, stop=["a", ""])
    assert refused.value.param == "stop"


def test_empty_pushes_and_an_empty_stream() -> None:
    """Nothing in, nothing out."""
    stream = TextStream(BYTES, stop=["x"])
    assert stream.push([]) == TextDelta("", False, None, 0)
    assert stream.finish() == ""


def test_sentencepiece_drops_the_first_space_only() -> None:
    """As decode does: the space in front of a text goes, the others stay; bytes make characters."""
    tokenizer = sentencepiece("\u2581hi", "\u2581", "you")
    ids = [0, 257, 258, *(byte + 1 for byte in "😀".encode()), 259, 257]
    assert one_by_one(TextStream(tokenizer), ids) == ["", "hi", " ", "", "", "", "😀", "you", " hi", ""]
    assert tokenizer.decode(ids) == "hi 😀you hi"


@pytest.mark.model
def test_demo_model_streams_what_it_decodes(demo_model: Path) -> None:
    """With the real tokenizer, token by token."""
    tokenizer = Tokenizer.from_folder(demo_model)
    text = "Ünïcödé 👩‍👩‍👧‍👦 日本語 and 12345 <|im_end|>\n" * 20
    ids = tokenizer.encode(text)
    assert "".join(one_by_one(TextStream(tokenizer), ids)) == tokenizer.decode(ids)
