"""An engine that nobody asks for anything goes on with what no request waits for, and rests once that is done."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fixtures.engines import drive, request, tiny_core
from lamina.engine.core import EngineCore
from lamina.types import PinOrder, QuotaPolicy, TierQuota
from lamina_kvtier.memory_tier import MemoryStore, Steps
from support.below import Below
from support.fixed_rates import HandClock

ROOMY: dict[str, Any] = {"num_blocks": 60, "max_batch_tokens": 128}
SMALL: dict[str, Any] = {"num_blocks": 14, "max_batch_tokens": 64}
QUIET_S = 1.0
MOST_TICKS = 2000  # a few dozen would do


def prompt(seed: int, blocks: int = 4) -> list[int]:
    return [(7 * at + seed) % 200 + 3 for at in range(16 * blocks)]


def ask(core: EngineCore, token_ids: list[int]) -> int:
    before = core.stats().prefix_hit_tokens
    drive(core, [request(f"r{core._arrivals}", [*token_ids, 5 + core._arrivals], max_tokens=4)])
    return core.stats().prefix_hit_tokens - before


def rest(core: EngineCore, store: Steps | None = None) -> float | None:
    """Ticks until it has nothing to do at once, and the store does its part; no step is taken."""
    steps = core.stats().steps
    for again in ticks(core):
        if again is None or again >= QUIET_S:
            assert core.stats().steps == steps
            return again
        core.check_integrity()
        if store is not None:
            store.run()
    pytest.fail(f"after {MOST_TICKS} ticks it still does not rest")


def ticks(core: EngineCore) -> Iterator[float | None]:
    """When it wants the next one, time after time."""
    for _ in range(MOST_TICKS):
        yield core.idle()
        time.sleep(0.002)  # copies are another thread's work


def tick(core: EngineCore, clock: HandClock, times: int) -> None:
    for _ in range(times):
        clock.now += QUIET_S
        rest(core)


def fresh(store: MemoryStore, tmp_path: Path) -> Callable[[list[int]], int]:
    """Asks another engine over the same store, how much it finds there."""

    def found(token_ids: list[int]) -> int:
        core = tiny_core(tmp_path, tiers=Below(store=store), **SMALL)
        hits = ask(core, token_ids)
        core.close()
        return hits

    return found


def test_without_tiers_there_is_nothing_to_go_on_with(tmp_path: Path) -> None:
    core = tiny_core(tmp_path, **SMALL)
    ask(core, prompt(1))
    assert core.idle() is None
    core.close()


def test_without_a_store_it_rests_once_copies_have_ended(tmp_path: Path) -> None:
    below = Below()
    core = tiny_core(tmp_path, tiers=below, **SMALL)
    for seed in range(6):
        ask(core, prompt(seed))
    assert rest(core) is None
    assert core.idle() is None
    host = below.made[0]._host.usage()
    assert host.writing == host.held == 0
    core.close()


def test_the_last_request_makes_a_prefix_hot_and_nobody_asks_again(tmp_path: Path) -> None:
    """All of it gets to the store, a few blocks at a time."""
    store, steps = MemoryStore(), Steps()
    below = Below(store=store, host=16)
    below.run = steps
    core = tiny_core(tmp_path, tiers=below, **ROOMY)
    for _ in range(3):
        ask(core, prompt(1, 12))
    assert store._values == {}
    assert rest(core, steps) == QUIET_S
    assert core.stats().stored_blocks == 12
    assert fresh(store, tmp_path)(prompt(1, 12)) == 192
    core.close()


def test_what_the_store_lost_comes_back_although_nobody_asks(tmp_path: Path) -> None:
    clock, store = HandClock(), MemoryStore()
    below = Below(store=store)
    below.clock = clock
    core = tiny_core(tmp_path, tiers=below, **SMALL)
    for seed in range(6):
        ask(core, prompt(seed))
    assert rest(core) == QUIET_S
    stored = set(store._values)
    assert len(stored) >= 12
    for identity in stored:
        store.delete(identity)
    tick(core, clock, 5)
    assert stored <= set(store._values)
    assert fresh(store, tmp_path)(prompt(1)) == 64
    core.close()


def test_a_pin_that_is_granted_between_requests_is_saved(tmp_path: Path) -> None:
    """With floor `gpu` to the store, and with floor `host` to host memory; its guard ends."""
    for floor, shared in (("gpu", False), ("host", True)):
        clock, store = HandClock(), MemoryStore()
        below = Below(store=store, shared=shared)
        below.clock = clock
        core = tiny_core(tmp_path, tiers=below, **ROOMY)
        unit = core.info.block_bytes
        pool, host = TierQuota(reserved=8, pin_limit=8), TierQuota(reserved=8 * unit, pin_limit=8 * unit)
        core.commons.set_quotas([QuotaPolicy(namespace="t", gpu=pool, host=host if shared else TierQuota())])
        ask(core, prompt(1))
        assert rest(core) == QUIET_S
        assert store._values == {}
        core.commons.pin(PinOrder(namespace="t", token_ids=tuple(prompt(1)), floor=floor, ttl_s=1000.0))
        tick(core, clock, 3)
        assert core.stats().stored_blocks == 4
        assert fresh(store, tmp_path)(prompt(1)) == 64
        core.close()


def test_what_was_deleted_is_gone_when_its_last_transfer_ends(tmp_path: Path) -> None:
    store, steps = MemoryStore(), Steps()
    below = Below(store=store, shared=True)
    below.run = steps
    core = tiny_core(tmp_path, tiers=below, **SMALL)
    for seed in range(6):
        ask(core, prompt(seed))
    host = below.made[0]._host
    assert any(host.usage().held for _ in ticks(core)), "no block of it is ever on its way to the store"
    core.erase_namespace("t")
    assert core.commons.erasure.is_pending
    steps.run()
    core.idle()
    assert not core.commons.erasure.is_pending
    assert host.usage().bytes_by_namespace.get("t", 0) == 0
    core.close()
