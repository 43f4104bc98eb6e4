"""What to spill, and whether to load or recompute: pure functions of what is measured, and the measuring itself."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable
from dataclasses import dataclass
from enum import Enum
from itertools import islice
from typing import TypeVar

__all__ = ["LoadChoice", "Rate", "Split", "spill_candidates", "split"]

T = TypeVar("T")


def spill_candidates(
    oldest_first: Iterable[T],
    *,
    free: int,
    low_water: int,
    high_water: int,
    in_flight: Container[T] = (),
    safe: Container[T] = (),
) -> list[T]:
    """Which unheld blocks to copy down now, so that the next allocations find room without losing anything.

    oldest_first: blocks nobody holds whose contents can be found, next victim first (tail before head, so the copies
    keep prefixes closed). free: blocks without contents. in_flight: being copied down; safe: in a tier below already.

    Nothing as long as the next `low_water` allocations would lose nothing; else so many that the next `high_water`
    will not. Only that many blocks are looked at, whatever the length of the queue: O(high_water).
    """
    if not 0 <= low_water <= high_water:
        raise ValueError(f"water marks are 0 <= low <= high, not {low_water} and {high_water}")
    chosen: list[T] = []
    urgent = False
    for place, block in enumerate(islice(oldest_first, max(0, high_water - free)), start=free):
        if block in in_flight or block in safe:
            continue
        urgent = urgent or place < low_water
        chosen.append(block)
    return chosen if urgent else []


class LoadChoice(Enum):
    """Why a prefix that was found below is fetched, or is not."""

    LOAD = "load"  # all of it: faster than computing any
    SPLIT = "split"  # compute its head while its tail is loaded
    CHEAPER = "recompute_cheaper"  # all of it is computed sooner than the first block would arrive
    DEADLINE = "deadline"  # loading would be faster, but is not to be waited for so long
    NOTHING = "nothing"  # there are no blocks


@dataclass(frozen=True, slots=True)
class Split:
    """The first `compute_front` blocks are computed, the last `load_back` ones loaded meanwhile."""

    compute_front: int
    load_back: int
    reason: LoadChoice
    seconds: float  # until both are there, as far as the rates are right


def split(
    n_blocks: int,
    compute_seconds_per_block: float,
    load_seconds_per_block: float,
    *,
    queue_delay: float = 0.0,
    deadline: float = math.inf,
) -> Split:
    """The k that minimises max(compute k blocks, load n - k blocks), in Cake's way (ICML '25): from both ends.

    queue_delay: seconds before the first block would be loaded. deadline: the longest that loading may take; what
    cannot be there by then is computed. Equal times: the more is loaded, since that leaves the device to others.
    Raises ValueError for rates that are not positive numbers.
    """
    for seconds in (compute_seconds_per_block, load_seconds_per_block):
        if not (seconds > 0 and math.isfinite(seconds)):
            raise ValueError(f"seconds per block are positive numbers, not {seconds}")
    if n_blocks < 0 or not queue_delay >= 0 or math.isnan(deadline):
        raise ValueError(f"not a choice: {n_blocks} blocks, {queue_delay} s of delay, {deadline} s of deadline")
    if n_blocks == 0:
        return Split(0, 0, LoadChoice.NOTHING, 0.0)

    def seconds_of(compute: int) -> float:
        loading = queue_delay + (n_blocks - compute) * load_seconds_per_block if compute < n_blocks else 0.0
        return max(compute * compute_seconds_per_block, loading)

    crossing = (queue_delay + n_blocks * load_seconds_per_block) / (compute_seconds_per_block + load_seconds_per_block)
    near = int(min(crossing, n_blocks))
    best = min({max(0, near - 1), near, min(n_blocks, near + 1), n_blocks}, key=lambda k: (seconds_of(k), k))
    in_time = (
        min(math.floor(max(0.0, (deadline - queue_delay) / load_seconds_per_block)), n_blocks)
        if math.isfinite(deadline)
        else n_blocks
    )
    compute = max(best, n_blocks - in_time)
    if compute == 0:
        reason = LoadChoice.LOAD
    elif compute < n_blocks:
        reason = LoadChoice.SPLIT
    else:
        reason = LoadChoice.CHEAPER if best == n_blocks else LoadChoice.DEADLINE
    return Split(compute, n_blocks - compute, reason, seconds_of(compute))


class Rate:
    """Seconds per unit, measured: an average that forgets with a half-life counted in units, not in time.

    Counting units makes one large transfer weigh as much as many small ones of the same size together. Before
    anything was measured it is what the constructor was told, and that counts for `prior_units`.
    """

    __slots__ = ("_keep", "_seconds", "_units", "count")

    def __init__(self, *, prior: float, prior_units: float = 1.0, half_life: float = 1000.0) -> None:
        """prior: seconds per unit, a first guess. half_life: in units. Raises ValueError."""
        if not (prior > 0 and prior_units > 0 and half_life > 0):
            raise ValueError(f"a rate starts from positive numbers, not {prior}, {prior_units}, {half_life}")
        self.count = 0  # observations; 0: all there is is the guess
        self._keep = math.log(2.0) / half_life
        self._units = prior_units
        self._seconds = prior * prior_units

    def observe(self, units: float, seconds: float) -> None:
        """`units` took `seconds`. Nothing measurable (no units, a negative or infinite time) is ignored."""
        if not (units > 0 and seconds >= 0 and math.isfinite(seconds)):
            return
        keep = math.exp(-self._keep * units)
        self._units = keep * self._units + units
        self._seconds = keep * self._seconds + max(seconds, 1e-12 * units)
        self.count += 1

    @property
    def seconds_per_unit(self) -> float:
        """Always positive."""
        return self._seconds / self._units
