"""The engine under quotas: who may start, who gives way, and what a pin keeps."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from fixtures.engines import collect, drive, request, tiny_core
from lamina.engine.core import EngineCore
from lamina.errors import ExceedsQuota, InvalidRequest, NotFound, QuotaNotCoverable
from lamina.types import FinishReason, GenerationRequest, PinOrder, PinState, QuotaPolicy, TenantBlocks, TierQuota

BLOCK = 16


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "adapters"


def prompt(seed: int, blocks: float) -> list[int]:
    return random.Random(seed).choices(range(3, 211), k=int(blocks * BLOCK))


def quota(namespace: str, reserved: int = 0, limit: int | None = None, pins: int = 0, weight: float = 1) -> QuotaPolicy:
    return QuotaPolicy(
        namespace=namespace, weight=weight, gpu=TierQuota(reserved=reserved, limit=limit, pin_limit=pins)
    )


def core_with(store: Path, *quotas: QuotaPolicy, loaded: bool = True, **options: Any) -> EngineCore:
    """32 blocks, of which 4 are headroom."""
    core = tiny_core(store, **({"num_blocks": 32, "max_running": 4, "max_batch_tokens": 128} | options))
    if loaded:
        core.commons.set_quotas(quotas)
    return core


def share(core: EngineCore, namespace: str) -> TenantBlocks:
    [found] = [each for each in core.commons.report().tenants if each.namespace == namespace]
    return found


def hit(core: EngineCore, tenant: str, token_ids: list[int]) -> int:
    """Prompt tokens that a request finds."""
    before = core.stats().prefix_hit_tokens
    drive(core, [request("probe", [*token_ids, 5], tenant=tenant, max_tokens=1)])
    return core.stats().prefix_hit_tokens - before


def flood(core: EngineCore, tenant: str, count: int = 8) -> None:
    drive(core, [request(f"{tenant}{i}", prompt(100 + i, 7), tenant=tenant, max_tokens=4) for i in range(count)])


@pytest.mark.parametrize("reserved", [0, 8])
def test_what_is_reserved_stays_cached(store: Path, reserved: int) -> None:
    """A flood evicts another tenant's blocks in the order of use, unless they are within its reservation."""
    core = core_with(store, quota("b", reserved), loaded=reserved > 0)
    drive(core, [request("b", prompt(1, 6), tenant="b", max_tokens=1)])
    flood(core, "a")
    assert hit(core, "b", prompt(1, 6)) == (6 * BLOCK if reserved else 0)
    reasons = dict(share(core, "a").evictions)
    assert reasons.keys() == ({"over_share"} if reserved else {"lru"})
    core.close()


def test_a_pin_keeps_its_blocks_from_its_own_tenant_too(store: Path) -> None:
    """And is refreshed by hits; others, of the same reservation, are evicted by it."""
    core = core_with(store, quota("a", 10, 12, 4))
    answer = core.commons.pin(PinOrder(namespace="a", token_ids=tuple(prompt(1, 3.5)), ttl_s=60.0))
    assert (answer.status, answer.need, answer.have) == ("granted", 3, 4)
    assert answer.pin is not None
    assert (answer.pin.blocks, answer.pin.resident_blocks, answer.pin.hits) == (3, 0, 0)
    drive(core, [request("first", prompt(1, 3.5), tenant="a", max_tokens=1)])
    drive(core, [request("other", prompt(2, 3.5), tenant="a", max_tokens=1)])
    flood(core, "a")
    assert hit(core, "a", prompt(1, 3.5)) == 3 * BLOCK
    assert hit(core, "a", prompt(2, 3.5)) == 0
    [pin] = core.commons.report().pins
    assert (pin.resident_blocks, pin.hits) == (3, 1)
    assert share(core, "a").pinned == 3
    assert share(core, "a").pin_hits == 1
    core.commons.unpin("a", pin.pin_id)
    flood(core, "a")
    assert hit(core, "a", prompt(1, 3.5)) == 0
    core.close()


