"""Quotas and pins on SQLite and PostgreSQL."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from fixtures.tenancy import SECRET, Time
from lamina.errors import InvalidRequest, NotFound, QuotaNotCoverable
from lamina.tenancy.database import Database
from lamina.tenancy.pins import PinService
from lamina.tenancy.quotas import QuotaService
from lamina.tenancy.secret import kv_namespace
from lamina.tenancy.tenants import TenantService
from lamina.types import PinOrder, PinRecord, PinState, QuotaPolicy, TierQuota, TierSize

BLOCK = 4
MODEL = "ab" * 32


@pytest.fixture
def tenants(database: Database, time: Time) -> TenantService:
    return TenantService(database=database, clock=time)


@pytest.fixture
def quotas(database: Database, time: Time) -> QuotaService:
    return QuotaService(database=database, secret=SECRET, clock=time)


@pytest.fixture
def pins(database: Database, time: Time) -> PinService:
    return PinService(database=database, secret=SECRET, clock=time)


async def note(quotas: QuotaService, coverable: int) -> None:
    await quotas.note_pool(
        capacity_blocks=coverable + 2, coverable_blocks=coverable, block_bytes=1 << 33, block_tokens=BLOCK
    )


async def test_set_list_remove(tenants: TenantService, quotas: QuotaService, time: Time) -> None:
    """A quota is replaced as a whole; tenants without one are listed with the defaults."""
    await tenants.create(name="beta", weight=2.0)
    acme = await tenants.create(name="acme")
    record = await quotas.set("acme", reserved_blocks=10, limit_blocks=20, pin_limit_blocks=4)
    assert (record.tenant_id, record.reserved_blocks, record.limit_blocks, record.pin_limit_blocks) == (
        acme.id,
        10,
        20,
        4,
    )
    assert record.updated_at == time.now
    listed = await quotas.list()
    assert [(each.tenant_name, each.reserved_blocks, each.weight) for each in listed] == [
        ("acme", 10, 1.0),
        ("beta", 0, 2.0),
    ]
    assert (await quotas.set(acme.id, reserved_blocks=3)).limit_blocks is None
    assert (await quotas.remove("acme")).updated_at is None
    with pytest.raises(NotFound):
        await quotas.set("nobody", reserved_blocks=1)


async def test_policies_are_of_whoever_is_special(tenants: TenantService, quotas: QuotaService) -> None:
    """The engine hears of namespaces, and only of those that differ from the default."""
    acme, beta = await tenants.create(name="acme"), await tenants.create(name="beta", weight=2.0)
    await tenants.create(name="plain")
    await quotas.set("acme", reserved_blocks=5, pin_limit_blocks=1)
    spaces = {tenant.id: kv_namespace(SECRET, tenant.id) for tenant in (acme, beta)}
    assert set(await quotas.policies()) == {
        QuotaPolicy(namespace=spaces[acme.id], gpu=TierQuota(reserved=5, pin_limit=1)),
        QuotaPolicy(namespace=spaces[beta.id], weight=2.0),
    }
    found = await quotas.tenants_of(frozenset({*spaces.values(), "public"}))
    assert found == {space: tenant_id for tenant_id, space in spaces.items()}


@pytest.mark.parametrize(
    ("wanted", "param"),
    [
        ({"reserved_blocks": -1}, "reserved_blocks"),
        ({"reserved_blocks": 2**40}, "reserved_blocks"),
        ({"reserved_blocks": 5, "limit_blocks": 4}, "limit_blocks"),
        ({"limit_blocks": 0}, "limit_blocks"),
        ({"reserved_blocks": 5, "pin_limit_blocks": 6}, "pin_limit_blocks"),
    ],
)
async def test_what_is_no_quota(
    tenants: TenantService, quotas: QuotaService, wanted: dict[str, int], param: str
) -> None:
    await tenants.create(name="acme")
    with pytest.raises(InvalidRequest) as refusal:
        await quotas.set("acme", **wanted)
    assert refusal.value.param == param
    assert (await quotas.list())[0].updated_at is None


async def test_more_than_there_is_is_refused_with_numbers(tenants: TenantService, quotas: QuotaService) -> None:
    """Also when several operators try at once; a tenant's own old reservation does not count against it."""
    for name in "abcd":
        await tenants.create(name=name)
    assert await quotas.pool() is None
    await quotas.set("a", reserved_blocks=6)  # nobody knows yet how large the pool is
    await note(quotas, 10)
    pool = await quotas.pool()
    assert pool is not None
    assert (pool.coverable_blocks, pool.block_bytes) == (10, 1 << 33)
    results = await asyncio.gather(*(quotas.set(name, reserved_blocks=3) for name in "bcd"), return_exceptions=True)
    refused = [result for result in results if isinstance(result, QuotaNotCoverable)]
    assert len(refused) == 2
    assert [(each.limit, each.need, each.have) for each in refused] == [(10, 3, 1)] * 2
    await quotas.set("a", reserved_blocks=7)
    with pytest.raises(QuotaNotCoverable):
        await quotas.set("a", reserved_blocks=8)


