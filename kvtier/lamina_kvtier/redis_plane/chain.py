"""Several batches, one after the other, as one operation with one deadline.

    def steps():
        yield Stage([ask_for_room], plane.ask)        # the next one starts when this has ended, whichever way
        yield Stage(stores, plane.move)
        return outcomes                               # the result

The generator runs on whatever thread ends a batch, so it only looks at replies and makes requests.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from lamina_kvtier.redis_plane.work import Batch, Request

__all__ = ["Chain", "Stage"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Stage:
    """At least one request, and where they are submitted.

    `optional`: not carried out any more after `cancel`. `grace_s`: how long it may take past the chain's deadline, for
    what has to be said of the stages before, however they ended.
    """

    requests: Sequence[Request]
    submit: Callable[[Batch[None]], None]
    optional: bool = True
    grace_s: float = 0.0


class Chain(Generic[T]):
    """An Operation. Starts at once."""

    __slots__ = ("_ended", "_result", "_stage", "_steps", "_withdrawable", "cancelled", "deadline")

    def __init__(self, steps: Callable[[Chain[T]], Generator[Stage, None, T]], deadline: float) -> None:
        """deadline: in seconds of time.monotonic(); of each batch but for its grace, so of the whole."""
        self.deadline = deadline
        self.cancelled = False
        self._ended = threading.Event()
        self._stage: Batch[None] | None = None
        self._result: T
        self._withdrawable = False
        self._steps = steps(self)
        self._advance()

    def done(self) -> bool:
        stage = self._stage
        if stage is not None:
            stage.done()  # it notices that its time is up when somebody asks
        return self._ended.is_set()

    def result(self, timeout: float | None = None) -> T:
        """Raises TimeoutError after `timeout` seconds; then it is still under way."""
        end = math.inf if timeout is None else time.monotonic() + timeout
        while not self._ended.is_set():
            stage = self._stage
            assert stage is not None
            left = None if end == math.inf else max(0.0, end - time.monotonic())
            stage.result(left)  # ends after the next stage was started, or the chain ended
        return self._result

    def cancel(self) -> None:
        """What is queued and optional is not carried out; what was begun is brought to an end."""
        self.cancelled = True
        stage = self._stage
        if stage is not None and self._withdrawable:
            stage.cancel()

    def _advance(self) -> None:
        try:
            stage = next(self._steps)
        except StopIteration as end:
            self._result = end.value
            self._ended.set()
            return
        batch = Batch(stage.requests, self.deadline + stage.grace_s, self._advance)
        self._withdrawable = stage.optional
        self._stage = batch
        stage.submit(batch)
        if self.cancelled and stage.optional:
            batch.cancel()
