"""What one run of verifying goes through, batch by batch: listed once, when it begins. No tensors."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from lamina.errors import InvalidRequest
from lamina.types import VerifyOrder

__all__ = ["Batch", "Runs"]

T = TypeVar("T")

_OPEN = 4  # runs at once; the oldest is forgotten, which may be one that nobody goes on with
_PLACES = 1 << 32  # of one run; where it goes on is said in one number


@dataclass(frozen=True, slots=True)
class Batch(Generic[T]):
    """`total`: of the run. `following`: the `start` of the next batch; None: that was all."""

    wanted: Sequence[T]
    total: int
    following: int | None


class Runs(Generic[T]):
    """Over one tier. A batch costs what its own blocks cost, but for the first one, and for samples: those list all.

    What comes into the tier after a run began is not in it, and what has left by then is for the caller to notice.
    """

    def __init__(self, listing: Callable[[], Sequence[T]]) -> None:
        self._listing = listing
        self._open: dict[int, Sequence[T]] = {}  # by run, the oldest first
        self._last = 0

    def batch(self, order: VerifyOrder, count: int) -> Batch[T]:
        """At most `count`. Raises InvalidRequest if the run that the order goes on with is not known."""
        if order.seed is not None:
            everything = self._listing()
            dice = random.Random(order.seed)  # noqa: S311 - a sample, not a secret
            return Batch(dice.sample(everything, min(count, len(everything))), len(everything), None)
        run, everything, at = self._begun() if order.start == 0 else self._going_on(order.start)
        stop = at + count
        following = run * _PLACES + stop if stop < len(everything) else None
        if following is None:
            del self._open[run]
        return Batch(everything[at:stop], len(everything), following)

    def _begun(self) -> tuple[int, Sequence[T], int]:
        self._last += 1
        self._open[self._last] = everything = self._listing()
        if len(self._open) > _OPEN:
            del self._open[next(iter(self._open))]
        return self._last, everything, 0

    def _going_on(self, start: int) -> tuple[int, Sequence[T], int]:
        run, at = divmod(start, _PLACES)
        if run not in self._open:
            raise InvalidRequest(
                "This run of verifying cannot go on: the engine has restarted, or too many others have begun since. "
                "Start it again.",
                param="start",
            )
        return run, self._open[run], at