async def test_each_tier_has_quotas_of_its_own(tenants: TenantService, quotas: QuotaService) -> None:
    """Host memory and store in bytes; each is judged by what a server last saw of it."""
    acme = await tenants.create(name="acme")
    await tenants.create(name="globex")
    wanted: dict[str, Any] = {
        "host_reserved_bytes": 3 << 30,
        "host_limit_bytes": 8 << 30,
        "host_pin_limit_bytes": 1 << 30,
        "store_reserved_bytes": 1 << 40,
        "store_limit_bytes": 2 << 40,
    }
    record = await quotas.set("acme", **wanted)
    assert {name: getattr(record, name) for name in wanted} == wanted
    [policy] = await quotas.policies()
    assert policy == QuotaPolicy(
        namespace=kv_namespace(SECRET, acme.id),
        host=TierQuota(reserved=3 << 30, limit=8 << 30, pin_limit=1 << 30),
        store=TierQuota(reserved=1 << 40, limit=2 << 40),
    )
    sizes = {"capacity_blocks": 64, "coverable_blocks": 60, "block_bytes": 1 << 20, "block_tokens": 16}
    await quotas.note_pool(**sizes, host=TierSize(6 << 30, 5 << 30), store=TierSize(None, None))
    pool = await quotas.pool()
    assert pool is not None
    assert (pool.host, pool.store) == (TierSize(6 << 30, 5 << 30), TierSize(None, None))
    with pytest.raises(QuotaNotCoverable) as refusal:
        await quotas.set("globex", host_reserved_bytes=(2 << 30) + 1)
    error = refusal.value
    assert (error.tier, error.param) == ("host", "host_reserved_bytes")
    assert (error.limit, error.need, error.have) == (5 << 30, (2 << 30) + 1, 2 << 30)
    await quotas.set(
        "globex", host_reserved_bytes=(2 << 30) - 1, store_reserved_bytes=9 << 40
    )  # nobody knows the store
    await quotas.note_pool(**sizes)
    for tier, setting in (("host", "LAMINA_HOST_KV_BYTES"), ("store", "LAMINA_KV_STORE_URL")):
        with pytest.raises(QuotaNotCoverable, match=setting) as refusal:
            await quotas.set("globex", **{f"{tier}_reserved_bytes": 1})
        assert (refusal.value.tier, refusal.value.limit) == (tier, 0)
    await quotas.set("globex", host_limit_bytes=1 << 30, store_limit_bytes=1)  # a limit promises nothing


