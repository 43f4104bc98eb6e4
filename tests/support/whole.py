"""Everything below a simulated engine, under the hand of a test: when copies and the store's work happen, and how they
fare; with rules that are checked at the moment when they could be broken.

    copies      in the order of their lane, when somebody lets them or has to wait for them; or they fail
    the store   in any order, when somebody lets it; behind the fault tier, whose mood changes
    evictions   each is checked against a count of its own: who loses a block for whom, and what was reserved
    memory      whatever is free, or was handed out just now, is garbage
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from lamina.config import EngineConfig
from lamina.engine.pool import BlockPool
from lamina.engine.store_memory import StoreMemory
from lamina.engine.tier_rates import Rates
from lamina.engine.tiers import KvTiers
from lamina_kernels.gpu.block_mover import Transfer
from lamina_kvtier.block_codec import HEADER_BYTES
from lamina_kvtier.fault_tier import Faults
from lamina_kvtier.identity import BlockId, Layout
from lamina_kvtier.manager import KvManager
from lamina_kvtier.memory_tier import MemoryStore
from lamina_kvtier.reasons import Reason
from lamina_kvtier.reclaim import ReclaimOrder
from lamina_kvtier.tier import BlockKey
from support.fixed_rates import FixedRates, HandClock
from support.poison import LateLane, LateMover, LateTransfer, PoisonedBelow, PoisonedHost, PoisonedKv
from support.simulated import BLOCK, BLOCK_BYTES

__all__ = ["MOODS", "PACES", "VALUE_BYTES", "WatchedStore", "WholeBelow", "small_windows"]

VALUE_BYTES = BLOCK_BYTES + HEADER_BYTES  # what a block costs in the store

MOODS = {
    "sound": Faults(),
    "loses": Faults(vanished=0.5),
    "truncates": Faults(truncated=0.5),
    "flips": Faults(flipped=0.5),
    "of another layout": Faults(wrong_layout=0.5),
    "disconnects": Faults(disconnected=0.5),
    "is slow": Faults(slow=0.5, slow_s=3.0),
    "is too slow": Faults(slow=0.5, slow_s=8.0, deadline_s=5.0),
}
PACES: dict[str, tuple[float, float] | None] = {  # seconds to compute a block, and to load one
    "nothing measured": None,
    "loading is cheap": (2.0, 0.1),
    "both are alike": (1.0, 0.8),
    "computing is cheap": (0.1, 2.0),
}


def small_windows() -> Iterator[tuple[str, int]]:
    """Bounds of what is under way, by the place where they stand: so small that a few blocks fill them."""
    for name, blocks in (
        ("tier_fetch._LIFT_BYTES", 2),
        ("tier_lift._MAX_LOAD_BYTES", 4),
        ("tier_lift._MAX_COPY_BYTES", 4),
        ("tier_puts._PUT_BYTES", 2),
        ("tier_puts._MAX_PUT_BYTES", 8),
        ("tier_puts._MAX_QUEUED_BYTES", 8),
    ):
        yield f"lamina.engine.{name}", blocks * BLOCK_BYTES
    for name in ("tier_spill.SPILL_BATCH", "tier_saves.SPILL_BATCH"):
        yield f"lamina.engine.{name}", 4
    yield "lamina.engine.tier_spill._MAX_SPILLS", 2


# --- copies ---------------------------------------------------------------------------------------------------


class _HandLane(LateLane):
    """Nothing runs by itself, however often somebody looks."""

    failing = False  # what is submitted from now on

    def submit(self, work: Callable[[], None]) -> LateTransfer:
        transfer = LateTransfer(self, _break if self.failing else work, looks=1 << 60)
        self._waiting.append(transfer)
        return transfer

    def run(self, count: int) -> None:
        for transfer in self._waiting[:count]:
            self.run_until(transfer)

    @property
    def waiting(self) -> int:
        return len(self._waiting)


def _break() -> None:
    raise RuntimeError("a copy that fails on purpose")


class _WatchedMover(LateMover):
    """Knows what is under way, and refuses what its owner must not ask for."""

    rising: list[tuple[LateTransfer, frozenset[int], frozenset[int]]]  # (transfer, slots, blocks)
    falling: list[tuple[LateTransfer, frozenset[int]]]  # (transfer, slots)

    def run_late(self, spills: LateLane, promotions: LateLane) -> None:
        super().run_late(spills, promotions)
        self.rising, self.falling = [], []

    def spill(self, ids: Sequence[int], host_slots: Sequence[int]) -> Transfer:
        assert not self.targets() & set(ids), "a block is read that a promotion still writes"
        transfer = super().spill(ids, host_slots)
        assert isinstance(transfer, LateTransfer)
        self.falling.append((transfer, frozenset(host_slots)))
        return transfer

    def promote(self, host_slots: Sequence[int], ids: Sequence[int]) -> Transfer:
        assert not self.still_reads() & set(ids), "a promotion overwrites a block that a spill still reads"
        assert not self.destinations() & set(host_slots), "a slot is read that a spill still writes"
        transfer = super().promote(host_slots, ids)
        assert isinstance(transfer, LateTransfer)
        self.rising.append((transfer, frozenset(host_slots), frozenset(ids)))
        return transfer

    def targets(self) -> frozenset[int]:
        """Device blocks that are still to be written."""
        return frozenset[int]().union(*(blocks for transfer, _, blocks in self.rising if not transfer.has_run))

    def sources(self) -> frozenset[int]:
        """Slots that are still to be read."""
        return frozenset[int]().union(*(slots for transfer, slots, _ in self.rising if not transfer.has_run))

    def destinations(self) -> frozenset[int]:
        """Slots that are still to be written."""
        return frozenset[int]().union(*(slots for transfer, slots in self.falling if not transfer.has_run))


# --- evictions ------------------------------------------------------------------------------------------------


class _WatchedKv(PoisonedKv):
    """Nobody loses a block within its reservation for another one, nor one that is held or pinned, nor for nothing."""

    _for: str | None = None

    def _make_free(self, owned: ReclaimOrder, owner: str) -> None:
        self._for = owner
        super()._make_free(owned, owner)
        self._for = None

    def _evict(self, owned: ReclaimOrder, block: int, reason: str) -> None:
        loser = self.owner_of(block)
        assert loser is not None
        assert self._references[block] == 0, "a block that somebody holds is evicted"
        assert not self.is_pinned(block), "a pinned block is evicted"
        if owned.rules_apply and loser != self._for:
            used = sum(self.owner_of(other) == loser for other in range(self.num_blocks))
            assert used > owned.ledger.book.of(loser).reserved, f"{loser} loses what it reserved to {self._for}"
            assert reason == "over_share"
        super()._evict(owned, block, reason)


class _WatchedHost(PoisonedHost):
    """The same for slots; and to a hot prefix, which the device has, nobody loses what no store has."""

    _for: str | None = None
    _spare: Callable[[BlockId], bool] | None = None
    quotas: Callable[[str], int]  # reserved slots of a namespace, if policy is loaded

    def _take(self, key: BlockKey) -> int | None:
        self._for = key.namespace
        taken = super()._take(key)
        self._for = None
        return taken

    def _has_room_beside_others(self, namespace: str, spare: Callable[[BlockId], bool]) -> bool:
        self._for, self._spare = namespace, spare
        has_room = super()._has_room_beside_others(namespace, spare)
        self._for, self._spare = None, None
        return has_room

    def _evict(self, owner: str | None, reason: Reason) -> bool:
        if owner is not None and owner != self._for:
            used = sum(key is not None and key.namespace == owner for key in self._books.keys)
            assert used > self.quotas(owner), f"{owner} loses slots that it reserved to {self._for}"
            victim = self._books.victims.oldest(owner)
            if self._spare is not None and victim is not None:
                assert self._spare(self._books.key_at(victim).id), f"{owner} loses what nobody else has to {self._for}"
        return super()._evict(owner, reason)

    def slots_in_use(self) -> Counter[str]:
        """By namespace, counted anew."""
        return Counter(key.namespace for key in self._books.keys if key is not None)

    def is_held(self, slot: int) -> bool:
        return self._books.holds[slot] > 0

    def is_written(self, slot: int) -> bool:
        return slot in self._books.writing


class WatchedStore(MemoryStore):
    """The same for the values of a store; and it can be damaged."""

    def __init__(self, limit: int, *, ttl_s: float, clock: Callable[[], float]) -> None:
        super().__init__(limit, ttl_s=ttl_s, clock=clock)
        self._damage: dict[BlockId, bytes] = {}
        self._for: str | None = None

    def _make_room(self, namespace: str, size: int, base: int, victims: Counter[tuple[str, Reason]]) -> Reason | None:
        self._for = namespace
        refusal = super()._make_room(namespace, size, base, victims)
        self._for = None
        return refusal

    def _evict(self, namespace: str, base: int, reason: Reason, victims: Counter[tuple[str, Reason]]) -> bool:
        if self._for not in (None, namespace):
            used = sum(len(value.data) for value in self._values.values() if value.namespace == namespace)
            assert used > self._quota(namespace).reserved, f"{namespace} loses what it reserved to {self._for}"
        return super()._evict(namespace, base, reason, victims)

    def contents(self) -> dict[BlockId, tuple[str, bytes]]:
        """Who pays for each value, and its bytes."""
        return {identity: (value.namespace, value.data) for identity, value in self._values.items()}

    def flush(self) -> int:
        """Everything is gone, but not the rules."""
        return sum(map(self.delete, list(self._values)))

    def damage(self, place: int, change: Callable[[bytes], bytes]) -> None:
        """To one value: bits that flip, or ends that are missing."""
        identity = sorted(self._values)[place % len(self._values)]
        self.tamper(identity, change)
        self._damage[identity] = self._values[identity].data

    def is_damaged(self, identity: BlockId) -> bool:
        return identity in self._damage and self._values[identity].data == self._damage[identity]


# --- all of it ------------------------------------------------------------------------------------------------


class WholeBelow(PoisonedBelow):
    """Host memory under quotas and pins, and a store, below one simulated engine."""

    kv_class, host_class, mover_class = _WatchedKv, _WatchedHost, _WatchedMover
    late_mover: _WatchedMover
    kv: _WatchedKv
    slots: _WatchedHost
    tiers: KvTiers

    def __init__(self, clock: HandClock, store: WatchedStore, *, host: int, seed: int, pace: str, ttl_s: float) -> None:
        super().__init__(host=host, store=store, seed=seed, faults=MOODS["sound"], shared=True)
        self.clock, self.hand_clock = clock, clock
        self.memory = StoreMemory(ttl_s=ttl_s, clock=clock)
        self.rates = _pace(pace, clock)

    def __call__(self, config: EngineConfig, pool: BlockPool, kv: KvManager, layout: Layout) -> KvTiers:
        tiers = super().__call__(config, pool, kv, layout)
        assert isinstance(kv, _WatchedKv)
        assert tiers.below is not None
        assert isinstance(tiers.below.host, _WatchedHost)
        assert tiers.commons_of_host is not None
        book = tiers.commons_of_host.book
        self.kv, self.slots, self.tiers = kv, tiers.below.host, tiers
        self.slots.quotas = lambda name: book.of(name).reserved if book.loaded else -1
        return tiers

    def lane(self) -> _HandLane:
        return _HandLane(random.Random(0))

    @property
    def spills(self) -> _HandLane:
        return self._hand(0)

    @property
    def promotions(self) -> _HandLane:
        return self._hand(1)

    def _hand(self, which: int) -> _HandLane:
        lane = self.lanes[which]
        assert isinstance(lane, _HandLane)
        return lane

    def pass_time(self, seconds: float) -> None:
        """For everybody: store, tiers, pins."""
        self.hand_clock.now += seconds
        self.now += seconds  # the faulty store's

    def store_works(self, count: int, order: int) -> None:
        """It does some of what it was asked for, by dice `order`."""
        dice, waiting = random.Random(order), self.steps.waiting
        for _ in range(min(count, len(waiting))):
            waiting.rotate(-dice.randrange(len(waiting)))
            self.steps.run(1)

    def set_mood(self, mood: str) -> None:
        assert self.fault_tier is not None
        self.fault_tier.away = mood == "is away"
        self.fault_tier._faults = MOODS.get(mood, MOODS["sound"])

    def drain(self) -> None:
        """The engine is closed in order; copies and store go on as they are."""
        self.tiers._drain_s, self.tiers._sleep = 5.0, self._pause
        self.tiers.drain(lambda: None)

    def _pause(self, seconds: float) -> None:
        for lane in (self.spills, self.promotions):
            lane.run(lane.waiting)
        self.steps.run()
        self.pass_time(100 * seconds)  # 25 looks in all

    def all_ends(self) -> None:
        """Whatever is under way does, and well."""
        for lane in (self.spills, self.promotions):
            lane.failing = False
            lane.run(lane.waiting)
        self.steps.run()
        self.pass_time(10.0)  # later than the store's deadlines


def _pace(name: str, clock: HandClock) -> Rates:
    pace = PACES[name]
    if pace is None:
        return _Unmeasured(BLOCK, clock=clock)
    return FixedRates(compute_s=pace[0], load_s=pace[1], clock=clock)


class _Unmeasured(Rates):
    """Nobody knows how long anything takes."""

    def computed(self, tokens: int, seconds: float) -> None:
        """Ignored: it is the machine's time."""
