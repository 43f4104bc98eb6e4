"""A store that is as bad as stores can be, on purpose and repeatably: wraps any StoreTier, for tests.

It keeps the protocol: whatever it does to a block is an Outcome, as if the wrapped tier had found out. What it never
does is call a damaged block OK. Destinations of failed blocks are overwritten with noise, so that whoever reads what
is undefined does not find the right bytes there by luck.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

from lamina_kvtier.identity import BlockId
from lamina_kvtier.operations import Ended
from lamina_kvtier.quota import Quota
from lamina_kvtier.tier import BlockKey, Operation, Outcome, StoreTier, Tally, TierUsage

__all__ = ["Fault", "FaultTier", "Faults"]

T = TypeVar("T")


class Fault(Enum):
    """What can happen. The first four happen to a block that is loaded, the others to an operation."""

    VANISHED = "vanished"  # there at the look-up, missing when loaded
    TRUNCATED = "truncated"
    FLIPPED = "flipped"  # one bit
    WRONG_LAYOUT = "wrong_layout"
    DISCONNECTED = "disconnected"  # from one of its blocks on
    SLOW = "slow"


_OUTCOMES = {
    Fault.VANISHED: Outcome.MISSING,
    Fault.TRUNCATED: Outcome.CORRUPT,
    Fault.FLIPPED: Outcome.CORRUPT,
    Fault.WRONG_LAYOUT: Outcome.WRONG_LAYOUT,
    Fault.DISCONNECTED: Outcome.UNAVAILABLE,
    Fault.SLOW: Outcome.TIMEOUT,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """How likely each is, by block or operation. Raises ValueError."""

    vanished: float = 0.0
    truncated: float = 0.0
    flipped: float = 0.0
    wrong_layout: float = 0.0
    disconnected: float = 0.0
    slow: float = 0.0
    slow_s: float = 1.0  # by how much a slow operation ends later
    deadline_s: float = 5.0  # a slower one ends then, and all its blocks are TIMEOUT

    def __post_init__(self) -> None:
        by_block = [self.vanished, self.truncated, self.flipped, self.wrong_layout]
        if not all(0 <= rate <= 1 for rate in (*by_block, self.disconnected, self.slow)) or sum(by_block) > 1:
            raise ValueError(f"rates are probabilities, and those of a block sum to 1 at most: {self}")


@dataclass(frozen=True, slots=True)
class _Plan:
    """What happens to an operation on `count` blocks: it reaches the first of them, and ends so much later."""

    reached: int
    delay_s: float
    timed_out: bool


class FaultTier:
    """A StoreTier. The same seed and the same calls in the same order give the same faults."""

    def __init__(
        self,
        inner: StoreTier,
        faults: Faults,
        *,
        seed: int,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.away = False  # set it: the store is gone, and every new operation UNAVAILABLE
        self.injected: Counter[Fault] = Counter()
        self._inner, self._faults, self._clock, self._sleep = inner, faults, clock, sleep
        self._random = random.Random(seed)  # noqa: S311 - dice, not secrets
        self._lock = threading.Lock()  # guards dice and counter
        self._closed = threading.Event()

    @property
    def name(self) -> str:
        return self._inner.name

    def put(self, keys: Sequence[BlockKey], values: Sequence[memoryview]) -> Operation[tuple[Outcome, ...]]:
        """See StoreTier. Of a disconnected operation only the first blocks are stored; a slow one may be complete."""
        if self.away:
            return Ended((Outcome.UNAVAILABLE,) * len(keys))
        plan = self._draw_plan(len(keys))
        lost = len(keys) - plan.reached
        inner = self._inner.put(keys[: plan.reached], values[: len(values) - lost])

        def conclude(outcomes: tuple[Outcome, ...]) -> tuple[Outcome, ...]:
            if plan.timed_out:
                return (Outcome.TIMEOUT,) * len(keys)
            return (*outcomes, *[Outcome.UNAVAILABLE] * lost)

        return self._later(inner, plan, conclude)

    def load(
        self, ids: Sequence[BlockId], into: Sequence[memoryview], *, adapter: bytes | None = None
    ) -> Operation[tuple[Outcome, ...]]:
        """See StoreTier."""
        if self.away:
            return Ended((Outcome.UNAVAILABLE,) * len(ids))
        plan = self._draw_plan(len(ids))
        faults = [self._draw_fault() for _ in range(plan.reached)] + [Fault.DISCONNECTED] * (len(ids) - plan.reached)
        if plan.timed_out:
            faults = [Fault.SLOW] * len(ids)
        places = list(into)
        inner = self._inner.load(ids, into, adapter=adapter)
        return self._later(inner, plan, lambda fared: tuple(map(_spoil, fared, faults, places)))

    def lookup(self, ids: Sequence[BlockId]) -> Operation[Tally]:
        """See StoreTier."""
        return self._count(len(ids), lambda: self._inner.lookup(ids))

    def delete(self, ids: Sequence[BlockId]) -> Operation[Tally]:
        """See StoreTier."""
        return self._count(len(ids), lambda: self._inner.delete(ids))

    def set_quotas(self, quotas: Mapping[str, Quota], *, capacity: int | None = None) -> None:
        """See StoreTier. Faults strike blocks, not policy."""
        self._inner.set_quotas(quotas, capacity=capacity)

    def forget(self, namespace: str) -> Operation[Tally]:
        """See StoreTier."""
        return self._count(0, lambda: self._inner.forget(namespace))

    def usage(self) -> TierUsage:
        """The wrapped tier's: what it believes to have done."""
        return self._inner.usage()

    def close(self) -> None:
        """See StoreTier. What was slow has ended."""
        self._closed.set()
        self._inner.close()

    def _count(self, blocks: int, start: Callable[[], Operation[Tally]]) -> Operation[Tally]:
        if self.away:
            return Ended(Tally(0, Outcome.UNAVAILABLE))
        plan = self._draw_plan(blocks)

        def conclude(tally: Tally) -> Tally:
            if plan.timed_out:
                return Tally(0, Outcome.TIMEOUT)
            return tally if plan.reached == blocks else Tally(min(tally.blocks, plan.reached), Outcome.UNAVAILABLE)

        return self._later(start(), plan, conclude)

    def _later(self, inner: Operation[T], plan: _Plan, conclude: Callable[[T], T]) -> Operation[T]:
        ready_at = self._clock() + plan.delay_s
        return _Late(inner, lambda: 0.0 if self._closed.is_set() else ready_at - self._clock(), conclude, self._sleep)

    def _draw_plan(self, blocks: int) -> _Plan:
        with self._lock:
            dice, faults = self._random, self._faults
            slow, broken = dice.random() < faults.slow, dice.random() < faults.disconnected
            reached = dice.randrange(blocks) if broken and blocks else blocks
            self.injected[Fault.SLOW] += slow
            self.injected[Fault.DISCONNECTED] += reached < blocks
        delay_s = min(faults.slow_s, faults.deadline_s) if slow else 0.0
        return _Plan(reached, delay_s, timed_out=slow and faults.slow_s > faults.deadline_s)

    def _draw_fault(self) -> Fault | None:
        faults = self._faults
        rates = {
            Fault.VANISHED: faults.vanished,
            Fault.TRUNCATED: faults.truncated,
            Fault.FLIPPED: faults.flipped,
            Fault.WRONG_LAYOUT: faults.wrong_layout,
        }
        with self._lock:
            left = self._random.random()
            for fault, rate in rates.items():
                left -= rate
                if left < 0:
                    self.injected[fault] += 1
                    return fault
        return None


