"""Quotas of host memory and store, and pins with floor `host`, in a running engine."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fixtures.engines import drive, request, tiny_core
from lamina.engine.core import EngineCore
from lamina.errors import InvalidRequest, QuotaNotCoverable
from lamina.types import PinOrder, PinRecord, PinState, QuotaPolicy, TenantBlocks, TierQuota, TierSize
from lamina_kvtier.memory_tier import MemoryStore
from support.below import Below

BLOCK = 16
BLOCK_BYTES = 4096  # of the tiny model


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "adapters"


def prompt(seed: int, blocks: float) -> list[int]:
    return random.Random(seed).choices(range(3, 211), k=int(blocks * BLOCK))


def policy(namespace: str, reserved: float = 0, limit: float | None = None, pins: float = 0) -> QuotaPolicy:
    """Of host memory, in blocks."""
    most = None if limit is None else int(limit * BLOCK_BYTES)
    host = TierQuota(reserved=int(reserved * BLOCK_BYTES), limit=most, pin_limit=int(pins * BLOCK_BYTES))
    return QuotaPolicy(namespace=namespace, host=host)


def core_with(store: Path, *policies: QuotaPolicy, host: int = 16, **options: Any) -> EngineCore:
    """A pool of 14 blocks, and `host` below it, of which an eighth is headroom. Tenant b's share is all of both."""
    small: dict[str, Any] = {"num_blocks": 14, "max_batch_tokens": 64, "max_running": 4}
    core = tiny_core(store, **(small | {"host_kv_bytes": host * BLOCK_BYTES} | options))
    known = {each.namespace: each for each in policies}
    heavy = replace(known.pop("b", QuotaPolicy(namespace="b")), weight=1000.0)
    core.commons.set_quotas([*known.values(), heavy])
    return core


def pinned(core: EngineCore, token_ids: list[int], namespace: str = "a", **other: Any) -> PinState:
    answer = core.commons.pin(PinOrder(namespace=namespace, token_ids=tuple(token_ids), floor="host", **other))
    assert answer.pin is not None, answer
    return answer.pin


def ask(core: EngineCore, token_ids: list[int], tenant: str = "a") -> int:
    """Prompt tokens that a request finds."""
    before = core.stats().prefix_hit_tokens
    drive(core, [request("probe", [*token_ids, 5], tenant=tenant, max_tokens=1)])
    return core.stats().prefix_hit_tokens - before


def flood(core: EngineCore, tenant: str = "b", count: int = 6, first: int = 100) -> None:
    """One after the other, so that each leaves its blocks behind."""
    for seed in range(first, first + count):
        ask(core, prompt(seed, 7), tenant)


def settled(core: EngineCore) -> None:
    """Lets copies end that are under way."""
    until = time.monotonic() + 20
    while core._tiers.commons_of_host is not None and core._tiers.commons_of_host.tier.usage().writing:
        core._tiers.settle()
        assert time.monotonic() < until
    core.check_integrity()


def share(core: EngineCore, namespace: str) -> TenantBlocks:
    [found] = [each for each in core.commons.report().tenants if each.namespace == namespace]
    return found


def test_a_pinned_prefix_outlives_a_flood_of_both_tiers(store: Path) -> None:
    """The pool loses it to others; host memory has it, and it comes back from there as often as it is asked for."""
    core = core_with(store, policy("a", 5, None, 5))
    pin = pinned(core, prompt(1, 4.5))
    assert (pin.blocks, pin.resident_blocks) == (4, 0)
    ask(core, prompt(1, 4.5))
    for first in (100, 200):
        flood(core, first=first)
        assert core.scheduler.kv.match(core.commons._pins.listing()[0].ids) == 0
        [pin] = core.commons.report().pins
        assert pin.resident_blocks == 4
        assert ask(core, prompt(1, 4.5)) == 4 * BLOCK
    assert share(core, "a").host_pinned_bytes == 4 * BLOCK_BYTES
    assert dict(share(core, "b").host_evictions)["pressure"] > 0
    core.commons.unpin("a", pin.pin_id)
    assert share(core, "a").host_pinned_bytes == 0
    core.close()


