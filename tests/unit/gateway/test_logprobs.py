"""Log-probabilities keep step with the text they belong to."""

from __future__ import annotations

from lamina.engine.choice_text import ChoiceDelta
from lamina.gateway.logprobs import LogprobBuffer, TextOffsets, chat_logprobs, completion_logprobs
from lamina.gateway.testing import ByteCodec
from lamina.types import FinishReason, TokenLogprob

CODEC = ByteCodec()


def tokens(data: bytes) -> tuple[TokenLogprob, ...]:
    return tuple(TokenLogprob(byte, -0.25, 1) for byte in data)


def spelled(released: list[TokenLogprob]) -> bytes:
    return bytes(token.token_id for token in released)


def test_tokens_wait_for_their_text() -> None:
    """Of a character in three tokens none is reported before it is complete."""
    buffer = LogprobBuffer(CODEC)
    first, second, third = "€".encode()
    assert buffer.push(ChoiceDelta(index=0, logprobs=tokens(bytes([first, second])))) == []
    done = buffer.push(ChoiceDelta(index=0, text="€", logprobs=tokens(bytes([third]))))
    assert spelled(done) == "€".encode()


def test_tokens_of_a_stop_string_are_never_reported() -> None:
    buffer = LogprobBuffer(CODEC)
    assert spelled(buffer.push(ChoiceDelta(index=0, text="a", logprobs=tokens(b"a")))) == b"a"
    assert buffer.push(ChoiceDelta(index=0, logprobs=tokens(b"EN"))) == []
    last = ChoiceDelta(index=0, logprobs=tokens(b"D"), finish_reason=FinishReason.STOP, stop_string="END", text="")
    assert buffer.push(last) == []


def test_a_token_that_only_begins_before_the_stop_string_is_reported() -> None:
    codec = Words({1: b"hello E", 2: b"ND"})
    buffer = LogprobBuffer(codec)
    assert buffer.push(ChoiceDelta(index=0, text="hello ", logprobs=(TokenLogprob(1, -1.0, 1),)))
    last = ChoiceDelta(
        index=0, logprobs=(TokenLogprob(2, -1.0, 1),), finish_reason=FinishReason.STOP, stop_string="END"
    )
    assert buffer.push(last) == []


def test_all_are_reported_at_the_end() -> None:
    """Half a character at the end is reported with its replacement character."""
    buffer = LogprobBuffer(CODEC)
    last = ChoiceDelta(index=0, text="\ufffd", logprobs=tokens("€".encode()[:2]), finish_reason=FinishReason.LENGTH)
    assert len(buffer.push(last)) == 2


def test_chat_shape_has_bytes_and_alternatives() -> None:
    token = TokenLogprob(104, -0.5, 1, ((104, -0.5), (0xE2, float("-inf"))))
    (entry,) = chat_logprobs([token], CODEC).model_dump()["content"]
    assert entry == {
        "token": "h",
        "bytes": [104],
        "logprob": -0.5,
        "top_logprobs": [
            {"token": "h", "bytes": [104], "logprob": -0.5},
            {"token": "\ufffd", "bytes": [0xE2], "logprob": -9999.0},  # JSON has no -inf
        ],
    }


def test_completion_shape_counts_characters() -> None:
    """Offsets go on over calls; parts of characters are spelled as bytes, which would else look alike."""
    offsets = TextOffsets(CODEC)
    first = completion_logprobs(tokens("a€".encode()), CODEC, offsets)
    second = completion_logprobs(tokens(b"b"), CODEC, offsets)
    assert first.tokens == ["a", "bytes:\\xe2", "bytes:\\x82", "bytes:\\xac"]
    assert first.text_offset == [0, 1, 1, 1]
    assert second.text_offset == [2]


def test_completion_shape_includes_the_chosen_token() -> None:
    token = TokenLogprob(98, -3.0, 9, ((97, -0.5),))
    shaped = completion_logprobs([token], CODEC, TextOffsets(CODEC))
    assert shaped.top_logprobs == [{"a": -0.5, "b": -3.0}]


class Words(ByteCodec):
    def __init__(self, words: dict[int, bytes]) -> None:
        self._words = words

    def token_bytes(self, token_id: int) -> bytes:
        return self._words[token_id]