def _spoil(outcome: Outcome, fault: Fault | None, into: memoryview) -> Outcome:
    """The block's outcome with that fault; what was OK before is damaged as well."""
    if fault is None or outcome is not Outcome.OK:
        return outcome
    if fault is Fault.FLIPPED:
        into[len(into) // 3] ^= 1
    elif fault is Fault.TRUNCATED:
        into[len(into) // 2 :] = b"\xee" * (len(into) - len(into) // 2)
    else:
        into[:] = b"\xee" * len(into)
    return _OUTCOMES[fault]


class _Late(Generic[T]):
    """An operation that ends some time after another one has, with something else than that."""

    def __init__(
        self,
        inner: Operation[T],
        left_s: Callable[[], float],
        conclude: Callable[[T], T],
        sleep: Callable[[float], None],
    ) -> None:
        self._inner, self._left_s, self._conclude, self._sleep = inner, left_s, conclude, sleep
        self._lock = threading.Lock()
        self._concluded: list[T] = []

    def done(self) -> bool:
        with self._lock:
            if self._concluded:
                return True
            if not self._inner.done() or self._left_s() > 0:
                return False
            self._concluded.append(self._conclude(self._inner.result(0)))
            return True

    def result(self, timeout: float | None = None) -> T:
        self._inner.result(timeout)
        left_s = self._left_s()
        if timeout is not None and left_s > timeout:
            self._sleep(timeout)
            raise TimeoutError(f"The operation is still under way after {timeout} s.")
        while not self.done():
            self._sleep(max(0.0, self._left_s()))
        return self._concluded[0]

    def cancel(self) -> None:
        self._inner.cancel()
