"""Demo tenants: made once, found again, repaired when something is gone."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from lamina.errors import ConfigurationInvalid, Unauthenticated
from lamina.tenancy.adapters import AdapterService
from lamina.tenancy.database import Database
from lamina.tenancy.keys import KeyService
from lamina.tenancy.memory import MemoryIntake
from lamina.tenancy.operator import OperatorDoor
from lamina.tenancy.pins import PinService
from lamina.tenancy.quotas import QuotaService
from lamina.tenancy.tenants import TenantService
from lamina.wiring.demo import DEMO_TENANTS, seed_demo
from lamina.wiring.services import Services


@pytest.fixture
def database_url(sqlite_template: Path, tmp_path: Path) -> str:
    """One database is enough here: the services are tested on both."""
    (tmp_path / "lamina.db").write_bytes(sqlite_template.read_bytes())
    return f"sqlite+aiosqlite:///{tmp_path / 'lamina.db'}"


def services_over(database: Database, secret: bytes = b"s" * 32) -> Services:
    return Services(
        tenants=TenantService(database=database),
        keys=KeyService(database=database, secret=secret),
        adapters=AdapterService(database=database, intake=MemoryIntake(), base_model="base"),
        quotas=QuotaService(database=database, secret=secret),
        pins=PinService(database=database, secret=secret),
        operator=OperatorDoor(secret),
    )


@pytest.fixture
def adapters(make_adapter_folder: Callable[[str], Path], tmp_path: Path) -> Path:
    for _, adapter in DEMO_TENANTS:
        make_adapter_folder(adapter).rename(tmp_path / adapter)
    return tmp_path


async def test_it_is_made_once(database: Database, adapters: Path, tmp_path: Path) -> None:
    """Each tenant has its adapter and a working key; a second run gives the same keys and makes nothing."""
    services = services_over(database)
    first = await seed_demo(services, home=tmp_path, adapters=adapters)
    assert [(entry.tenant, entry.adapter) for entry in first] == list(DEMO_TENANTS)
    for entry in first:
        principal = await services.keys.authenticate(entry.key)
        assert principal.tenant_name == entry.tenant
        page = await services.adapters.list(principal.tenant_id)
        assert [record.name for record in page.data] == [entry.adapter]
    assert await seed_demo(services, home=tmp_path, adapters=adapters) == first
    assert len(await services.keys.list()) == 2
    await services.keys.close()


async def test_keys_are_kept_from_other_users(database: Database, adapters: Path, tmp_path: Path) -> None:
    """demo.json is readable by its owner only, and no draft stays."""
    services = services_over(database)
    await seed_demo(services, home=tmp_path, adapters=adapters)
    assert stat.S_IMODE((tmp_path / "demo.json").stat().st_mode) == 0o600
    assert ".demo" not in "".join(os.listdir(tmp_path))
    await services.keys.close()


@pytest.mark.parametrize("damage", ["missing", "garbage", "secret", "revoked"])
async def test_a_key_that_does_not_open_is_replaced(
    database: Database, adapters: Path, tmp_path: Path, damage: str
) -> None:
    """Whatever happened to file, secret or key: the printed keys always work."""
    services = services_over(database)
    before = await seed_demo(services, home=tmp_path, adapters=adapters)
    if damage == "missing":
        (tmp_path / "demo.json").unlink()
    elif damage == "garbage":
        (tmp_path / "demo.json").write_text('[{"tenant": 3}]')
    elif damage == "secret":
        services = services_over(database, b"t" * 32)
    else:
        for record in await services.keys.list():
            await services.keys.revoke(record.id)
    after = await seed_demo(services, home=tmp_path, adapters=adapters)
    assert not {entry.key for entry in before} & {entry.key for entry in after}
    for entry in after:
        assert (await services.keys.authenticate(entry.key)).tenant_name == entry.tenant
    assert after == await seed_demo(services, home=tmp_path, adapters=adapters)
    if damage == "revoked":
        with pytest.raises(Unauthenticated):
            await services.keys.authenticate(before[0].key)
    await services.keys.close()


async def test_a_foreign_base_model_is_explained(database: Database, tmp_path: Path) -> None:
    """Adapters that do not fit say how to get the demo, and no key is written."""
    services = services_over(database)
    with pytest.raises(ConfigurationInvalid, match="without --demo"):
        await seed_demo(services, home=tmp_path, adapters=tmp_path / "nothing")
    assert not (tmp_path / "demo.json").exists()
    await services.keys.close()
