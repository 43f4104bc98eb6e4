"""Amounts of memory as people write them: 512MiB, 4GiB, 1.5GB, 4096."""

from __future__ import annotations

import re
from fractions import Fraction

from lamina.errors import InvalidRequest

__all__ = ["parse_size", "size"]

_SIZE = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,6})?) ?([kmgt]?)(i?)(b?)", re.ASCII | re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_UNITS = ("KiB", "MiB", "GiB", "TiB")


def parse_size(text: str, *, option: str) -> int:
    """Bytes. KB, MB and GB are powers of 1000; KiB, MiB and GiB (K, M and G, too) of 1024. Raises InvalidRequest."""
    match = _SIZE.fullmatch(text.strip())
    if match is None or (match[3] and not match[2]):
        raise InvalidRequest(
            f"{option} {text!r} is no size; write a number and a unit, for example 512MiB or 4GiB.", param=option
        )
    number, prefix, binary, byte = match[1], match[2].lower(), match[3], match[4]
    base = 1000 if byte and not binary else 1024
    return int(Fraction(number) * base ** _POWERS[prefix])


def size(number: int) -> str:
    """For people: exact if that is short, else to three digits, or four."""
    scaled, unit = float(number), "B"
    for larger in _UNITS:
        if scaled < 1024:
            break
        scaled, unit = scaled / 1024, larger
    digits = 3 if scaled < 1000 and scaled != int(scaled) else 4  # 1023.75 has four before the point
    return f"{scaled:.{digits}g} {unit}"