def test_what_can_never_fit_is_refused_at_once(store: Path) -> None:
    """By the tenant's own limit, by what others have reserved, and by what its own pins may take."""
    core = core_with(store, quota("a", 10, 12, 4), quota("b", 6))
    for tenant, most in (("a", 12 - 4), ("b", 28 - 10), ("c", 28 - 16)):
        core.submit(request(f"{tenant} fits", prompt(1, most - 0.5), tenant=tenant, max_tokens=9))
        with pytest.raises(ExceedsQuota) as refusal:
            core.submit(request("x", prompt(1, most - 0.5), tenant=tenant, max_tokens=10))
        error = refusal.value
        assert (error.limit, error.need, error.have, error.param) == (most, most + 1, most, "max_tokens")
        assert error.decision
    _, endings = drive(core)
    assert set(endings.values()) == {FinishReason.LENGTH}
    core.close()


def test_choices_share_their_prompt_in_the_worst_case(store: Path) -> None:
    """n choices cost the prompt's full blocks once, and their own tails each."""
    core = core_with(store, quota("a", 0, 3 + 3 * 2))
    core.submit(request("fits", prompt(1, 3.5), tenant="a", n=3, max_tokens=BLOCK))
    with pytest.raises(ExceedsQuota):
        core.submit(request("x", prompt(1, 3.5), tenant="a", n=4, max_tokens=BLOCK))
    tokens, _ = drive(core)
    assert len(tokens) == 3
    core.close()


def running(core: EngineCore) -> dict[str, int]:
    counts: dict[str, int] = {}
    for choice in core.scheduler.running:
        counts[choice.request.tenant] = counts.get(choice.request.tenant, 0) + 1
    return counts


def test_a_limit_holds_a_tenant_and_nobody_else(store: Path) -> None:
    """Its second request waits for its first; another tenant's two start beside it."""
    core = core_with(store, quota("a", 0, 8), max_batch_tokens=512)
    for name in ("a0", "a1"):
        core.submit(request(name, prompt(int(name[1]), 5), tenant="a", max_tokens=20))
    for name in ("b0", "b1"):
        core.submit(request(name, prompt(9, 5), tenant="b", max_tokens=20))
    core.step()
    assert running(core) == {"a": 1, "b": 2}
    _, endings = drive(core)
    assert set(endings.values()) == {FinishReason.LENGTH}
    assert core.stats().preemptions == 0
    core.close()


def test_nobody_overtakes_a_large_request_but_those_within_their_reservation(store: Path) -> None:
    """It waits for room in the pool; small ones behind it would take that again and again."""
    core = core_with(store, quota("b", 8))
    core.submit(request("x", prompt(0, 18.5), tenant="x", max_tokens=9))
    core.step()
    for name, blocks in (("y", 13.5), ("z", 1.5), ("b", 3.5)):
        core.submit(request(name, prompt(1, blocks), tenant=name, max_tokens=9))
    core.step()
    assert running(core) == {"x": 1, "b": 1}
    _, endings = drive(core)
    assert set(endings.values()) == {FinishReason.LENGTH}
    core.close()


def test_whoever_is_over_its_share_gives_way(store: Path) -> None:
    """The youngest choice of the tenant furthest over; at its own limit a tenant gives way to itself."""
    core = core_with(store, loaded=False, max_batch_tokens=512)
    for name, blocks in (("a0", 6), ("a1", 5), ("c0", 3), ("b0", 4)):
        core.submit(request(name, prompt(1, blocks), tenant=name[0], max_tokens=40))
    core.step()
    choices = {choice.request.request.request_id: choice for choice in core.scheduler.running}
    assert len(choices) == 4

    def victim(of: str, need: int = 1) -> str | None:
        found = core.scheduler.admission.victim(core.scheduler.running, choices[of], need)
        return None if found is None else found.request.request.request_id

    assert victim("b0") == "a1"  # no policy yet: by blocks alone
    core.commons.set_quotas([quota("b", 8, 9)])
    assert [victim(name) for name in choices] == ["a1"] * 4
    assert victim("b0", need=6) == "b0"
    core.commons.set_quotas([quota("b", 8, 9), quota("a", 12, weight=3)])
    assert victim("b0") == "c0"
    core.commons.set_quotas([quota("b", 8), quota("a", 12), quota("c", 4)])
    assert [victim(name) for name in choices] == ["a1", "a1", "c0", "b0"]  # nobody is over: each its own
    drive(core)
    core.close()


