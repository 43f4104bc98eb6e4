"""Whether what the tiers hold is what was put there: books, seals in host memory, stored values. In batches."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from lamina.engine.errands import Errand, Known
from lamina.errors import InvalidRequest
from lamina.types import VerifyOrder, VerifyReport
from lamina_kvtier.errors import IntegrityError
from lamina_kvtier.identity import BlockId
from lamina_kvtier.manager import KvManager
from lamina_kvtier.tier import Operation, Outcome, StoreTier

if TYPE_CHECKING:  # it loads torch, which the engine's twin does without
    from lamina.engine.tiers import Below

__all__ = ["Verifier"]

_T = TypeVar("_T")
_SCRATCH_BYTES = 64 << 20  # that one batch of stored values is read into
_BROKEN = frozenset({Outcome.CORRUPT, Outcome.WRONG_LAYOUT})


class Verifier:
    """Owned by the engine's thread; asked between steps."""

    def __init__(
        self,
        kv: KvManager,
        below: Below | None,
        check_integrity: Callable[[], None],
        in_store: Callable[[], Sequence[BlockId]],
    ) -> None:
        """`in_store`: blocks that were in the store lately; asked for are those, and what is in the tiers above."""
        self._kv, self._below, self._check_integrity, self._in_store = kv, below, check_integrity, in_store

    def verify(self, order: VerifyOrder) -> Errand[VerifyReport]:
        """Starts a batch. Raises InvalidRequest for a tier that there is not by name."""
        match order.tier:
            case "gpu":
                return Known(self._books())
            case "host":
                return Known(self._host(order))
            case "store":
                return self._store(order)
        raise InvalidRequest(f"There is no tier {order.tier!r}; it is gpu, host or store.", param="tier")

    def _books(self) -> VerifyReport:
        total = self._kv.num_blocks
        try:
            self._check_integrity()
        except IntegrityError as error:
            return VerifyReport(tier="gpu", total=total, checked=total, violations=error.violations)
        return VerifyReport(tier="gpu", total=total, checked=total)

    def _host(self, order: VerifyOrder) -> VerifyReport:
        if self._below is None:
            return VerifyReport(tier="host", total=0)
        host = self._below.host
        stored = host.stored()
        slots, following = _batch(stored, order, order.count)
        broken = host.broken(slots)
        named = [(slot, host.key_of(slot)) for slot in broken]
        return VerifyReport(
            tier="host",
            total=len(stored),
            checked=len(slots),
            violations=tuple(
                f"host: block {key.id.hex()[:12]} in slot {slot} is not what was written there"
                for slot, key in named
                if key is not None
            ),
            following=following,
        )

    def _store(self, order: VerifyOrder) -> Errand[VerifyReport]:
        if self._below is None or self._below.store is None:
            return Known(VerifyReport(tier="store", total=0))
        host = self._below.host
        known = [key.id for slot in host.stored() if (key := host.key_of(slot)) is not None]
        ids = sorted({*known, *self._kv.known(), *self._in_store()})
        room = max(1, _SCRATCH_BYTES // host.block_bytes)
        wanted, following = _batch(ids, order, min(order.count, room))
        return _StoreBatch(self._below.store, wanted, host.block_bytes, len(ids), following)


class _StoreBatch:
    """Loads blocks into memory of its own; the store's codec compares identity, layout, length and checksum."""

    def __init__(
        self, store: StoreTier, ids: Sequence[BlockId], block_bytes: int, total: int, following: int | None
    ) -> None:
        self._ids, self._total, self._following = ids, total, following
        scratch = memoryview(bytearray(len(ids) * block_bytes))
        views = [scratch[at * block_bytes : (at + 1) * block_bytes] for at in range(len(ids))]
        self._load: Operation[tuple[Outcome, ...]] = store.load(ids, views)

    def advance(self) -> VerifyReport | None:
        if not self._load.done():
            return None
        outcomes = self._load.result()
        broken = [(block, fate) for block, fate in zip(self._ids, outcomes, strict=True) if fate in _BROKEN]
        good = sum(fate is Outcome.OK for fate in outcomes)
        return VerifyReport(
            tier="store",
            total=self._total,
            checked=good + len(broken),
            absent=len(outcomes) - good - len(broken),
            violations=tuple(f"store: block {block.hex()[:12]} is {fate.value}" for block, fate in broken),
            following=self._following,
        )


def _batch(everything: Sequence[_T], order: VerifyOrder, count: int) -> tuple[Sequence[_T], int | None]:
    """What to check now, and where to go on."""
    if order.seed is not None:
        dice = random.Random(order.seed)  # noqa: S311 - a sample, not a secret
        return dice.sample(everything, min(count, len(everything))), None
    stop = order.start + count
    return everything[order.start : stop], stop if stop < len(everything) else None
