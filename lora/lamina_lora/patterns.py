"""Regular expressions from strangers: PEFT's configuration is full of them, and one can be made to run for years.

They are compiled with `re`, as PEFT does, to know that they are valid, and matched with `regex`, whose matching
accepts a time limit.
"""

from __future__ import annotations

import re
import time
import warnings
from functools import lru_cache

import regex

__all__ = ["MATCH_SECONDS", "MAX_PATTERN", "Matcher", "PatternTooSlow", "check_pattern", "is_plain"]

MAX_PATTERN = 2000
"""Characters."""
MATCH_SECONDS = 2.0
"""Time for all matching of one adapter; harmless patterns need milliseconds."""

_PLAIN = re.compile(r"[\w.]*", re.ASCII)
_TAIL = r"(.*\.)?({})$"
_LAYER = r"(?:^|.*?\.){}\.(?P<idx>\d+)\..*"
_ANY_LAYER = r".*?\.[^.]*\.(?P<idx>\d+)\..*"


class PatternTooSlow(Exception):
    """Matching the adapter's patterns took longer than MATCH_SECONDS."""


def is_plain(pattern: str) -> bool:
    """Whether it is a name, where only the dot means more than itself: valid, cheap and safe anywhere."""
    return len(pattern) <= MAX_PATTERN and _PLAIN.fullmatch(pattern) is not None


def check_pattern(pattern: str) -> str | None:
    """What is wrong with a pattern, or None. It must also be valid where PEFT embeds it in a longer one."""
    if is_plain(pattern):
        return None
    if len(pattern) > MAX_PATTERN:
        return f"is longer than {MAX_PATTERN} characters"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about ambiguous character sets, for the pattern's author
            for embedded in (pattern, _TAIL.format(pattern), _LAYER.format(pattern)):
                re.compile(embedded)
                regex.compile(embedded)
    except (re.error, regex.error, RecursionError, OverflowError, ValueError) as error:
        return f"is not a regular expression ({error})"
    return None


@lru_cache(maxsize=2048)
def _compiled(pattern: str) -> regex.Pattern[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return regex.compile(pattern)


class Matcher:
    """Matches module names within one time budget, which starts now."""

    def __init__(self, seconds: float = MATCH_SECONDS) -> None:
        self._deadline = time.monotonic() + seconds

    def full(self, pattern: str, name: str) -> bool:
        """PEFT's match of a `target_modules` string: the whole name."""
        return self._match(pattern, name) is not None

    def tail(self, pattern: str, name: str) -> bool:
        """PEFT's match of a `rank_pattern` key: the whole name, or what follows one of its dots."""
        return self._match(_TAIL.format(pattern), name) is not None

    def layer(self, pattern: str | None, name: str) -> int | None:
        """The layer number that PEFT reads from a module name; None if it finds none."""
        found = self._match(_ANY_LAYER if pattern is None else _LAYER.format(pattern), name)
        return int(found.group("idx")) if found else None

    def _match(self, pattern: str, name: str) -> regex.Match[str] | None:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise PatternTooSlow
        try:
            return _compiled(pattern).fullmatch(name, timeout=left, concurrent=True)  # without the GIL
        except TimeoutError as error:
            raise PatternTooSlow from error
