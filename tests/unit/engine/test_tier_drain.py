"""An engine that is closed in order saves what the next one will want: within its time, and only if a store stays."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from fixtures.engines import drive, identities, request, tiny_core
from lamina.engine.core import EngineCore
from lamina.engine.flight import Flight
from lamina.engine.tier_drain import StoreRoom
from lamina.types import PinOrder, QuotaPolicy, TierQuota
from lamina_kvtier.block_codec import BlockCodec
from lamina_kvtier.fault_tier import Faults, FaultTier
from lamina_kvtier.identity import BlockId
from lamina_kvtier.memory_tier import MemoryStore, MemoryTier, Steps
from lamina_kvtier.tier import BlockKey, Operation, Outcome, StoreTier, TierUsage
from support.ahead import AheadBackend
from support.below import Below
from support.fixed_rates import HandClock

ROOMY: dict[str, Any] = {"num_blocks": 60, "max_batch_tokens": 128}  # nothing is ever evicted
STORED = 4096 + 192  # bytes of a stored block of the tiny model


def prompt(seed: int, blocks: int = 4) -> list[int]:
    return [(7 * at + seed) % 200 + 3 for at in range(16 * blocks)]


def ask(core: EngineCore, token_ids: list[int], tenant: str = "t") -> int:
    before = core.stats().prefix_hit_tokens
    drive(core, [request(f"r{core._arrivals}", [*token_ids, 5, 9], tenant=tenant, max_tokens=4)])
    return core.stats().prefix_hit_tokens - before


class Closing:
    """Engines over one store whose time passes while they close, and only then."""

    def __init__(
        self,
        folder: Path,
        *,
        host: int = 64,
        limit: int | None = None,
        shared: bool = True,
        below: Callable[..., Below] = Below,
    ) -> None:
        self.store, self.clock, self.drain_s, self.naps = MemoryStore(limit=limit), HandClock(), 5.0, 0
        self.meanwhile: Callable[[], object] = lambda: None  # each time that an engine waits
        self.below = below(host=host, store=self.store, shared=shared)
        self.below.clock, self.below.drain_s, self.below.sleep = self.clock, self.drain_s, self.sleep
        self.folder = folder

    def engine(self, **options: Any) -> EngineCore:
        return tiny_core(self.folder, tiers=self.below, **(ROOMY | options))

    def sleep(self, seconds: float) -> None:
        """A copy is another thread's, and takes no time by this clock."""
        if self.below.made[-1]._spills.reading:
            time.sleep(0.0005)
        else:
            self.clock.now += seconds
        self.naps += 1
        self.meanwhile()

    def has(self, ids: list[BlockId]) -> list[bool]:
        return [self.store.has(identity) for identity in ids]


class SlowPuts(MemoryTier):
    """They wait until they are told to run."""

    def __init__(self, *args: Any, steps: Steps) -> None:
        super().__init__(*args)
        self._steps = steps

    def put(self, keys: Sequence[BlockKey], values: Sequence[memoryview]) -> Operation[tuple[Outcome, ...]]:
        self._run, at_once = self._steps, self._run
        operation = super().put(keys, values)
        self._run = at_once
        return operation


class Slow(Below):
    def __init__(self, *, host: int = 64, store: MemoryStore | None = None, shared: bool = False) -> None:
        super().__init__(host=host, store=store, shared=shared)
        self.steps = Steps()

    def store_tier(self, codec: BlockCodec) -> StoreTier | None:
        assert self.store is not None
        return SlowPuts(self.store, codec, steps=self.steps)


def slow(folder: Path, **options: Any) -> tuple[Closing, Steps]:
    closing = Closing(folder, below=Slow, **options)
    assert isinstance(closing.below, Slow)
    return closing, closing.below.steps


@pytest.mark.parametrize("shared", [True, False], ids=["host memory is a tier", "a store alone"])
def test_what_only_the_device_has_is_found_by_the_next_engine(tmp_path: Path, shared: bool) -> None:
    """Neither evicted nor hot nor pinned: one request found it, the last one before the restart."""
    closing = Closing(tmp_path, shared=shared)
    core = closing.engine()
    for tenant in ("a", "b"):
        ask(core, prompt(1), tenant)
    assert core.stats().stored_blocks == 0
    core.close()
    core = closing.engine()
    assert [ask(core, prompt(1), tenant) for tenant in ("a", "b", "stranger")] == [64, 64, 0]
    core.check_integrity()


