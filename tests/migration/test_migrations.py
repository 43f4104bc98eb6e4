"""The migration scripts, on both databases."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import CheckConstraint, Connection, inspect, text

import lamina
from lamina.errors import ConfigurationInvalid
from lamina.tenancy import migrate
from lamina.tenancy.database import Database, make_engine
from lamina.tenancy.models import Base

TABLES = {"tenants", "api_keys", "adapters", "quotas", "pins", "kv_pools", "alembic_version"}


async def _tables(url: str) -> set[str]:
    engine = make_engine(url)
    async with engine.connect() as connection:
        found = await connection.run_sync(lambda sync: set(inspect(sync).get_table_names()))
    await engine.dispose()
    return found


async def test_up_down_up(empty_database_url: str) -> None:
    """A database can go up, all the way down and up again."""
    assert await migrate.current(empty_database_url) is None
    await migrate.upgrade(empty_database_url)
    assert await _tables(empty_database_url) == TABLES
    assert await migrate.current(empty_database_url) == migrate.head()
    await migrate.downgrade(empty_database_url, "base")
    assert await _tables(empty_database_url) == {"alembic_version"}
    assert await migrate.current(empty_database_url) is None
    await migrate.upgrade(empty_database_url)
    assert await _tables(empty_database_url) == TABLES


async def test_upgrading_twice_keeps_the_data(database_url: str) -> None:
    """An upgrade of an up-to-date database changes nothing."""
    database = Database.open(database_url)
    async with database.transaction() as session:
        await session.execute(
            text("INSERT INTO tenants VALUES ('ten_a', 'a', 1.0, 'active', '2030-01-01 00:00:00+00:00')")
        )
    await migrate.upgrade(database_url)
    async with database.session() as session:
        assert (await session.execute(text("SELECT id FROM tenants"))).scalars().all() == ["ten_a"]
    await database.close()


async def test_quotas_of_the_pool_survive_those_of_the_tiers(empty_database_url: str) -> None:
    """Up to 0003 and down again: what a tenant had of the pool it still has, and the pool is as large as it was."""
    await migrate.upgrade(empty_database_url, "0002")
    database = Database.open(empty_database_url)
    tenant = "INSERT INTO tenants VALUES ('ten_a', 'a', 1.0, 'active', '2030-01-01 00:00:00+00:00')"
    quota = "INSERT INTO quotas VALUES ('ten_a', 20, NULL, 5, '2030-01-02 03:04:05+00:00')"
    pool = "INSERT INTO kv_pools VALUES ('device', 64, 60, 4096, 16, '2030-01-02 03:04:05+00:00')"
    async with database.transaction() as session:
        for line in (tenant, quota, pool):
            await session.execute(text(line))

    async def rows(query: str) -> list[tuple[object, ...]]:
        async with database.session() as session:
            return [tuple(row) for row in await session.execute(text(query))]

    old = "SELECT tenant_id, reserved_blocks, limit_blocks, pin_limit_blocks, updated_at FROM quotas"
    before = await rows(old)
    await migrate.upgrade(empty_database_url, "0003")
    assert await rows(old) == before
    new = "host_reserved_bytes, host_limit_bytes, host_pin_limit_bytes, store_reserved_bytes, store_limit_bytes"
    assert await rows(f"SELECT {new} FROM quotas") == [(0, None, 0, 0, None)]
    assert await rows("SELECT name, capacity, coverable, block_bytes FROM kv_pools") == [("device", 64, 60, 4096)]
    async with database.transaction() as session:
        await session.execute(
            text("INSERT INTO kv_pools VALUES ('host', 1073741824, 4294967296, 4096, 16, '2030-01-02 03:04:05+00:00')")
        )
    await migrate.downgrade(empty_database_url, "0002")
    assert await rows(old) == before
    assert await rows("SELECT name, capacity_blocks, coverable_blocks FROM kv_pools") == [("device", 64, 60)]
    await database.close()


async def test_tiers_that_are_known_already_take_limits(empty_database_url: str) -> None:
    """0004: until a server says otherwise. An older server, which knows nothing of it, can still write its row."""
    await migrate.upgrade(empty_database_url, "0003")
    database = Database.open(empty_database_url)
    columns = "name, capacity, coverable, block_bytes, block_tokens, seen_at"
    for number, name in enumerate(("store", "host")):
        async with database.transaction() as session:
            row = f"('{name}', 64, 60, 4096, 16, '2030-01-02 03:04:05+00:00')"
            await session.execute(text(f"INSERT INTO kv_pools ({columns}) VALUES {row}"))
        await migrate.upgrade(empty_database_url, "0004")
        async with database.session() as session:
            limits = (await session.execute(text("SELECT limits FROM kv_pools"))).scalars().all()
            assert list(map(bool, limits)) == [True] * (number + 1)
    await migrate.downgrade(empty_database_url, "0003")
    async with database.session() as session:
        found = (await session.execute(text("SELECT * FROM kv_pools ORDER BY name"))).keys()
        assert set(found) == set(columns.split(", "))
    await database.close()


async def test_models_equal_head(database_url: str) -> None:
    """Autogenerate finds no difference between the migrated schema and the models."""

    def differences(connection: Connection) -> list[object]:
        context = MigrationContext.configure(connection, opts={"compare_type": True, "compare_server_default": True})
        return list(compare_metadata(context, Base.metadata))

    engine = make_engine(database_url)
    async with engine.connect() as connection:
        assert await connection.run_sync(differences) == []
    await engine.dispose()


async def test_check_constraints_equal_the_models(database_url: str) -> None:
    """Autogenerate does not look at CHECK constraints, so their names are compared here."""

    def names(connection: Connection) -> set[str | None]:
        look = inspect(connection)
        return {check["name"] for table in look.get_table_names() for check in look.get_check_constraints(table)}

    expected = {
        str(constraint.name)
        for table in Base.metadata.tables.values()
        for constraint in table.constraints
        if isinstance(constraint, CheckConstraint)
    }
    engine = make_engine(database_url)
    async with engine.connect() as connection:
        assert await connection.run_sync(names) == expected
    await engine.dispose()


async def test_upgrades_at_the_same_time(empty_database_url: str) -> None:
    """Several processes that start at once all succeed, and the schema is made once."""
    code = "import asyncio, sys; from lamina.tenancy import migrate; asyncio.run(migrate.upgrade(sys.argv[1]))"
    command = [sys.executable, "-W", "error", "-c", code, empty_database_url]
    processes = [await asyncio.create_subprocess_exec(*command, stderr=subprocess.PIPE) for _ in range(2)]
    results = [await process.communicate() for process in processes]
    assert [stderr for _, stderr in results] == [b"", b""]
    assert await migrate.current(empty_database_url) == migrate.head()


async def test_a_failing_migration_changes_nothing(empty_database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything happens in one transaction: a crash at the very end leaves the database untouched."""

    def crash(_: Connection, *__: object) -> None:
        upgrade(_, "head")
        raise RuntimeError("power cut")

    upgrade = migrate._upgrade
    monkeypatch.setattr(migrate, "_upgrade", crash)
    with pytest.raises(RuntimeError, match="power cut"):
        await migrate.upgrade(empty_database_url)
    assert await _tables(empty_database_url) == set()


