"""Finds the first stop string in a text that comes in pieces, holding back no more than it must."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lamina.errors import InvalidRequest

__all__ = ["Found", "StopMatcher"]


@dataclass(frozen=True, slots=True)
class Found:
    """`text` is safe to show. With `stop`, it is all there is: the stop string came right after it."""

    text: str
    stop: str | None = None


class StopMatcher:
    """Knuth-Morris-Pratt over every stop string at once, so that each character is looked at once per string.

    Invariant between calls: `_held` is the longest end of the text so far that begins some stop string.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        """Raises InvalidRequest if a stop string is empty: it would match everywhere."""
        if not all(stop):
            raise InvalidRequest("Stop strings must not be empty; leave them out instead.", param="stop")
        self._patterns = [_Pattern(text) for text in sorted(set(stop), key=lambda text: (-len(text), text))]
        self._first_characters = {text[0] for text in stop}
        self._held = ""

    def feed(self, text: str) -> Found:
        """Takes the next piece; after a match the matcher must not be fed again."""
        if not self._held and self._first_characters.isdisjoint(text):
            return Found(text)
        window = self._held + text
        for at, character in enumerate(text, start=len(self._held) + 1):
            for pattern in self._patterns:  # longest first, so it wins among those that end here
                if pattern.advance(character):
                    return Found(window[: at - len(pattern.text)], pattern.text)
        hold = max(pattern.matched for pattern in self._patterns)
        self._held = window[len(window) - hold :]
        return Found(window[: len(window) - hold])

    def flush(self) -> str:
        """The text held back, once no more is to come."""
        held, self._held = self._held, ""
        return held


class _Pattern:
    """One stop string and how many of its characters the text so far ends with."""

    __slots__ = ("_fallback", "matched", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        self._fallback = _fallbacks(text)

    def advance(self, character: str) -> bool:
        """Takes one character; True if it completes the stop string."""
        while self.matched and self.text[self.matched] != character:
            self.matched = self._fallback[self.matched]
        if self.text[self.matched] == character:
            self.matched += 1
        return self.matched == len(self.text)


def _fallbacks(text: str) -> list[int]:
    """For each n: the length of the longest proper beginning of text[:n] that is also its end."""
    lengths = [0, 0]
    for character in text[1:]:
        length = lengths[-1]
        while length and text[length] != character:
            length = lengths[length]
        lengths.append(length + 1 if text[length] == character else 0)
    return lengths
