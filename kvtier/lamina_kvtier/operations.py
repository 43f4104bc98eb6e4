"""The two ways in which a tier's work ends: at once, or later on another thread."""

from __future__ import annotations

import threading
from typing import Generic, TypeVar

__all__ = ["Ended", "Promise"]

T = TypeVar("T")


class Ended(Generic[T]):
    """An operation that was over when it was asked for."""

    __slots__ = ("_result",)

    def __init__(self, result: T) -> None:
        self._result = result

    def done(self) -> bool:
        return True

    def result(self, timeout: float | None = None) -> T:
        return self._result

    def cancel(self) -> None:
        """Nothing is left to stop."""


class Promise(Generic[T]):
    """An operation that ends when its tier calls `fulfil`, once, on whatever thread. `cancelled` is a wish to it."""

    __slots__ = ("_ended", "_result", "cancelled")

    def __init__(self) -> None:
        self._ended = threading.Event()
        self.cancelled = False

    def fulfil(self, result: T) -> None:
        self._result = result
        self._ended.set()

    def done(self) -> bool:
        return self._ended.is_set()

    def result(self, timeout: float | None = None) -> T:
        if not self._ended.wait(timeout):
            raise TimeoutError(f"The operation is still under way after {timeout} s.")
        return self._result

    def cancel(self) -> None:
        self.cancelled = True
