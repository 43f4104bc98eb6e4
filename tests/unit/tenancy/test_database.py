"""Database URLs, pragmas and the one outage error."""

from __future__ import annotations

import sqlite3
import threading
from pathlib import Path

import pytest
from sqlalchemy import text
from sqlalchemy.exc import OperationalError

from lamina.errors import ConfigurationInvalid, DatabaseUnavailable
from lamina.tenancy import database as module
from lamina.tenancy.database import Database, parse_url


@pytest.mark.parametrize(
    ("url", "driver"),
    [
        ("sqlite:////x/a.db", "sqlite+aiosqlite"),
        ("sqlite+aiosqlite:////x/a.db", "sqlite+aiosqlite"),
        ("postgresql://u:p@h/d", "postgresql+psycopg"),
        ("postgres://u:p@h/d", "postgresql+psycopg"),
        ("postgresql+psycopg://u:p@h/d", "postgresql+psycopg"),
    ],
)
def test_the_async_driver_is_filled_in(url: str, driver: str) -> None:
    """People paste the URLs that other tools print."""
    assert parse_url(url).drivername == driver


@pytest.mark.parametrize(
    "url",
    ["", "nonsense", "mysql://u:hunter2@h/d", "sqlite://", "sqlite:///:memory:", "sqlite:///file:x?mode=memory",
     "postgresql://u:hunter2@h:port/d"],
)  # fmt: skip
def test_unusable_urls_are_refused_without_their_password(url: str) -> None:
    """The error names the parameter and never quotes a secret."""
    with pytest.raises(ConfigurationInvalid) as caught:
        parse_url(url)
    assert caught.value.param == "database_url"
    assert "hunter2" not in caught.value.message


async def test_sqlite_pragmas(tmp_path: Path) -> None:
    """WAL, foreign keys on, a busy timeout; the parent folder is made."""
    database = Database.open(f"sqlite:///{tmp_path / 'new' / 'a.db'}")
    async with database.session() as session:
        found = [
            (await session.execute(text(f"PRAGMA {name}"))).scalar_one()
            for name in ("journal_mode", "foreign_keys", "busy_timeout")
        ]
    await database.close()
    assert found == ["wal", 1, int(module.BUSY_TIMEOUT_S * 1000)]


async def test_a_locked_database_is_unavailable_not_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the busy timeout: a typed error with a time to retry."""
    monkeypatch.setattr(module, "BUSY_TIMEOUT_S", 0.05)
    database = Database.open(f"sqlite:///{tmp_path / 'a.db'}")
    await database.ping()
    other = sqlite3.connect(tmp_path / "a.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(DatabaseUnavailable) as caught:
        async with database.transaction() as session:
            await session.execute(text("SELECT 1"))
    assert caught.value.retry_after_s
    other.execute("COMMIT")
    other.close()
    async with database.transaction() as session:
        await session.execute(text("SELECT 1"))
    await database.close()


async def test_readers_do_not_wait_for_a_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """WAL: a long write elsewhere never blocks a look-up."""
    monkeypatch.setattr(module, "BUSY_TIMEOUT_S", 0.05)
    database = Database.open(f"sqlite:///{tmp_path / 'a.db'}")
    await database.ping()
    other = sqlite3.connect(tmp_path / "a.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    await database.ping()
    other.close()
    await database.close()


async def test_a_missing_table_is_our_mistake_not_an_outage(tmp_path: Path) -> None:
    """A retry would not help, so it must not look like one would."""
    database = Database.open(f"sqlite:///{tmp_path / 'a.db'}")
    with pytest.raises(OperationalError, match="no such table"):
        async with database.session() as session:
            await session.execute(text("SELECT * FROM tenants"))
    await database.close()


@pytest.mark.parametrize("url", ["sqlite:////dev/null/x/a.db", "sqlite:////proc/a.db"])
async def test_an_impossible_place_is_a_typed_error(url: str) -> None:
    """A path that cannot be made or opened is reported as one."""
    with pytest.raises((ConfigurationInvalid, DatabaseUnavailable)):
        await Database.open(url).ping()


async def test_a_connection_that_fails_leaves_no_thread(tmp_path: Path) -> None:
    """It would answer to a loop that is closed by then, with a traceback on standard error."""
    before = set(threading.enumerate())
    file = tmp_path / "a.db"
    file.mkdir()
    database = Database.open(f"sqlite:///{file}")
    with pytest.raises(DatabaseUnavailable):
        await database.ping()
    assert not [each for each in set(threading.enumerate()) - before if "connection_worker" in each.name]
    await database.close()


@pytest.mark.postgres
async def test_an_unreachable_postgresql_is_unavailable(tmp_path: Path) -> None:
    """No server at that socket."""
    database = Database.open(f"postgresql+psycopg://lamina@/x?host={tmp_path}")
    with pytest.raises(DatabaseUnavailable):
        await database.ping()
    await database.close()


async def test_an_exception_rolls_back(tmp_path: Path) -> None:
    """Nothing of a failed transaction stays, and the exception passes unchanged."""
    database = Database.open(f"sqlite:///{tmp_path / 'a.db'}")
    async with database.transaction() as session:
        await session.execute(text("CREATE TABLE t (x INTEGER)"))

    async def fail() -> None:
        async with database.transaction() as session:
            await session.execute(text("INSERT INTO t VALUES (1)"))
            raise FileNotFoundError

    with pytest.raises(FileNotFoundError):
        await fail()
    async with database.session() as session:
        assert (await session.execute(text("SELECT count(*) FROM t"))).scalar_one() == 0
    await database.close()
