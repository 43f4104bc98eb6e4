"""How fast blocks are computed and loaded, as measured lately, and what follows: load, compute, or both at once."""

from __future__ import annotations

import math
from collections.abc import Callable

from lamina_kvtier.policies import LoadChoice, Rate, Split, split

__all__ = ["Rates"]

_NO_PRIOR = 1e-9  # blocks: the first measurement outweighs the guess that a rate starts from
_WORTH_IT = 0.8  # of the time that loading alone takes: for less, the device is better left to others
_STALE_S = 10.0  # a store that was slow may have recovered: what is older than this is measured again
PATIENCE_S = 2.0  # how long a load is waited for while nobody knows how long computing takes


class Rates:
    """Of one engine. Seconds per block; unknown rates speak for loading, since only loading makes them known."""

    def __init__(self, block_size: int, *, clock: Callable[[], float]) -> None:
        self._block_size, self._clock = block_size, clock
        self._compute, self._load = _fresh(), _fresh()
        self._loaded_at = -math.inf  # when the last load ended
        self._probed_at = -math.inf

    def computed(self, tokens: int, seconds: float) -> None:
        """A step; those of few tokens say nothing about prefill."""
        if tokens >= 4 * self._block_size:
            self._compute.observe(tokens / self._block_size, seconds)

    def loaded(self, blocks: int, since: float) -> None:
        """Blocks that were asked for at the time `since` have come just now.

        Loads overlap: each is measured from the end of the one before, so that the rate is that of the path, not of a
        single transfer. After a while without loads the old rate is forgotten at once.
        """
        now = self._clock()
        if now - self._loaded_at > _STALE_S:
            self._load = _fresh()
        self._load.observe(blocks, now - max(since, self._loaded_at))
        self._loaded_at = now

    def seconds_to_compute(self, blocks: int) -> float | None:
        """None: nothing was measured yet."""
        return blocks * self._compute.seconds_per_unit if self._compute.count else None

    def patience(self, blocks: int) -> float:
        """Seconds to wait for a load of so many blocks: no longer than computing them takes, so that a store that
        turns out to be slow costs a request at most its own time once more."""
        seconds = self.seconds_to_compute(blocks)
        return PATIENCE_S if seconds is None else seconds

    def decide(self, blocks: int, *, blocks_before: float) -> Split:
        """For blocks that the store has. `blocks_before`: others' that are loaded first."""
        if not (blocks and self._compute.count and self._load.count):
            return Split(0, blocks, LoadChoice.LOAD if blocks else LoadChoice.NOTHING, 0.0)
        load, patience = self._load.seconds_per_unit, self.patience(blocks)
        both = split(blocks, self._compute.seconds_per_unit, load, queue_delay=blocks_before * load, deadline=patience)
        alone = (blocks_before + blocks) * load
        if both.reason is LoadChoice.SPLIT and alone <= patience and both.seconds > _WORTH_IT * alone:
            return Split(0, blocks, LoadChoice.LOAD, alone)
        return both

    def take_probe(self) -> bool:
        """Whether a few blocks should be loaded although computing is cheaper: now and then, or the rate that says so
        would never change."""
        now = self._clock()
        due = now - max(self._loaded_at, self._probed_at) > _STALE_S
        if due:
            self._probed_at = now
        return due


def _fresh() -> Rate:
    return Rate(prior=1.0, prior_units=_NO_PRIOR)
