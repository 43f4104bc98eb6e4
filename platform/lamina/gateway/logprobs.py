"""Log-probabilities in OpenAI's two shapes, released only as far as the text they belong to."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from lamina.engine.choice_text import ChoiceDelta
from lamina.gateway.codec import TextCodec
from lamina.gateway.schemas.chat import ChatLogprobs, TokenLogprobBody, TopLogprobBody
from lamina.gateway.schemas.completions import CompletionLogprobs
from lamina.types import TokenLogprob

__all__ = ["LogprobBuffer", "TextOffsets", "chat_logprobs", "completion_logprobs"]

FLOOR = -9999.0  # JSON has no -inf


class LogprobBuffer:
    """Holds tokens back while their text is held back (half a character, the start of a stop string).

    So a token that turns out to belong to a stop string is never reported. Positions are counted in bytes of
    UTF-8; after a replacement character they run ahead, and tokens are released a little earlier.
    """

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._pending: list[tuple[int, TokenLogprob]] = []  # (first byte, token)
        self._bytes_seen = 0
        self._bytes_released = 0

    def push(self, delta: ChoiceDelta) -> list[TokenLogprob]:
        """The tokens to report together with `delta.text`."""
        for token in delta.logprobs:
            self._pending.append((self._bytes_seen, token))
            self._bytes_seen += len(self._codec.token_bytes(token.token_id))
        self._bytes_released += len(delta.text.encode())
        if delta.finish_reason is not None and delta.stop_string is None:
            ready, self._pending = [token for _, token in self._pending], []
            return ready
        ready = [token for start, token in self._pending if start < self._bytes_released]
        del self._pending[: len(ready)]
        return ready


class TextOffsets:
    """Character offsets of successive tokens in the text that they spell."""

    def __init__(self, codec: TextCodec, start: int = 0) -> None:
        self._codec = codec
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._chars = start

    def take(self, token_id: int) -> int:
        """The offset of the next token."""
        offset = self._chars
        self._chars += len(self._decoder.decode(self._codec.token_bytes(token_id)))
        return offset


def chat_logprobs(tokens: Sequence[TokenLogprob], codec: TextCodec) -> ChatLogprobs:
    """One entry per token, with the bytes it stands for."""
    return ChatLogprobs(content=[_chat_token(token, codec) for token in tokens], refusal=None)


def completion_logprobs(tokens: Sequence[TokenLogprob], codec: TextCodec, offsets: TextOffsets) -> CompletionLogprobs:
    """Four parallel lists; `offsets` goes on where the previous call stopped."""
    return CompletionLogprobs(
        tokens=[_spelled(token.token_id, codec) for token in tokens],
        token_logprobs=[_finite(token.logprob) for token in tokens],
        top_logprobs=[_top_by_text(token, codec) for token in tokens],
        text_offset=[offsets.take(token.token_id) for token in tokens],
    )


def _chat_token(token: TokenLogprob, codec: TextCodec) -> TokenLogprobBody:
    return TokenLogprobBody(
        token=codec.token_text(token.token_id),
        bytes=list(codec.token_bytes(token.token_id)),
        logprob=_finite(token.logprob),
        top_logprobs=[
            TopLogprobBody(token=codec.token_text(other), bytes=list(codec.token_bytes(other)), logprob=_finite(value))
            for other, value in token.top
        ],
    )


def _top_by_text(token: TokenLogprob, codec: TextCodec) -> dict[str, float]:
    """The top k and the chosen token; of several tokens with one text the most likely counts."""
    found: dict[str, float] = {}
    for token_id, value in (*token.top, (token.token_id, token.logprob)):
        found.setdefault(_spelled(token_id, codec), _finite(value))
    return found


def _spelled(token_id: int, codec: TextCodec) -> str:
    """The token's text; parts of characters, which would look alike, as bytes in OpenAI's notation."""
    spelled = codec.token_bytes(token_id)
    try:
        return spelled.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)


def _finite(value: float) -> float:
    return max(value, FLOOR)
