"""Lengths of time as people write them: 90d, 12h, 30m, 45s."""

from __future__ import annotations

import re
from datetime import timedelta

from lamina.errors import InvalidRequest

__all__ = ["parse_duration"]

_DURATION = re.compile(r"([0-9]{1,6})([smhd])", re.ASCII)
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}


def parse_duration(text: str, *, param: str) -> timedelta:
    """Raises InvalidRequest, naming the option."""
    match = _DURATION.fullmatch(text)
    if match is None:
        raise InvalidRequest(
            f"--{param} {text!r} is no duration; write up to 6 digits and one of s, m, h, d, for example 90d.",
            param=param,
        )
    return timedelta(**{_UNITS[match[2]]: int(match[1])})
