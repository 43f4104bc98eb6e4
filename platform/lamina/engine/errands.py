"""Work for one caller that has to wait for a store: done in pieces between steps, so that no step waits for it."""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

__all__ = ["Errand", "Known"]

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Errand(Protocol[T_co]):
    """Under way since it was made."""

    def advance(self) -> T_co | None:
        """Goes on as far as it can without waiting; the answer once it is there. Raises what went wrong."""
        ...


class Known(Generic[T]):
    """An answer that is there at once."""

    def __init__(self, answer: T) -> None:
        self._answer = answer

    def advance(self) -> T:
        return self._answer
