"""How long-running model work tells its caller how far it is."""

from __future__ import annotations

from typing import Protocol

__all__ = ["Progress", "silent"]


class Progress(Protocol):
    """Called often, from the working thread; must be quick and must not raise.

    `stage` is a short phrase for people ("download"); `done` and `total` are bytes, `total` 0 if unknown.
    """

    def __call__(self, stage: str, done: int, total: int) -> None: ...


def silent(stage: str, done: int, total: int) -> None:
    """The progress of a caller who does not want to know."""
