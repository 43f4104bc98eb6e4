"""Reads fields of an untrusted JSON object, each with its type and bounds. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from lamina.errors import ConfigurationInvalid

__all__ = ["Fields"]

_MISSING: Any = object()


class Fields:
    """One JSON object. Every reader raises ConfigurationInvalid that names the field, the value and what is allowed.

    A field that is absent or null counts as not given: it takes `default`, or is refused if there is none.
    """

    def __init__(self, values: Mapping[str, Any], source: str) -> None:
        self._values = values
        self._source = source

    def has(self, name: str) -> bool:
        """Whether the key exists, even with null."""
        return name in self._values

    def raw(self, name: str) -> Any:
        """The value as JSON gave it, None if absent: for a caller that checks it itself."""
        return self._values.get(name)

    def integer(self, name: str, *, low: int = 1, high: int, default: Any = _MISSING) -> int:
        value = self._given(name, default)
        if value is default:
            return value  # type: ignore[no-any-return]
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.invalid(name, f"must be an integer from {low} to {high}")
        return value

    def number(self, name: str, *, low: float, high: float, default: Any = _MISSING) -> float:
        """A finite number, low <= value <= high."""
        value = self._given(name, default)
        if value is default:
            return value  # type: ignore[no-any-return]
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.invalid(name, f"must be a number from {low:g} to {high:g}")
        if not math.isfinite(value) or not low <= value <= high:
            raise self.invalid(name, f"must be a number from {low:g} to {high:g}")
        return float(value)

    def boolean(self, name: str, *, default: bool) -> bool:
        value = self._given(name, default)
        if not isinstance(value, bool):
            raise self.invalid(name, "must be true or false")
        return value

    def text(self, name: str, *, default: Any = _MISSING) -> str:
        value = self._given(name, default)
        if value is default:
            return value  # type: ignore[no-any-return]
        if not isinstance(value, str):
            raise self.invalid(name, "must be a string")
        return value

    def texts(self, name: str) -> tuple[str, ...] | None:
        """A list of strings; None if not given."""
        value = self._values.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.invalid(name, "must be a list of strings")
        return tuple(value)

    def object(self, name: str) -> Fields | None:
        """A nested object; None if not given."""
        value = self._values.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.invalid(name, "must be an object")
        return Fields(value, f"{self._source}: {name}")

    def names(self) -> frozenset[str]:
        return frozenset(self._values)

    def invalid(self, name: str, rule: str) -> ConfigurationInvalid:
        """The error for a value that breaks `rule`."""
        shown = repr(self._values.get(name))
        shown = shown if len(shown) <= 80 else shown[:77] + "..."
        return ConfigurationInvalid(f"{self._source}: {name} {rule}, not {shown}.", param=name)

    def _given(self, name: str, default: Any) -> Any:
        value = self._values.get(name)
        if value is not None:
            return value
        if default is _MISSING:
            raise ConfigurationInvalid(
                f"{self._source}: {name} is missing; every model of this kind has it.", param=name
            )
        return default
