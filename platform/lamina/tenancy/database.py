"""The database: SQLite by default, PostgreSQL by URL alone.

On SQLite a transaction that reads first and writes later can fail at once when another writer got in between (the
busy timeout does not help there). So writers say so from the start: `transaction()` begins IMMEDIATE. `session()` is
for reading and begins nothing on SQLite, where every statement costs changes of thread; so two reads in one session
may see different states.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiosqlite
from sqlalchemy import URL, Connection, event, make_url, text
from sqlalchemy.exc import ArgumentError, DBAPIError, InterfaceError, NoSuchModuleError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker, create_async_engine

from lamina.errors import ConfigurationInvalid, DatabaseUnavailable

__all__ = ["Database", "database_errors", "make_engine", "parse_url"]

BUSY_TIMEOUT_S = 10.0  # how long a SQLite writer waits for another one
_BEGIN = "lamina_begin"  # execution option: how SQLite begins a transaction; None: not at all
_DRIVERS = {
    "sqlite": "sqlite+aiosqlite",
    "sqlite+aiosqlite": "sqlite+aiosqlite",
    "postgresql": "postgresql+psycopg",
    "postgres": "postgresql+psycopg",
    "postgresql+psycopg": "postgresql+psycopg",
}


def parse_url(url: str) -> URL:
    """The URL with its async driver filled in. Raises ConfigurationInvalid; never quotes a password."""
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):
        raise ConfigurationInvalid(
            "The database URL cannot be read. Use sqlite+aiosqlite:////absolute/path.db or "
            "postgresql+psycopg://user:password@host/name.",
            param="database_url",
        ) from None
    driver = _DRIVERS.get(parsed.drivername)
    if driver is None:
        raise ConfigurationInvalid(
            f"{parsed.drivername!r} is not supported; use sqlite+aiosqlite or postgresql+psycopg.",
            param="database_url",
        )
    if driver.startswith("sqlite") and (parsed.database in (None, "", ":memory:") or "mode" in parsed.query):
        raise ConfigurationInvalid(
            "An in-memory database would differ in every connection; name a file in the database URL.",
            param="database_url",
        )
    return parsed.set(drivername=driver)


def make_engine(url: str, *, foreign_keys: bool = True, **options: Any) -> AsyncEngine:
    """An async engine with our pragmas. `foreign_keys=False` is for migrations, which rebuild tables."""
    parsed = parse_url(url)
    if parsed.get_backend_name() == "sqlite":
        _make_parent(Path(str(parsed.database)))
        options.setdefault("connect_args", {"timeout": BUSY_TIMEOUT_S, "async_creator_fn": _connect_sqlite})
        options.setdefault("pool_reset_on_return", None)  # sessions end their transactions themselves
    else:
        options.setdefault("pool_pre_ping", True)
    try:
        engine = create_async_engine(parsed, **options)
    except (ImportError, NoSuchModuleError) as error:
        raise ConfigurationInvalid(
            f"The driver for {parsed.drivername} is not installed ({error}); pip install 'lamina[postgres]'.",
            param="database_url",
        ) from error
    if parsed.get_backend_name() == "sqlite":
        _prepare_sqlite(engine, foreign_keys=foreign_keys)
    return engine


def _make_parent(file: Path) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationInvalid(
            f"The folder {file.parent} for the database cannot be made: {error.strerror}.",
            param="database_url",
        ) from error


async def _connect_sqlite(*arguments: Any, **options: Any) -> aiosqlite.Connection:
    connection = aiosqlite.connect(*arguments, **options)
    connection._thread.daemon = True  # as SQLAlchemy does: who is interrupted must not wait for it
    try:
        return await connection
    except BaseException:
        # aiosqlite ends the thread of a failed connection without waiting, and the thread still answers: to a loop
        # that may be closed by then, which ends in a traceback on standard error.
        await asyncio.to_thread(connection._thread.join)
        raise


def _prepare_sqlite(engine: AsyncEngine, *, foreign_keys: bool) -> None:
    @event.listens_for(engine.sync_engine, "connect")
    def on_connect(connection: Any, _record: Any) -> None:
        connection.isolation_level = None  # the driver begins nothing on its own; on_begin does
        cursor = connection.cursor()
        cursor.execute("PRAGMA journal_mode=WAL")
        cursor.execute(f"PRAGMA foreign_keys={'ON' if foreign_keys else 'OFF'}")
        cursor.close()

    @event.listens_for(engine.sync_engine, "begin")
    def on_begin(connection: Connection) -> None:
        how = connection.get_execution_options().get(_BEGIN, "DEFERRED")
        if how is not None:
            connection.exec_driver_sql(f"BEGIN {how}")


@contextmanager
def database_errors() -> Iterator[None]:
    """An unreachable, locked or full database becomes DatabaseUnavailable; other errors pass."""
    try:
        yield
    except DBAPIError as error:
        if not _is_outage(error):
            raise
        raise _unavailable(error) from error
    except PoolTimeout as error:
        raise _unavailable(error) from error


def _is_outage(error: DBAPIError) -> bool:
    if error.connection_invalidated:
        return True
    if isinstance(error.orig, sqlite3.Error):
        # The generic code 1 is a wrong statement or a missing table: a mistake of ours, not of the disk.
        code = getattr(error.orig, "sqlite_errorcode", sqlite3.SQLITE_ERROR)
        return isinstance(error, OperationalError) and code & 0xFF != sqlite3.SQLITE_ERROR
    return isinstance(error, OperationalError | InterfaceError)


def _unavailable(error: BaseException) -> DatabaseUnavailable:
    cause = getattr(error, "orig", None) or error
    return DatabaseUnavailable(
        f"The database cannot be used right now ({type(cause).__name__}). Retry shortly; if it lasts, "
        "check that the server is up and its disk has room.",
        retry_after_s=1.0,
    )


class Database:
    """A pool of connections and two kinds of sessions. Open once per process, close at the end."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._reading = async_sessionmaker(engine.execution_options(**{_BEGIN: None}), expire_on_commit=False)
        self._writing = async_sessionmaker(engine.execution_options(**{_BEGIN: "IMMEDIATE"}), expire_on_commit=False)

    @classmethod
    def open(cls, url: str) -> Database:
        """Connects lazily. Raises ConfigurationInvalid for a URL that cannot work."""
        return cls(make_engine(url))

    @property
    def engine(self) -> AsyncEngine:
        return self._engine

    async def close(self) -> None:
        await self._engine.dispose()

    async def ping(self) -> None:
        """Raises DatabaseUnavailable unless a query comes back."""
        async with self.session() as session:
            await session.execute(text("SELECT 1"))

    @asynccontextmanager
    async def session(self) -> AsyncIterator[AsyncSession]:
        """For reading. Raises DatabaseUnavailable."""
        with database_errors():
            async with self._reading() as session:
                yield session

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[AsyncSession]:
        """For writing: commits at the end, rolls back on any exception. Raises DatabaseUnavailable.

        The transaction, and on SQLite the wait for other writers, begins with the first statement.
        """
        with database_errors():
            async with self._writing() as session, session.begin():
                yield session

    async def lock(self, session: AsyncSession, name: str) -> None:
        """Holds `name` until the transaction ends, against every process on this database.

        SQLite has one writer at a time, so `transaction()` is that lock already.
        """
        if self._engine.dialect.name == "postgresql":
            await session.execute(text("SELECT pg_advisory_xact_lock(hashtextextended(:name, 0))"), {"name": name})
