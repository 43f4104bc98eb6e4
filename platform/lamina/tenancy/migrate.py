"""Bringing a database to the schema that this code needs.

The whole upgrade is one transaction under a lock that the database itself holds (SQLite's write lock, an
advisory lock on PostgreSQL). So any number of processes may start at once, and a crash changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, text
from sqlalchemy.pool import NullPool

import lamina
from lamina.errors import ConfigurationInvalid
from lamina.tenancy.database import database_errors, make_engine

__all__ = ["current", "downgrade", "head", "migrations_folder", "upgrade"]

T = TypeVar("T")

_ADVISORY_LOCK = 0x6C616D696E61  # "lamina"; any constant that no other program uses


def migrations_folder() -> Path:
    """The alembic scripts: `lamina/_migrations` in an installed wheel, `migrations/` in a checkout."""
    package = Path(lamina.__file__).resolve().parent
    for folder in (package / "_migrations", package.parent.parent / "migrations"):
        if (folder / "env.py").is_file():
            return folder
    raise ConfigurationInvalid("The migration scripts are missing from this installation; reinstall lamina.")


def head() -> str:
    """The newest revision that this code knows."""
    revision = ScriptDirectory(str(migrations_folder())).get_current_head()
    assert revision is not None
    return revision


async def current(database_url: str) -> str | None:
    """The database's revision; None if it was never migrated."""
    return await _run(database_url, lambda connection: MigrationContext.configure(connection).get_current_revision())


async def upgrade(database_url: str, revision: str = "head") -> None:
    """Upgrades to `revision`; nothing to do if it is there already. Safe from several processes at once.

    Raises DatabaseUnavailable, or ConfigurationInvalid if the database is newer than this code.
    """
    await _run(database_url, lambda connection: _upgrade(connection, revision))


async def downgrade(database_url: str, revision: str) -> None:
    """Downgrades to `revision` ("base": an empty schema). Data in dropped tables is lost."""
    await _run(database_url, lambda connection: command.downgrade(_config(connection), revision))


def _upgrade(connection: Connection, revision: str) -> None:
    found = MigrationContext.configure(connection).get_current_revision()
    known = {script.revision for script in ScriptDirectory(str(migrations_folder())).walk_revisions()}
    if found is not None and found not in known:
        raise ConfigurationInvalid(
            f"The database is at revision {found!r}, which this lamina does not know. "
            "Run the version that wrote it, or a newer one.",
            param="database_url",
        )
    command.upgrade(_config(connection), revision)


def _config(connection: Connection) -> Config:
    config = Config()
    config.set_main_option("script_location", str(migrations_folder()).replace("%", "%%"))
    config.attributes["connection"] = connection
    return config


async def _run(database_url: str, work: Callable[[Connection], T]) -> T:
    # foreign_keys off: on SQLite a table is changed by building it anew, which would trip over references.
    engine = make_engine(database_url, foreign_keys=False, poolclass=NullPool)
    try:
        with database_errors():
            async with engine.execution_options(lamina_begin="IMMEDIATE").begin() as connection:
                return await connection.run_sync(lambda sync: _locked(sync, work))
    finally:
        await engine.dispose()


def _locked(connection: Connection, work: Callable[[Connection], T]) -> T:
    sqlite = connection.dialect.name == "sqlite"
    if not sqlite:
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _ADVISORY_LOCK})
    result = work(connection)
    if sqlite and (broken := connection.execute(text("PRAGMA foreign_key_check")).first()):
        raise RuntimeError(f"the migration would leave dangling references in {broken[0]}; rolled back")
    return result