def test_nothing_is_waited_for_where_all_is_there(tmp_path: Path) -> None:
    closing = Closing(tmp_path)
    core = closing.engine()
    ask(core, prompt(1))
    core.close()
    core, closing.naps = closing.engine(), 0
    assert ask(core, prompt(1)) == 64
    below = closing.below.made[-1]
    below.store_memory.note(core.scheduler.kv.known())
    core.close()
    assert closing.naps <= 1


def test_what_was_on_its_way_goes_on(tmp_path: Path) -> None:
    """Copies, puts and their queue, of requests that are cut off as well."""
    closing, steps = slow(tmp_path, host=24)
    core = closing.engine(num_blocks=14, max_batch_tokens=64)
    for seed in range(8):
        ask(core, prompt(seed))
    ids = [identity for seed in (3, 4, 5, 6, 7) for identity in identities(core, prompt(seed))]
    assert steps.waiting
    core.submit(request("cut off", prompt(9), max_tokens=20))
    for _ in range(6):
        core.step()
    ids += identities(core, prompt(9))
    assert core.has_work()
    assert not any(closing.has(ids))
    closing.meanwhile = steps.run
    core.close()
    assert all(closing.has(ids))
    closing.below.made[-1].check_integrity()


def test_pins_go_first_and_then_what_would_be_evicted_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as the time goes."""
    monkeypatch.setattr("lamina.engine.tier_puts._PUT_BYTES", 4096)
    closing, steps = slow(tmp_path)
    core = closing.engine()
    core.commons.set_quotas([QuotaPolicy(namespace="t", gpu=TierQuota(reserved=20, pin_limit=8))])
    for seed in (1, 2, 3):
        ask(core, prompt(seed))
    pinned, old, new = (identities(core, prompt(seed)) for seed in (1, 2, 3))
    core.commons.pin(PinOrder(namespace="t", token_ids=tuple(prompt(1, 2))))
    stored: list[BlockId] = []

    def one_by_one() -> None:
        while steps.waiting:
            steps.run(1)
            stored.extend(identity for identity in (*pinned, *old, *new) if closing.store.has(identity))

    closing.meanwhile = one_by_one
    core.close()
    order = list(dict.fromkeys(stored))
    assert order[:2] == pinned[:2]
    assert [identity for identity in order if identity in (*old, *new)] == [*new, *old]
    assert all(closing.has(pinned))


def test_it_ends_in_time_with_a_store_that_hangs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    closing, _ = slow(tmp_path)
    core, began = closing.engine(), closing.clock.now
    ask(core, prompt(1))
    core.close()
    assert closing.drain_s <= closing.clock.now - began < closing.drain_s + 0.1
    assert not closing.store.has(identities_of(closing)[0])
    assert said(caplog) == "saved 0 blocks to the store before the end, in 5.0 s; 4 are left: the time was up"


def identities_of(closing: Closing) -> list[BlockId]:
    return closing.below.made[-1]._kv.known()


def said(caplog: pytest.LogCaptureFixture) -> str:
    [record] = [record for record in caplog.records if record.name == "lamina.engine.tier_drain"]
    return record.getMessage()


class Failing(Below):
    """A store that is away from the start, or goes away while an engine closes."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.tier: FaultTier | None = None

    def store_tier(self, codec: BlockCodec) -> StoreTier | None:
        inner = super().store_tier(codec)
        assert inner is not None
        self.tier = FaultTier(inner, Faults(), seed=0)
        return self.tier


@pytest.mark.parametrize("after", [0, 5], ids=["down", "failing midway"])
def test_a_store_that_fails_ends_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr("lamina.engine.tier_puts._PUT_BYTES", 4096)
    closing = Closing(tmp_path, below=Failing)
    below = closing.below
    assert isinstance(below, Failing)
    core, began = closing.engine(), closing.clock.now
    ask(core, prompt(1, 12))
    ids = identities(core, prompt(1, 12))
    tier = below.tier
    assert tier is not None
    tier.away = after == 0

    def goes() -> None:
        assert tier is not None
        tier.away = sum(closing.has(ids)) >= after

    closing.meanwhile = goes
    core.close()
    assert sum(closing.has(ids)) == after
    assert closing.has(ids) == [at < after for at in range(12)], "a tail without its head"
    assert closing.clock.now - began < 0.1
    words = said(caplog)
    assert words.startswith(f"saved {after} blocks")
    assert words.endswith(f"{12 - after} are left: the store failed")