async def test_a_newer_database_is_refused(database_url: str) -> None:
    """A revision that this code does not know is reported, not overwritten."""
    database = Database.open(database_url)
    async with database.transaction() as session:
        await session.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    await database.close()
    with pytest.raises(ConfigurationInvalid, match="'9999'"):
        await migrate.upgrade(database_url)


def test_the_scripts_are_found_in_a_checkout_and_in_a_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed wheel has them inside the package, a checkout beside `platform`; neither is an error."""
    assert (migrate.migrations_folder() / "versions").is_dir()
    package = tmp_path / "site-packages" / "lamina"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    monkeypatch.setattr(lamina, "__file__", str(package / "__init__.py"))
    with pytest.raises(ConfigurationInvalid, match="reinstall"):
        migrate.migrations_folder()
    (package / "_migrations").mkdir()
    (package / "_migrations" / "env.py").touch()
    assert migrate.migrations_folder() == package / "_migrations"


def test_generated_scripts_import_nothing_of_lamina(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script for the whole schema, generated in a copy of the folder, stands on alembic and sqlalchemy alone."""
    copied = shutil.copytree(migrate.migrations_folder(), tmp_path / "migrations")
    for script in (copied / "versions").glob("*.py"):
        script.unlink()
    url = f"url=sqlite+aiosqlite:///{tmp_path / 'dev.db'}"
    alembic = [sys.executable, "-m", "alembic", "-c", copied / "alembic.ini", "-x", url]
    subprocess.run([*alembic, "revision", "--autogenerate", "-m", "all of it"], check=True, capture_output=True)
    [script] = (copied / "versions").glob("*_all_of_it.py")
    text = script.read_text()
    assert "op.create_table('tenants'" in text
    assert "sa.DateTime(timezone=True)" in text
    assert "lamina" not in text


def test_the_alembic_command_line_works(tmp_path: Path) -> None:
    """Developers can run alembic itself: upgrade, then check finds nothing to generate."""
    ini = migrate.migrations_folder() / "alembic.ini"
    alembic = [
        sys.executable,
        "-m",
        "alembic",
        "-c",
        ini,
        "-x",
        f"url=sqlite+aiosqlite:///{tmp_path / 'dev.db'}",
    ]
    subprocess.run([*alembic, "upgrade", "head"], check=True, capture_output=True)
    checked = subprocess.run([*alembic, "check"], check=True, capture_output=True, text=True)
    assert "No new upgrade operations detected" in checked.stdout