def test_what_is_cached_on_the_device_is_saved_when_it_is_pinned(store: Path) -> None:
    """It is kept there until it is below, though the tenant may pin nothing on the device."""
    core = core_with(store, policy("a", 5, None, 5))
    ask(core, prompt(1, 4.5))
    assert pinned(core, prompt(1, 4.5)).resident_blocks == 4
    assert core.scheduler.kv.usage().pinned == 4
    flood(core)
    settled(core)
    assert core.scheduler.kv.usage().pinned == 0
    assert ask(core, prompt(1, 4.5)) == 4 * BLOCK
    core.close()


def test_who_takes_a_pinned_prefix_while_it_is_computed_hits_it(store: Path) -> None:
    """Of two that want it at the same time one computes it and the other finds it, some steps after its start."""
    core = core_with(store, policy("a", 5, None, 5))
    pinned(core, prompt(1, 4.5))
    together = [request(name, [*prompt(1, 4.5), 5], tenant="a", max_tokens=2) for name in ("first", "second")]
    drive(core, together)
    [pin] = core.commons.report().pins
    assert (pin.hits, pin.resident_blocks) == (1, 4)
    assert share(core, "a").pin_hits == 1
    core.close()


def test_a_reservation_of_host_memory_is_kept(store: Path) -> None:
    """A tenant's cached blocks stay below within it; without one a flood takes them all."""
    for reserved, found in ((6, 6 * BLOCK), (0, 0)):
        core = core_with(store, policy("a", reserved))
        ask(core, prompt(1, 6))
        flood(core, count=8)
        assert ask(core, prompt(1, 6)) == found
        core.close()


def test_a_limit_of_host_memory_is_kept(store: Path) -> None:
    """However much is free: the tenant's oldest blocks make room for its newest."""
    core = core_with(store, policy("b", 0, 3.9))
    flood(core)
    settled(core)
    found = share(core, "b")
    assert found.host_bytes == 3 * BLOCK_BYTES
    assert dict(found.host_evictions).keys() == {"own_quota"}
    core.close()


@pytest.mark.parametrize("limit", [None, 1 << 20])
def test_a_store_is_as_large_as_it_can_promise(store: Path, limit: int | None) -> None:
    """What the report says is coverable, the engine takes over; and no byte more."""
    core = core_with(store, tiers=Below(shared=True, store=MemoryStore(limit=limit)))
    size = core.commons.report().store
    assert size == TierSize(limit, limit or 0)
    most = limit or 0
    core.commons.set_quotas([QuotaPolicy(namespace="a", store=TierQuota(reserved=most, limit=max(most, 1)))])
    with pytest.raises(QuotaNotCoverable) as refusal:
        core.commons.set_quotas([QuotaPolicy(namespace="a", store=TierQuota(reserved=most + 1))])
    assert (refusal.value.tier, refusal.value.limit) == ("store", most)
    core.close()


def test_quotas_of_all_tiers_are_taken_or_none(store: Path) -> None:
    """The refusal names the tier, and counts as people set quotas: host memory in bytes."""
    core = core_with(store, policy("a", 3, None, 1))
    before = core.commons.report()
    assert before.host == TierSize(16 * BLOCK_BYTES, 14 * BLOCK_BYTES)
    with pytest.raises(QuotaNotCoverable) as refusal:
        core.commons.set_quotas([policy("a", 13.5), policy("b", 0.5)])
    error = refusal.value
    assert (error.tier, error.limit, error.need, error.have) == (
        "host",
        14 * BLOCK_BYTES,
        15 * BLOCK_BYTES,
        14 * BLOCK_BYTES,
    )
    gpu = QuotaPolicy(namespace="a", gpu=TierQuota(reserved=14))
    with pytest.raises(QuotaNotCoverable, match="14 blocks of the device pool are wanted") as refusal:
        core.commons.set_quotas([gpu])
    assert refusal.value.tier == "gpu"
    stored = QuotaPolicy(namespace="a", store=TierQuota(reserved=1))
    with pytest.raises(QuotaNotCoverable, match="LAMINA_KV_STORE_URL") as refusal:
        core.commons.set_quotas([stored])
    assert refusal.value.tier == "store"
    with pytest.raises(InvalidRequest, match="quota of host memory is none"):
        core.commons.set_quotas([policy("a", 1, None, 2)])
    assert core.commons.report() == before
    assert core._tiers.commons_of_host is not None
    assert core._tiers.commons_of_host.book.of("a").reserved == 3
    core.commons.set_quotas([policy("a", 13.5, 13.5)])  # the limit ends within a block, and cuts the reservation
    assert core._tiers.commons_of_host.book.of("a").reserved == 13
    core.close()


