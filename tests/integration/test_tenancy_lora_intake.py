"""The services over the real adapter store and validator."""

from __future__ import annotations

from pathlib import Path

import pytest

from fixtures.peft_folders import write_adapter
from lamina.errors import InvalidAdapter
from lamina.tenancy.adapters import AdapterService
from lamina.tenancy.database import Database
from lamina.tenancy.lora_intake import LoraIntake
from lamina.tenancy.tenants import TenantService
from lamina_lora.geometry import TARGETS, BaseGeometry
from lamina_lora.store import ADAPTER_FILES, AdapterStore

GEOMETRY = BaseGeometry(num_layers=1, targets=dict.fromkeys(TARGETS, (8, 8)), vocab_size=16, hidden_size=8)


@pytest.fixture
def store(tmp_path: Path) -> AdapterStore:
    return AdapterStore(tmp_path / "adapters")


@pytest.fixture
def adapters(database: Database, store: AdapterStore) -> AdapterService:
    intake = LoraIntake(store=store, geometry=GEOMETRY, max_rank=8)
    return AdapterService(database=database, intake=intake, base_model="tiny")


async def _tenant(database: Database) -> str:
    return (await TenantService(database=database).create(name="acme")).id


async def test_the_whole_way(database: Database, adapters: AdapterService, store: AdapterStore, tmp_path: Path) -> None:
    """Upload, resolve, read the published files, upload again, delete: files and rows agree at every step."""
    tenant = await _tenant(database)
    folder = write_adapter(tmp_path / "a")
    record = await adapters.intake(tenant, name="tag", folder=folder)
    assert (record.rank, record.created) == (2, True)
    assert record.size_bytes == sum((folder / name).stat().st_size for name in ADAPTER_FILES)
    published = store.path((await adapters.resolve(tenant, "tag")).digest)
    for name in ADAPTER_FILES:
        assert (published / name).read_bytes() == (folder / name).read_bytes()
    assert not (await adapters.intake(tenant, name="tag", folder=folder)).created
    second = await adapters.intake(tenant, name="tag", folder=write_adapter(tmp_path / "b", scale=2.0))
    assert second.version == 2
    deleted = await adapters.delete(tenant, "tag")
    assert set(deleted.removed_digests) == {record.digest, second.digest}
    assert store.digests() == []


async def test_all_violations_in_one_report(
    database: Database, adapters: AdapterService, store: AdapterStore, tmp_path: Path
) -> None:
    """The validator's list arrives whole, and nothing is kept."""
    tenant = await _tenant(database)
    folder = write_adapter(tmp_path / "a", rank=16, scale=float("nan"))
    with pytest.raises(InvalidAdapter) as caught:
        await adapters.intake(tenant, name="tag", folder=folder)
    assert len(caught.value.violations) >= 2
    assert any("rank" in violation for violation in caught.value.violations)
    assert any("NaN" in violation for violation in caught.value.violations)
    assert store.digests() == []
    assert (await adapters.list(tenant)).data == ()


async def test_an_adapter_without_effect_is_refused(
    database: Database, adapters: AdapterService, store: AdapterStore, tmp_path: Path
) -> None:
    """It would silently answer like the base model."""
    tenant = await _tenant(database)
    with pytest.raises(InvalidAdapter, match="exactly like the base model"):
        await adapters.intake(tenant, name="tag", folder=write_adapter(tmp_path / "a", b=0.0))
    assert store.digests() == []


async def test_reconciliation_removes_orphans_and_reports_losses(
    database: Database, adapters: AdapterService, store: AdapterStore, tmp_path: Path
) -> None:
    """Against the real folders."""
    tenant = await _tenant(database)
    lost = await adapters.intake(tenant, name="lost", folder=write_adapter(tmp_path / "a"))
    kept = await adapters.intake(tenant, name="kept", folder=write_adapter(tmp_path / "b", scale=2.0))
    orphan = "0" * 64
    store.publish(write_adapter(tmp_path / "c", scale=3.0), orphan)
    store.remove(lost.digest)
    report = await adapters.reconcile()
    assert report.removed_digests == (orphan,)
    assert [record.id for record in report.missing] == [lost.id]
    assert store.digests() == [kept.digest]