async def test_a_store_that_keeps_no_quotas_is_given_none(tenants: TenantService, quotas: QuotaService) -> None:
    """The engine would refuse the whole policy, everybody's: so nothing of it gets into the database."""
    await tenants.create(name="acme")
    sizes = {"capacity_blocks": 64, "coverable_blocks": 60, "block_bytes": 100, "block_tokens": 16}
    store = TierSize(1 << 30, 0, limits=False)
    await quotas.note_pool(**sizes, store=store)
    pool = await quotas.pool()
    assert pool is not None
    assert pool.store == store
    with pytest.raises(QuotaNotCoverable, match="redis://") as uncovered:
        await quotas.set("acme", store_reserved_bytes=1)
    assert (uncovered.value.tier, uncovered.value.limit) == ("store", 0)
    with pytest.raises(InvalidRequest, match="redis://") as unlimited:
        await quotas.set("acme", store_limit_bytes=1)
    assert unlimited.value.param == "store_limit_bytes"
    assert (await quotas.list())[0].updated_at is None
    await quotas.set("acme", reserved_blocks=1)
    await quotas.note_pool(**sizes, store=TierSize(None, 0))  # a server without maxmemory: limits hold
    with pytest.raises(QuotaNotCoverable, match="LAMINA_KV_STORE_BYTES"):
        await quotas.set("acme", store_reserved_bytes=1)
    await quotas.set("acme", store_limit_bytes=1)


async def test_host_memory_is_reserved_in_whole_blocks(tenants: TenantService, quotas: QuotaService) -> None:
    """As the engine does it: what was taken here, it must be able to cover."""
    for name in "abc":
        await tenants.create(name=name)
    await quotas.note_pool(
        capacity_blocks=64, coverable_blocks=60, block_bytes=100, block_tokens=16, host=TierSize(800, 700)
    )
    await quotas.set("a", host_reserved_bytes=301)
    await quotas.set("b", host_reserved_bytes=201)
    with pytest.raises(QuotaNotCoverable) as refusal:
        await quotas.set("c", host_reserved_bytes=1)
    assert refusal.value.have == 0


@pytest.mark.parametrize(
    ("wanted", "param"),
    [
        ({"host_reserved_bytes": -1}, "host_reserved_bytes"),
        ({"host_reserved_bytes": 2**62}, "host_reserved_bytes"),
        ({"host_reserved_bytes": 5, "host_limit_bytes": 4}, "host_limit_bytes"),
        ({"host_pin_limit_bytes": 1}, "host_pin_limit_bytes"),
        ({"store_reserved_bytes": 5, "store_limit_bytes": 4}, "store_limit_bytes"),
        ({"store_limit_bytes": 0}, "store_limit_bytes"),
    ],
)
async def test_numbers_that_are_no_quota_of_a_tier(
    tenants: TenantService, quotas: QuotaService, wanted: dict[str, Any], param: str
) -> None:
    """The parameter is named, and nothing changes."""
    await tenants.create(name="acme")
    with pytest.raises(InvalidRequest) as refusal:
        await quotas.set("acme", **wanted)
    assert refusal.value.param == param
    assert (await quotas.list())[0].updated_at is None


async def test_pins_are_counted_by_the_tier_that_they_cost(
    tenants: TenantService, quotas: QuotaService, pins: PinService, time: Time
) -> None:
    acme = await tenants.create(name="acme")
    for name, floor, blocks in (("pin_1", "gpu", 2), ("pin_2", "host", 3), ("pin_3", "host", 4)):
        order = PinOrder(namespace="n", token_ids=tuple(range(16 * blocks)), floor=floor)
        state = replace(granted(time, name, blocks=blocks), floor=floor)
        await pins.add(acme.id, model="m", model_digest="d", order=order, pin=state, block_tokens=16)
    [record] = await quotas.list()
    assert (record.pinned_blocks, record.host_pinned_blocks) == (2, 7)


def granted(time: Time, name: str, *, blocks: int = 2, ttl_s: float = 60.0) -> PinState:
    now = time.now.timestamp()
    return PinState(
        pin_id=f"pin_{name}",
        namespace="n",
        floor="gpu",
        blocks=blocks,
        resident_blocks=0,
        clipped_blocks=1,
        ttl_s=ttl_s,
        hard_max_s=3600.0,
        created_at=now,
        expires_at=now + ttl_s,
    )