def test_without_time_or_store_nothing_happens(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    closing = Closing(tmp_path)
    closing.below.drain_s = 0.0
    core = closing.engine()
    ask(core, prompt(1))
    core.close()
    closing.below.drain_s, closing.below.store = 5.0, None
    core = closing.engine()
    ask(core, prompt(1))
    core.close()
    assert closing.naps == 0
    assert not any(closing.has(identities_of(closing)))
    assert not [record for record in caplog.records if record.name == "lamina.engine.tier_drain"]


def test_what_only_host_memory_has_comes_last(tmp_path: Path) -> None:
    """The queue of its tenant was full when it came there."""
    closing = Closing(tmp_path)
    core = closing.engine()
    ask(core, prompt(1))
    host = closing.below.made[-1]._host
    keys = [BlockKey(number.to_bytes(32, "big"), "b") for number in range(40)]
    for start in range(0, 40, 8):
        host.commit([room for room in host.reserve(keys[start : start + 8]) if room is not None])
    seen: list[tuple[int, int]] = []
    ids = identities(core, prompt(1))
    closing.meanwhile = lambda: seen.append((sum(closing.has(ids)), sum(closing.has([key.id for key in keys]))))
    core.close()
    assert seen[-1] == (4, 40)
    assert all(device == 4 for device, below in seen if below > 12), "more than what goes together with the device's"


def test_a_small_tier_of_host_memory_passes_all_of_a_large_pool(tmp_path: Path) -> None:
    """It is full of others' blocks, and a tenant may have two slots of it."""
    closing, steps = slow(tmp_path, host=8)
    core = closing.engine()
    core.commons.set_quotas([QuotaPolicy(namespace="t", host=TierQuota(limit=2 * core.info.block_bytes))])
    host = closing.below.made[-1]._host
    keys = [BlockKey(number.to_bytes(32, "big"), "b") for number in range(8)]
    host.commit([room for room in host.reserve(keys) if room is not None])
    ids: list[BlockId] = []
    for seed in range(6):
        ask(core, prompt(seed))
        ids += identities(core, prompt(seed))
    closing.meanwhile = steps.run
    core.close()
    assert all(closing.has(ids))
    assert closing.below.made[-1]._host.slots_of("t") <= 2


@pytest.mark.parametrize("limited", [True, False], ids=["the tenant's limit", "the store's size"])
def test_a_store_that_is_smaller_than_the_pool_gets_the_newest(tmp_path: Path, limited: bool) -> None:
    """And not what was used before that, because it came last."""
    closing = Closing(tmp_path, limit=1 << 20 if limited else 8 * STORED)
    core = closing.engine()
    policy = QuotaPolicy(namespace="t", store=TierQuota(limit=8 * STORED if limited else None))
    core.commons.set_quotas([policy])
    found = []
    for seed in range(6):
        ask(core, prompt(seed))
        found.append(identities(core, prompt(seed)))
    core.close()
    assert [sum(closing.has(ids)) for ids in found] == [0, 0, 0, 0, 4, 4]


def test_what_the_store_has_counts_as_well(tmp_path: Path) -> None:
    """A hot prompt was stored long ago and used last; what is saved beside it must not push it out."""
    closing = Closing(tmp_path, limit=1 << 20)
    core = closing.engine()
    core.commons.set_quotas([QuotaPolicy(namespace="t", store=TierQuota(limit=8 * STORED))])
    for _ in range(4):
        ask(core, prompt(1))
    hot = identities(core, prompt(1))
    for _ in range(2000):
        if core.stats().stored_blocks == 4:
            break
        core.idle()
        time.sleep(0.001)
    assert all(closing.has(hot))
    others = []
    for seed in (2, 3):
        ask(core, prompt(seed))
        others.append(identities(core, prompt(seed)))
    ask(core, prompt(1))
    core.close()
    assert all(closing.has(hot))
    assert [sum(closing.has(ids)) for ids in others] == [0, 4]


@pytest.mark.parametrize(
    ("usage", "total", "own"),
    [
        (TierUsage(0, None), None, 24),
        (TierUsage(0, 8 * STORED), 8, 24),
        (TierUsage(0, 8 * STORED, blocks=0), 8, 24),
        (TierUsage(0, 8 * STORED, blocks=5), 8, 24),
        (TierUsage(10 * 1072, 8 * STORED, blocks=10), 32, 96),
        (TierUsage(10 * 1072 - 1, 8 * STORED, blocks=10), 32, 96),
    ],
)
def test_room_is_in_blocks_as_they_are_stored(usage: TierUsage, total: int | None, own: int) -> None:
    assert StoreRoom.of(usage, {"t": 24 * STORED}, 4096) == StoreRoom(total, {"t": own})


@pytest.mark.parametrize("limit", [8, 24])
def test_host_memory_gets_what_the_device_leaves_of_a_limit(tmp_path: Path, limit: int) -> None:
    """Stored blocks have headers: where many fit, one less does than by the blocks' own size."""
    closing = Closing(tmp_path, limit=1 << 20)
    core = closing.engine()
    core.commons.set_quotas([QuotaPolicy(namespace="t", store=TierQuota(limit=limit * STORED))])
    found = []
    for seed in (1, 2):
        ask(core, prompt(seed))
        found += identities(core, prompt(seed))
    host = closing.below.made[-1]._host
    keys = [BlockKey(number.to_bytes(32, "big"), "t") for number in range(40)]
    for start in range(0, 40, 8):
        host.commit([room for room in host.reserve(keys[start : start + 8]) if room is not None])
    core.close()
    assert all(closing.has(found))
    newest = [key.id for key in [*keys[32:], *keys[24:32]]]
    assert sum(closing.has([key.id for key in keys])) == limit - 8
    assert all(closing.has(newest[: limit - 8]))


@pytest.mark.parametrize("answers", ["at once", "late"])
def test_what_is_erased_does_not_come_back_with_a_put_under_way(tmp_path: Path, answers: str) -> None:
    """The store is told once more, and waited for, when that put has ended."""
    closing, steps = slow(tmp_path, limit=1 << 20)
    core = closing.engine()
    core.commons.set_quotas([])
    for _ in range(4):
        ask(core, prompt(1), "gone")
    for _ in range(2000):
        if steps.waiting:
            break
        core.idle()
        time.sleep(0.001)
    ids = identities(core, prompt(1), "gone")
    ask(core, prompt(2), "stays")
    stays = identities(core, prompt(2), "stays")
    assert steps.waiting
    core.erase_namespace("gone")
    assert core.commons.erasure.is_pending
    if answers == "late":
        store = closing.below.made[-1]._store
        assert isinstance(store, MemoryTier)
        store._run = steps
    closing.meanwhile = lambda: steps.run(min(1, len(steps.waiting)))
    core.close()
    assert not core.commons.erasure.is_pending
    assert not any(closing.has(ids))
    assert all(closing.has(stays))


@pytest.mark.parametrize("fails", [False, True])
def test_a_step_under_way_is_taken_in_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    """If it failed, nothing of it is saved."""
    closing = Closing(tmp_path)
    core = closing.engine(backend=AheadBackend())
    core.submit(request("r", [*prompt(1), 5], max_tokens=8))
    core.step()
    assert core._flight is not None
    [choice] = core.scheduler.running
    ids = choice.known_ids(16)

    def collect(_: Flight) -> list[Any]:
        raise RuntimeError("the device says no")

    if fails:
        monkeypatch.setattr(Flight, "collect", collect)
    core.close()
    assert closing.has(ids) == [not fails] * 4


def test_what_goes_wrong_at_the_end_does_not_keep_the_store_open(tmp_path: Path) -> None:
    closing = Closing(tmp_path)
    core = closing.engine()
    ask(core, prompt(1))

    def breaks() -> None:
        raise RuntimeError("at the end")

    closing.meanwhile = breaks
    with pytest.raises(RuntimeError, match="at the end"):
        core.close()
    store = closing.below.made[-1]._store
    assert store is not None
    assert store.lookup([bytes(32)]).result(1).outcome in (Outcome.UNAVAILABLE, Outcome.CANCELLED)
