"""From tokens to text as they come: whole characters only, and never a piece of a stop string.

Works on bytes rather than by decoding windows of tokens again: a token costs time proportional to its own
length, and what comes out never depends on how the tokens were grouped into pushes.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from lamina.engine.stop_strings import StopMatcher

__all__ = ["Speller", "TextDelta", "TextStream"]


class Speller(Protocol):
    """What a stream needs of a tokenizer (`lamina.models.tokenizer.Tokenizer` has it)."""

    def token_bytes(self, token_id: int) -> bytes: ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What one push released.

    `tokens_used` counts the pushed tokens up to and including the one that completed the stop string; all
    of them if none did.
    """

    text: str
    stopped: bool
    stop_string: str | None
    tokens_used: int


class TextStream:
    """The text of one choice. Not thread-safe.

    All text released, put together, is `tokenizer.decode` of all tokens, or its part before the stop
    string. The stop string that is complete first, counted in characters, ends the text; of those that
    end at the same character, the longest. Text that may be the beginning of one, and characters that are
    not complete, are held back.
    """

    def __init__(
        self,
        tokenizer: Speller,
        *,
        stop: Sequence[str] = (),
        include_stop_str: bool = False,
        skip_special_tokens: bool = True,
    ) -> None:
        """Raises InvalidRequest if a stop string is empty."""
        self._tokenizer = tokenizer
        self._matcher = StopMatcher(stop)
        self._include_stop_str = include_stop_str
        self._skip_special_tokens = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._started = False
        self._ended = False
        self._stop_string: str | None = None

    def push(self, token_ids: Sequence[int]) -> TextDelta:
        """Takes the next tokens. After a stop string, everything further is ignored (`tokens_used` 0)."""
        released: list[str] = []
        used = 0
        for token_id in token_ids:
            if self._ended:
                break
            used += 1
            released.append(self._release(self._utf8.decode(self._spell(token_id))))
        stopped = self._stop_string is not None
        return TextDelta("".join(released), stopped, self._stop_string, used)

    def finish(self) -> str:
        """Ends the stream and returns what was held back; nothing if a stop string ended it."""
        if self._ended:
            return ""
        text = self._release(self._utf8.decode(b"", final=True))
        if not self._ended:
            text += self._matcher.flush()
        self._ended = True
        return text

    def _release(self, text: str) -> str:
        found = self._matcher.feed(text)
        if found.stop is None:
            return found.text
        self._ended, self._stop_string = True, found.stop
        return found.text + found.stop if self._include_stop_str else found.text

    def _spell(self, token_id: int) -> bytes:
        spelled = self._tokenizer.token_bytes(token_id)
        if not spelled or (self._skip_special_tokens and self._is_special(token_id)):
            return b""
        if self._started:
            return spelled
        self._started = True
        return self._without_first_space(token_id, spelled)

    def _is_special(self, token_id: int) -> bool:
        if self._tokenizer.decode([token_id], skip_special_tokens=True):
            return False
        return self._tokenizer.decode([token_id], skip_special_tokens=False) != ""

    def _without_first_space(self, token_id: int, spelled: bytes) -> bytes:
        """SentencePiece-style decoders drop the space in front of a text, and only there."""
        rest = spelled.removeprefix(b" ")
        alone = self._tokenizer.decode([token_id], skip_special_tokens=False)
        return rest if alone == rest.decode("utf-8", errors="replace") else spelled
