"""Collects every reason against an adapter, so that its owner can mend them all at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from lamina_lora.errors import AdapterRejected

__all__ = ["Report", "quoted"]


def quoted(value: object, limit: int = 120) -> str:
    """`value` for a message: printable ASCII, at most `limit` characters; it may come from a hostile file."""
    try:
        text = ascii(value)
    except RecursionError:
        return "(nested too deep to show)"
    return text if len(text) <= limit else text[: limit - 3] + "..."


class Report:
    """An ordered list of violations."""

    def __init__(self) -> None:
        self._violations: list[str] = []

    def add(self, violation: str) -> None:
        self._violations.append(violation)

    @contextmanager
    def absorb(self) -> Iterator[None]:
        """Takes over the violations of an AdapterRejected raised inside, and goes on after the block."""
        try:
            yield
        except AdapterRejected as rejected:
            self._violations.extend(rejected.violations)

    def __bool__(self) -> bool:
        return bool(self._violations)

    def raise_if_any(self) -> None:
        """Raises AdapterRejected with everything found so far, if anything was."""
        if self._violations:
            raise AdapterRejected(self._violations)
