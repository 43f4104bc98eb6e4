"""Whether what the tiers hold is what was put there: books, seals in host memory, stored values. In batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lamina.engine.errands import Errand, Known
from lamina.engine.tier_protocol import Below
from lamina.engine.verify_runs import Batch, Runs
from lamina.errors import InvalidRequest
from lamina.types import VerifyOrder, VerifyReport
from lamina_kvtier.errors import IntegrityError
from lamina_kvtier.identity import BlockId
from lamina_kvtier.manager import KvManager
from lamina_kvtier.tier import Operation, Outcome, StoreTier

__all__ = ["Verifier"]

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
        self._host_runs, self._store_runs = Runs(self._in_host), Runs(self._maybe_in_store)

    def verify(self, order: VerifyOrder) -> Errand[VerifyReport]:
        """Starts a batch. Raises InvalidRequest for a tier that there is not by name, or a run that is not known."""
        match order.tier:
            case "gpu":
                return Known(self._books())
            case "host":
                return Known(self._host(order))
            case "store":
                return self._store(order)
        raise InvalidRequest(f"There is no tier {order.tier!r}; it is gpu, host or store.", param="tier")

    def _in_host(self) -> list[BlockId]:
        if self._below is None:
            return []
        host = self._below.host
        return [key.id for slot in host.stored() if (key := host.key_of(slot)) is not None]

    def _maybe_in_store(self) -> list[BlockId]:
        """Each once, in no order."""
        return list(dict.fromkeys([*self._in_host(), *self._kv.known(), *self._in_store()]))

    def _books(self) -> VerifyReport:
        """O(blocks), in one go: between two steps nothing changes."""
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
        batch = self._host_runs.batch(order, order.count)
        here = [slot for block in batch.wanted for slot in host.find([block])]
        named = [(slot, host.key_of(slot)) for slot in host.broken(here)]
        return VerifyReport(
            tier="host",
            total=batch.total,
            checked=len(here),
            absent=len(batch.wanted) - len(here),
            violations=tuple(
                f"host: block {key.id.hex()[:12]} in slot {slot} is not what was written there"
                for slot, key in named
                if key is not None
            ),
            following=batch.following,
        )

    def _store(self, order: VerifyOrder) -> Errand[VerifyReport]:
        if self._below is None or self._below.store is None:
            return Known(VerifyReport(tier="store", total=0))
        block_bytes = self._below.host.block_bytes
        room = max(1, _SCRATCH_BYTES // block_bytes)
        return _StoreBatch(self._below.store, self._store_runs.batch(order, min(order.count, room)), block_bytes)


class _StoreBatch:
    """Loads blocks into memory of its own; the store's codec compares identity, layout, length and checksum."""

    def __init__(self, store: StoreTier, batch: Batch[BlockId], block_bytes: int) -> None:
        self._batch = batch
        ids = batch.wanted
        scratch = memoryview(bytearray(len(ids) * block_bytes))
        views = [scratch[at * block_bytes : (at + 1) * block_bytes] for at in range(len(ids))]
        self._load: Operation[tuple[Outcome, ...]] = store.load(ids, views)

    def advance(self) -> VerifyReport | None:
        if not self._load.done():
            return None
        outcomes = self._load.result()
        broken = [(block, fate) for block, fate in zip(self._batch.wanted, outcomes, strict=True) if fate in _BROKEN]
        good = sum(fate is Outcome.OK for fate in outcomes)
        return VerifyReport(
            tier="store",
            total=self._batch.total,
            checked=good + len(broken),
            absent=len(outcomes) - good - len(broken),
            violations=tuple(f"store: block {block.hex()[:12]} is {fate.value}" for block, fate in broken),
            following=self._batch.following,
        )
