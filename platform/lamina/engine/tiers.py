"""KV blocks below the device: spilled before they are evicted, promoted before the request that wants them starts.

    device pool ──spill──▶ host memory ──put──▶ store (Redis, ...)
                ◀─promote──            ◀─load──

Down (`tier_spill`, `tier_puts`): blocks that would be evicted next are copied, and stay where they are until somebody
needs the room; `tier_saves` adds those that stay for good. Up (`tier_fetch`): a *fetch* of one choice copies what it
lacks into newly allocated blocks and publishes them, so that the choice finds them as any cached prefix, when it starts
or when its computing gets there. Others run meanwhile.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain

from lamina.engine.host_commons import HostCommons
from lamina.engine.provenance import Provenance, Unasked
from lamina.engine.request import Choice, ChoiceStatus
from lamina.engine.store_memory import StoreMemory
from lamina.engine.tier_drain import Drain, StoreRoom
from lamina.engine.tier_fetch import Fetch, begin
from lamina.engine.tier_lift import LiftPaths
from lamina.engine.tier_protocol import Allocate, Below, TierStats
from lamina.engine.tier_puts import Puts
from lamina.engine.tier_quotas import require_nothing
from lamina.engine.tier_rates import Rates
from lamina.engine.tier_saves import Saves
from lamina.engine.tier_spill import Spills
from lamina_kernels.gpu.block_mover import BlockMover, HostBlocks
from lamina_kvtier.host_tier import HostTier
from lamina_kvtier.identity import BlockId
from lamina_kvtier.manager import KvManager
from lamina_kvtier.quota import Quota
from lamina_kvtier.reasons import Reason
from lamina_kvtier.tier import BlockKey, Operation, StoreTier, Tally, TierUsage

__all__ = ["KvTiers"]

# Seconds between looks of an idle engine: while bytes move to the tiers below, and else, for what a store may lose.
_BUSY_S, _QUIET_S = 0.25, 1.0
_AHEAD_PART = 4  # of the pool no more than this part is fetched for choices that wait


class KvTiers:
    """Host memory, and below it a store if there is one. Owned by the engine's thread."""

    def __init__(
        self,
        kv: KvManager,
        host: HostTier,
        arena: HostBlocks,
        mover: BlockMover,
        store: StoreTier | None = None,
        *,
        low_water: int,
        commons_of_host: HostCommons | None = None,
        provenance: Provenance | None = None,
        rates: Rates | None = None,
        memory: StoreMemory | None = None,
        clock: Callable[[], float] = time.monotonic,
        drain_s: float = 0.0,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        """`low_water`: free device blocks below which the next victims are spilled. `provenance` hears of fetches.

        `memory`: where it is noted what is in the store; it should remember more blocks than host memory has.
        `commons_of_host`: the quotas and pins of `host`; None: it is a store's working memory and no tier of its own.
        `drain_s`: seconds that `drain` may take. `sleep`: how it passes them.
        """
        self.commons_of_host = commons_of_host
        self._kv, self._host, self._arena, self._mover, self._store = kv, host, arena, mover, store
        self._provenance: Provenance = Unasked() if provenance is None else provenance
        self._clock, self._sleep, self._drain_s = clock, sleep, drain_s
        self._store_limits: dict[str, int] = {}  # bytes, by namespace
        self._forgetting: list[Operation[Tally]] = []  # what the store was told to drop
        self._counts: Counter[str] = Counter()
        rates = Rates(kv.block_size, clock=clock) if rates is None else rates
        self.store_memory = StoreMemory() if memory is None else memory
        self._paths = LiftPaths(kv, host, arena, mover, store, self._counts, rates, clock, self.store_memory)
        self._puts = Puts(kv, host, arena, store, self._counts, self.store_memory, clock)
        self._spills = Spills(kv, host, mover, self._puts, self._counts, low_water=low_water)
        self._saves = Saves(kv, host, self._spills, self._puts, self.store_memory, commons_of_host, clock)
        self._fetches: dict[Choice, Fetch] = {}  # of choices that wait, and of running ones whose tail still comes
        self._seen: set[Choice] = set()  # waiting ones for which nothing was below when it was looked for ahead
        self._orphans: list[Fetch] = []  # of choices that left: their transfers have to end first

    @property
    def below(self) -> Below | None:
        return Below(self._host, self._arena, self._store)

    def report_to(self, provenance: Provenance) -> None:
        self._provenance = provenance

    # --- the scheduler's side -----------------------------------------------------------------------------

    def is_ready(self, choice: Choice) -> bool:
        fetch = self._fetches.get(choice) or self._begin(choice)
        if fetch is None:
            return True
        self._advance([fetch], copying=False)
        return fetch.is_ready()

    def look_ahead(self, choices: Iterable[Choice]) -> None:
        room = self._kv.num_blocks // _AHEAD_PART * self._arena.block_bytes
        room -= sum(fetch.bytes for fetch in self._fetches.values())
        for choice in choices:
            if room <= 0:
                return
            if choice not in self._fetches and choice not in self._seen:
                fetch = self._begin(choice)
                if fetch is None:
                    self._seen.add(choice)
                else:
                    room -= fetch.bytes

    def started(self, choice: Choice, allocate: Allocate, give_back: Callable[[int], object]) -> None:
        self._seen.discard(choice)
        if choice.request.cached_tokens is None:  # else it comes back, and finds its own
            self._found(choice, choice.known_ids(self._kv.block_size)[: len(choice.table)])
        fetch = self._fetches.get(choice)
        if fetch is not None:
            self._tell(fetch)
            fetch.started(allocate, give_back)
            if fetch.is_done:
                del self._fetches[choice]

    def computes_until(self, choice: Choice) -> int | None:
        fetch = self._fetches.get(choice)
        return None if fetch is None else fetch.computes_until()

    def took(self, choice: Choice, ids: Sequence[BlockId]) -> int:
        self._found(choice, ids)
        fetch = self._fetches.get(choice)
        return 0 if fetch is None else fetch.took(ids)

    def _found(self, choice: Choice, ids: Sequence[BlockId]) -> None:
        self._saves.found(choice.request.request.namespace, choice.request.arrival, ids)

    def gives_way(self, choice: Choice) -> None:
        self._spills.save_now(list(zip(choice.table, choice.chain.ids[: choice.published], strict=False)))

    def left(self, choice: Choice) -> None:
        self._seen.discard(choice)
        fetch = self._fetches.pop(choice, None)
        if fetch is not None:
            fetch.abandon()
            self._orphans.append(fetch)

    def give_back(self) -> bool:
        waiting = [fetch for fetch in self._fetches.values() if fetch.choice.status is ChoiceStatus.WAITING]
        return sum(fetch.let_go() for fetch in waiting) > 0  # all of them, so not `any`

    def _begin(self, choice: Choice) -> Fetch | None:
        fetch = begin(self._paths, choice)
        if fetch is not None:
            self._fetches[choice] = fetch
        return fetch

    def _advance(self, fetches: Sequence[Fetch], *, copying: bool) -> None:
        for fetch in fetches:
            fetch.advance()
        if fetches:
            self._paths.start_waiting(self._spills.reading, copying=copying)
        for fetch in fetches:
            fetch.advance()  # what was so quick need not wait for the next step

    def _tell(self, fetch: Fetch) -> None:
        origins, fates = fetch.news()
        if origins or fates:
            self._provenance.arrived(fetch.choice, origins, fates)

    # --- the step's side ----------------------------------------------------------------------------------

    def settle(self) -> None:
        """Takes in what has ended since the last call."""
        self._spills.settle()
        self._puts.settle()
        self._advance([*self._fetches.values(), *self._orphans], copying=True)
        for choice, fetch in list(self._fetches.items()):
            if choice.status is ChoiceStatus.RUNNING:
                self._go_on(choice, fetch)
        for fetch in self._orphans:
            if fetch.is_done:
                fetch.let_go()
        self._orphans = [fetch for fetch in self._orphans if not fetch.is_done]
        self._saves.kept()
        self._saves.hot()

    def _go_on(self, choice: Choice, fetch: Fetch) -> None:
        """Of a running choice: lets go of what it has computed itself, and of all of it once its prompt is done."""
        self._tell(fetch)
        fetch.passed(choice.computed // self._kv.block_size)
        if choice.pending <= 1:
            self.left(choice)
        elif fetch.is_done and not any(fetch.tables):
            del self._fetches[choice]

    def before_step(self, written: Iterable[int]) -> None:
        """Lets the step wait for spills of blocks that it overwrites, on the device if there is one."""
        self._spills.before_step(written)

    def after_step(self, tokens: int, seconds: float) -> None:
        """Notes how fast steps compute, and spills ahead of need."""
        self._paths.rates.computed(tokens, seconds)
        self._saves.kept()
        self._spills.after_step()

    def save_pins(self, pinned: Callable[[], Iterable[BlockId]]) -> None:
        """See TiersBelow."""
        self._saves.keep(pinned)

    def idle(self) -> float | None:
        """Nobody may ask for hours: what is on its way down arrives, and the store gets back what it lost."""
        self.settle()
        self._spills.after_step()
        if self._orphans or self._spills.reading or self._puts.is_busy:
            return _BUSY_S
        return None if self._store is None else _QUIET_S

    def forget(self, ids: Sequence[BlockId]) -> None:
        """In every tier."""
        self._host.forget(ids, Reason.INTEGRITY)
        if self._store is not None:
            self._store.delete(ids)
            self.store_memory.missed(ids)

    @property
    def is_busy(self) -> bool:
        """Whether a choice waits for blocks that are on their way."""
        return bool(self._fetches)

    # --- quotas -------------------------------------------------------------------------------------------

    def set_store_quotas(self, quotas: Mapping[str, Quota]) -> None:
        """See TiersBelow."""
        if self._store is None:
            require_nothing(quotas)
        else:
            self._store.set_quotas(quotas)
            self._store_limits = {name: quota.limit for name, quota in quotas.items()}

    def store_usage(self) -> TierUsage | None:
        """See TiersBelow."""
        return None if self._store is None else self._store.usage()

    # --- deletions ----------------------------------------------------------------------------------------

    def forget_where(self, wanted: Callable[[BlockKey], bool]) -> None:
        """See TiersBelow."""
        self._host.forget_where(wanted, Reason.DELETED)

    def forget_in_store(self, namespace: str) -> None:
        """See TiersBelow. Nobody waits for it: what is left of it, if the store is away, ages out there."""
        if self._store is not None:
            going = [operation for operation in self._forgetting if not operation.done()]
            self._forgetting = [*going, self._store.forget(namespace)]

    def moves(self, wanted: Callable[[BlockKey], bool]) -> bool:
        """See TiersBelow."""
        fetches = [*self._fetches.values(), *self._orphans]
        rising = (key for fetch in fetches for key in fetch.keys[:1])  # all keys of one fetch are of one request
        return any(map(wanted, chain(rising, self._spills.keys_under_way(), self._puts.keys_under_way())))

    # --- reports ------------------------------------------------------------------------------------------

    def stats(self) -> TierStats:
        usage = self._host.usage()
        return TierStats(
            host_total=usage.total,
            host_used=usage.total - usage.free,
            **{name: self._counts[name] for name in ("spilled", "promoted", "stored", "loaded", "declined", "failed")},
        )

    def held_tables(self) -> list[list[int]]:
        return [table for fetch in [*self._fetches.values(), *self._orphans] for table in fetch.tables]

    def check_integrity(self) -> None:
        """Raises IntegrityError unless host memory's books agree."""
        if self.commons_of_host is None:
            self._host.check_integrity()
        else:
            self.commons_of_host.check_integrity()

    def drain(self, tend: Callable[[], object]) -> None:
        """See Tiers."""
        if self._store is None or not self._drain_s:
            return
        room = StoreRoom.of(self._store.usage(), self._store_limits, self._arena.block_bytes)
        drain = Drain(
            self._kv,
            self._host,
            self._spills,
            self._puts,
            self.store_memory,
            pinned=self._saves.pinned(),
            room=room,
        )

        def settle() -> bool:
            self.settle()
            tend()
            self._forgetting = [operation for operation in self._forgetting if not operation.done()]
            return bool(self._forgetting)

        drain.run(
            settle,
            lambda: self._counts["stored"],
            seconds=self._drain_s,
            clock=self._clock,
            sleep=self._sleep,
        )

    def close(self) -> None:
        """Ends the store; nothing may be called afterwards."""
        if self._store is not None:
            self._store.close()
