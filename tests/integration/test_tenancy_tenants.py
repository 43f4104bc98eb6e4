"""Tenants on SQLite and PostgreSQL."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, timedelta
from pathlib import Path

import pytest

from fixtures.tenancy import SECRET, Time
from lamina.errors import Conflict, InvalidRequest, NotFound
from lamina.tenancy.adapters import AdapterService
from lamina.tenancy.database import Database
from lamina.tenancy.keys import KeyService
from lamina.tenancy.memory import MemoryIntake
from lamina.tenancy.records import TenantStatus
from lamina.tenancy.tenants import TenantService


@pytest.fixture
def tenants(database: Database, time: Time) -> TenantService:
    return TenantService(database=database, clock=time)


async def test_create_get_list(tenants: TenantService, time: Time) -> None:
    """A tenant is found by id and by name; the list is by name; times are aware and in UTC."""
    beta = await tenants.create(name="beta", weight=2.5)
    acme = await tenants.create(name="acme")
    assert beta.id.startswith("ten_")
    assert await tenants.get(beta.id) == await tenants.get("beta") == beta
    assert await tenants.list() == (acme, beta)
    assert beta.created_at == time.now
    assert (await tenants.get("beta")).created_at.tzinfo is UTC


async def test_a_taken_name_is_a_conflict(tenants: TenantService) -> None:
    """Also when two try at the same moment: exactly one wins."""
    results = await asyncio.gather(*(tenants.create(name="acme") for _ in range(4)), return_exceptions=True)
    assert sum(isinstance(result, Conflict) for result in results) == 3
    assert len(await tenants.list()) == 1


@pytest.mark.parametrize(
    "tenant", ["ten_nobody", "", "a\0", "\ud800", "x" * 100_000, "' OR 1=1 --"], ids=lambda t: repr(t)[:16]
)
async def test_unknown_tenants(tenants: TenantService, tenant: str) -> None:
    """Whatever the text, the answer is NotFound."""
    for call in (tenants.get(tenant), tenants.delete(tenant), tenants.update(tenant, weight=2)):
        with pytest.raises(NotFound):
            await call


async def test_update(tenants: TenantService) -> None:
    """Weight and status change; nonsense changes nothing."""
    acme = await tenants.create(name="acme")
    changed = await tenants.update(acme.id, weight=3, status="suspended")
    assert (changed.weight, changed.status) == (3.0, TenantStatus.SUSPENDED)
    with pytest.raises(InvalidRequest, match="active, suspended"):
        await tenants.update(acme.id, weight=4, status="gone")
    assert await tenants.get("acme") == changed


async def test_delete_refuses_while_the_tenant_owns_something(
    database: Database, tenants: TenantService, time: Time, make_adapter_folder: Callable[[str], Path]
) -> None:
    """Live keys and ready adapters protect a tenant; `force` takes them along, and only them."""
    keys = KeyService(database=database, secret=SECRET, clock=time)
    adapters = AdapterService(database=database, intake=MemoryIntake(), base_model="base", clock=time)
    acme, beta = await tenants.create(name="acme"), await tenants.create(name="beta")
    await keys.issue(acme.id, name="k", scopes=["inference"])
    kept = await keys.issue(beta.id, name="k", scopes=["inference"])
    await adapters.intake(acme.id, name="mine", folder=make_adapter_folder("x"))
    with pytest.raises(Conflict, match=r"1 live key.*1 ready adapter"):
        await tenants.delete("acme")
    deleted = await tenants.delete("acme", force=True)
    assert deleted.tenant.id == acme.id
    assert [tenant.name for tenant in await tenants.list()] == ["beta"]
    assert await keys.list() == (kept.record,)
    assert await adapters.remove_unowned(deleted.adapter_digests) == deleted.adapter_digests
    assert len(deleted.adapter_digests) == 1
    await keys.close()


async def test_dead_keys_do_not_protect_a_tenant(database: Database, tenants: TenantService, time: Time) -> None:
    """Revoked and expired keys go with their tenant without force."""
    keys = KeyService(database=database, secret=SECRET, clock=time)
    acme = await tenants.create(name="acme")
    revoked = await keys.issue(acme.id, name="a", scopes=["inference"])
    await keys.issue(acme.id, name="b", scopes=["inference"], expires_at=time.now + timedelta(hours=1))
    await keys.revoke(revoked.record.id)
    with pytest.raises(Conflict):
        await tenants.delete(acme.id)
    time.advance(hours=1)
    await tenants.delete(acme.id)
    assert await keys.list() == ()
    await keys.close()