async def add(pins: PinService, tenant_id: str, pin: PinState, *, model_digest: str = MODEL) -> None:
    order = PinOrder(
        namespace="n",
        token_ids=tuple(range(100_000, 100_000 + 3 * BLOCK)),
        adapter="cd" * 32,
        ttl_s=pin.ttl_s,
        hard_max_s=pin.hard_max_s,
    )
    await pins.add(tenant_id, model="poet@1", model_digest=model_digest, order=order, pin=pin, block_tokens=BLOCK)


async def test_a_pin_is_its_tenants_own(tenants: TenantService, pins: PinService, time: Time) -> None:
    """Others find nothing, whatever they ask for, and cannot end it."""
    acme, beta = await tenants.create(name="acme"), await tenants.create(name="beta")
    await add(pins, acme.id, granted(time, "one"))
    assert [pin.id for pin in await pins.list(acme.id)] == ["pin_one"]
    entry = await pins.get(acme.id, "pin_one")
    assert (entry.model, entry.blocks, entry.expires_at.timestamp()) == ("poet@1", 2, time.now.timestamp() + 60)
    assert await pins.list(beta.id) == ()
    for call in (pins.get(beta.id, "pin_one"), pins.remove(beta.id, "pin_one"), pins.get(acme.id, "\0'--")):
        with pytest.raises(NotFound):
            await call
    await pins.remove(acme.id, "pin_one")
    assert await pins.list(acme.id) == ()
    with pytest.raises(NotFound):
        await add(pins, "ten_nobody", granted(time, "two"))


async def test_records_bring_a_pin_back(tenants: TenantService, pins: PinService, time: Time) -> None:
    """The tokens are those of the granted blocks, the namespace is derived again; another base model's are left."""
    acme = await tenants.create(name="acme")
    await add(pins, acme.id, granted(time, "one"))
    await add(pins, acme.id, granted(time, "other"), model_digest="ef" * 32)
    assert await pins.alive(MODEL) == {"pin_one"}
    [record] = await pins.records(await pins.alive(MODEL))
    expected = PinOrder(
        namespace=kv_namespace(SECRET, acme.id),
        token_ids=tuple(range(100_000, 100_000 + 2 * BLOCK)),
        adapter="cd" * 32,
        ttl_s=60.0,
        hard_max_s=3600.0,
    )
    now = time.now.timestamp()
    assert record == PinRecord(pin_id="pin_one", order=expected, created_at=now, expires_at=now + 60, clipped_blocks=1)


async def test_hits_prolong_and_time_ends(tenants: TenantService, pins: PinService, time: Time) -> None:
    """What the engine has refreshed is kept; what expired is gone, and its row goes with the next note."""
    acme = await tenants.create(name="acme")
    for name in ("hit", "idle"):
        await add(pins, acme.id, granted(time, name))
    now = time.now.timestamp()
    hit = PinState(
        pin_id="pin_hit",
        namespace="n",
        floor="gpu",
        blocks=2,
        resident_blocks=2,
        clipped_blocks=1,
        ttl_s=60.0,
        hard_max_s=3600.0,
        created_at=now,
        expires_at=now + 90,
        hits=3,
        last_hit_at=now + 30,
    )
    await pins.note([hit])
    time.advance(seconds=61)
    assert [(pin.id, pin.hits) for pin in await pins.list(acme.id)] == [("pin_hit", 3)]
    with pytest.raises(NotFound):
        await pins.get(acme.id, "pin_idle")
    await pins.note([])
    assert [record.pin_id for record in await pins.records(["pin_hit", "pin_idle"])] == ["pin_hit"]


async def test_a_deleted_tenant_takes_its_quota_and_pins_along(
    tenants: TenantService, quotas: QuotaService, pins: PinService, time: Time
) -> None:
    acme = await tenants.create(name="acme")
    await quotas.set("acme", reserved_blocks=5, pin_limit_blocks=5)
    await add(pins, acme.id, granted(time, "one"))
    assert (await quotas.list())[0].pinned_blocks == 2
    await tenants.delete("acme")
    assert await quotas.policies() == ()
    assert await pins.records(["pin_one"]) == ()