def test_a_reservation_is_taken_back(store: Path) -> None:
    """Whoever uses another's reserved blocks gives them back when they are wanted, and goes on afterwards."""
    long = [request(f"a{i}", prompt(i, 8), tenant="a", max_tokens=40) for i in range(2)]
    alone = {item.request_id: drive(tiny_core(store), [item])[0][item.request_id, 0] for item in long}
    core = core_with(store, quota("b", 14), num_blocks=28)
    for item in long:
        core.submit(item)
    tokens: dict[tuple[str, int], list[int]] = {}
    endings: dict[tuple[str, int], FinishReason] = {}
    for _ in range(5):
        collect(core.step(), tokens, endings)
    core.commons.set_quotas([quota("b", 0)])
    for _ in range(3):
        collect(core.step(), tokens, endings)
    assert running(core) == {"a": 2}
    core.commons.set_quotas([quota("b", 14)])
    core.submit(request("b", prompt(9, 12), tenant="b", max_tokens=8))
    for _ in range(2):
        collect(core.step(), tokens, endings)
        core.check_integrity()
    assert running(core)["b"] == 1
    assert core.stats().preemptions == 1
    while core.has_work():
        collect(core.step(), tokens, endings)
        core.check_integrity()
    assert {name: tokens[name, 0] for name in alone} == alone
    core.close()


@pytest.mark.parametrize("host", [0, 1 << 20])
def test_what_gave_way_goes_on_where_it_was(store: Path, host: int) -> None:
    """Requests start by what they need today; the youngest gives way when they have grown, and resumes the same."""
    items = [request(f"r{i}", prompt(i, 4), tenant=f"t{i % 3}", max_tokens=5 * BLOCK) for i in range(9)]
    roomy = core_with(store, num_blocks=128)
    alone, _ = drive(roomy, items)
    roomy.close()
    core = core_with(store, quota("t0", 9), max_batch_tokens=64, host_kv_bytes=host)
    tokens, endings = drive(core, items)
    assert set(endings.values()) == {FinishReason.LENGTH}
    assert core.stats().preemptions > 0
    assert tokens == alone
    core.close()


def test_a_request_that_policy_made_impossible_fails_with_the_reason(store: Path) -> None:
    """It waits when its limit is lowered; it is not left waiting for ever."""
    core = core_with(store)
    blocker: list[GenerationRequest] = [request(f"c{i}", prompt(i, 4), tenant="c", max_tokens=30) for i in range(4)]
    for item in [*blocker, request("a", prompt(9, 10), tenant="a", max_tokens=4)]:
        core.submit(item)
    core.step()
    core.commons.set_quotas([quota("a", 0, 5)])
    _, endings = drive(core)
    assert endings.pop(("a", 0)) is FinishReason.ERROR
    assert set(endings.values()) == {FinishReason.LENGTH}
    core.close()


def test_quotas_are_taken_whole_or_not_at_all(store: Path) -> None:
    core = core_with(store, quota("a", 20))
    with pytest.raises(QuotaNotCoverable) as refusal:
        core.commons.set_quotas([quota("a", 20), quota("b", 9)])
    assert (refusal.value.limit, refusal.value.need) == (28, 29)
    with pytest.raises(InvalidRequest):
        core.commons.set_quotas([quota("a", 5, 4)])
    assert core.scheduler.kv.ledger is not None
    assert core.scheduler.kv.ledger.book.of("a").reserved == 20
    core.close()


def test_pins_are_refused_by_name(store: Path) -> None:
    """Before policy, without a full block, without a tier; and nobody reaches another's."""
    core = core_with(store, loaded=False)

    def pin(namespace: str = "a", blocks: float = 2, **other: Any) -> tuple[str, str | None, PinState | None]:
        answer = core.commons.pin(PinOrder(namespace=namespace, token_ids=tuple(prompt(1, blocks)), **other))
        return answer.status, answer.reason, answer.pin

    assert pin()[:2] == ("denied", "policy_not_loaded")
    core.commons.set_quotas([quota("a", 4, None, 4)])
    assert pin(blocks=0.9)[:2] == ("denied", "no_full_block")
    assert pin(floor="host")[:2] == ("denied", "no_such_tier")
    assert pin(namespace="b")[:2] == ("denied", "pin_limit")
    with pytest.raises(InvalidRequest):
        pin(floor="tape")
    with pytest.raises(InvalidRequest):
        pin(ttl_s=10.0, hard_max_s=5.0)
    status, _, made = pin()
    assert status == "granted"
    assert made is not None
    for call in (lambda: core.commons.unpin("b", made.pin_id), lambda: core.commons.renew("b", made.pin_id, 1.0)):
        with pytest.raises(NotFound):
            call()
    core.close()
