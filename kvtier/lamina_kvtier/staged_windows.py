"""Blocks on their way between somebody else's memory and a server, and who is told how each of them fared.

    mover ──opens──▶ window ◀──settles── batch of the data plane, which the library asked for
      └──waits──────────┘

The library in between knows of success and failure of a whole task. A window knows each block's outcome and has one
deadline; at that it takes back what the server was not asked yet.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from lamina_kvtier.identity import BlockId
from lamina_kvtier.redis_plane import Batch
from lamina_kvtier.staged_moves import Move
from lamina_kvtier.tier import Outcome

__all__ = ["GRACE_S", "Register", "Window", "Windows", "places_of", "settler_of"]

GRACE_S = 0.25  # what a request that is under way at its deadline takes to end


class Window:
    """Some blocks on their way between the slab and the server, with one deadline."""

    def __init__(self, deadline: float, settle: Callable[[BlockId, Outcome], None]) -> None:
        self.deadline = deadline
        self.outcomes: dict[BlockId, Outcome] = {}
        self._settle = settle
        self._batches: list[Batch[None]] = []
        self._open: set[BlockId] = set()
        self._changed = threading.Condition()

    def expect(self, blocks: Iterable[BlockId]) -> None:
        """`wait` waits for these as well."""
        with self._changed:
            self._open |= set(blocks)

    def settle(self, block: BlockId, outcome: Outcome) -> None:
        """On any thread."""
        self._settle(block, outcome)
        with self._changed:
            self.outcomes[block] = outcome
            self._open.discard(block)
            self._changed.notify_all()

    def carried_by(self, batch: Batch[None]) -> None:
        """A batch by itself only ends once somebody looks at it after its deadline."""
        with self._changed:
            self._batches.append(batch)
        if time.monotonic() >= self.deadline:
            batch.done()

    def wait(self) -> None:
        """Until each expected block has its outcome, or the deadline passed and they were given up."""
        if not self._wait(self.deadline - time.monotonic()):
            self.remind()
            self._wait(GRACE_S)

    def remind(self) -> None:
        """The deadline has passed: takes back what the server was not asked yet."""
        with self._changed:
            batches = list(self._batches)
        for batch in batches:
            batch.done()

    def _wait(self, timeout: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: not self._open, max(0.0, timeout))


class Register:
    """Which window waits for blocks, in one direction. Tasks come from the library's threads and name blocks only."""

    def __init__(self) -> None:
        self._window: Window | None = None  # one at a time: there is one mover for each direction

    @contextmanager
    def open(self, deadline: float, settle: Callable[[BlockId, Outcome], None]) -> Iterator[Window]:
        self._window = window = Window(deadline, settle)
        try:
            yield window
        finally:
            self._window = None

    @property
    def current(self) -> Window:
        """Nobody waits any more: a window of no time and no interest."""
        return self._window or Window(time.monotonic(), lambda block, outcome: None)


class Windows:
    """Both directions'."""

    def __init__(self) -> None:
        self.storing, self.loading = Register(), Register()


def places_of(move: Move, blocks: range) -> dict[BlockId, list[int]]:
    """Where in the move each block of the window is: a block may be named twice, and is moved once."""
    places: dict[BlockId, list[int]] = {}
    for at in blocks:
        places.setdefault(move.ids[at], []).append(at)
    return places


def settler_of(move: Move, places: Mapping[BlockId, Sequence[int]]) -> Callable[[BlockId, Outcome], None]:
    """Tells the move how a block fared, wherever it is named."""

    def settle(block: BlockId, outcome: Outcome) -> None:
        for at in places.get(block, ()):  # what comes late may be of a window before
            move.settle(at, outcome)

    return settle
