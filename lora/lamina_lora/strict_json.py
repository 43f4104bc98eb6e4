"""JSON from strangers: one object, no duplicate keys, no NaN, bounded depth; every failure is a ValueError."""

from __future__ import annotations

import json
from typing import Any, NoReturn

__all__ = ["parse_object"]


def parse_object(data: bytes) -> dict[str, Any]:
    """Parses UTF-8 JSON whose top level is an object.

    ValueError says what is wrong: not UTF-8, not JSON, not an object, a key given twice, NaN or Infinity,
    nested too deep.
    """
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not UTF-8 (byte {error.start})") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON ({error.msg} at character {error.pos})") from error
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error
    if not isinstance(value, dict):
        raise ValueError("it is not a JSON object")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {ascii(twice)[:120]} is given twice")
    return found


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")