@pytest.mark.parametrize("tiers", [None, Below(host=8, store=MemoryStore())], ids=["none", "a store's working memory"])
def test_without_host_memory_as_a_tier_nothing_of_it_is_promised(store: Path, tiers: Below | None) -> None:
    """What a store works through is no tier: its blocks come and go."""
    core = tiny_core(store) if tiers is None else tiny_core(store, tiers=tiers)
    core.commons.set_quotas([policy("a", 0, 3)])
    with pytest.raises(QuotaNotCoverable, match="LAMINA_HOST_KV_BYTES") as refusal:
        core.commons.set_quotas([policy("a", 1)])
    assert (refusal.value.tier, refusal.value.limit) == ("host", 0)
    answer = core.commons.pin(PinOrder(namespace="a", token_ids=tuple(prompt(1, 2)), floor="host"))
    assert (answer.status, answer.reason) == ("denied", "no_such_tier")
    assert (core.commons.report().host, core.info.host_blocks) == (None, 0)
    core.close()


def test_a_pin_comes_back_after_a_restart_with_its_blocks_in_the_store(store: Path) -> None:
    """The lease at once, the blocks when they are used: then they are in host memory again, and stay."""
    below = Below(host=16, store=MemoryStore(), shared=True)
    small: dict[str, Any] = {"num_blocks": 14, "max_batch_tokens": 64}
    first = tiny_core(store, tiers=below, **small)
    first.commons.set_quotas([policy("a", 5, None, 5)])
    order = PinOrder(namespace="a", token_ids=tuple(prompt(1, 4)), floor="host", ttl_s=1000.0)
    answer = first.commons.pin(order)
    assert answer.pin is not None
    ask(first, prompt(1, 4.5))
    flood(first, count=2)
    assert first.stats().stored_blocks >= 4
    first.close()
    second = tiny_core(store, tiers=below, **small)
    second.commons.set_quotas([policy("a", 5, None, 5)])
    record = PinRecord(
        pin_id=answer.pin.pin_id, order=order, created_at=answer.pin.created_at, expires_at=answer.pin.expires_at
    )
    [restored] = second.commons.restore([record])
    assert (restored.pin_id, restored.blocks, restored.resident_blocks) == (answer.pin.pin_id, 4, 0)
    assert ask(second, prompt(1, 4.5)) == 4 * BLOCK
    assert second.stats().loaded_blocks == 4
    flood(second)
    assert second.commons.report().pins[0].resident_blocks == 4
    assert ask(second, prompt(1, 4.5)) == 4 * BLOCK
    second.check_integrity()
    second.close()


def test_what_a_failed_step_computed_is_nowhere(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not on the device, and not below either, though a pin has it saved at once."""
    core = core_with(store, policy("a", 5, None, 5))
    pin = pinned(core, prompt(1, 4.5))

    def fail(*_: object) -> None:
        raise RuntimeError("the sampler broke")

    with monkeypatch.context() as patched:
        patched.setattr(core._sampler, "launch", fail)
        drive(core, [request("r", prompt(1, 4.5), tenant="a", max_tokens=1)])
    assert core.commons.report().pins == (pin,)
    settled(core)
    assert core._tiers.commons_of_host is not None
    assert core._tiers.commons_of_host.tier.usage().free == 16
    assert ask(core, prompt(1, 4.5)) == 0
    assert ask(core, prompt(1, 4.5)) == 4 * BLOCK
    core.close()
