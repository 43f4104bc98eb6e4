"""What only PostgreSQL can do to us."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from sqlalchemy import text

from fixtures.postgres import PostgresServer
from lamina.errors import DatabaseUnavailable
from lamina.tenancy.database import Database
from lamina.tenancy.tenants import TenantService

pytestmark = pytest.mark.postgres


@pytest.fixture
def name(postgres_server: PostgresServer, postgres_template: str) -> str:
    return postgres_server.create(template=postgres_template)


@pytest_asyncio.fixture
async def database(postgres_server: PostgresServer, name: str) -> AsyncIterator[Database]:
    opened = Database.open(postgres_server.url(name))
    yield opened
    await opened.close()
    postgres_server.drop(name)


def hang_up(server: PostgresServer, name: str) -> None:
    server.execute(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{name}'")


async def test_a_connection_lost_while_idle_is_replaced(
    postgres_server: PostgresServer, database: Database, name: str
) -> None:
    """A server that restarted is survived without an error."""
    await database.ping()
    hang_up(postgres_server, name)
    await database.ping()


async def test_a_connection_lost_in_a_transaction_is_an_outage_and_leaves_nothing(
    postgres_server: PostgresServer, database: Database, name: str
) -> None:
    """The caller gets the typed error, and the next call works."""

    async def interrupted() -> None:
        async with database.transaction() as session:
            await session.execute(text("INSERT INTO tenants VALUES ('ten_a', 'a', 1, 'active', now())"))
            hang_up(postgres_server, name)
            await session.execute(text("SELECT 1"))

    with pytest.raises(DatabaseUnavailable):
        await interrupted()
    assert await TenantService(database=database).list() == ()


async def test_a_named_lock_is_held_until_the_transaction_ends(database: Database) -> None:
    """Another transaction cannot take it meanwhile, but can take another name."""
    taken = text("SELECT pg_try_advisory_xact_lock(hashtextextended(:name, 0))")
    async with database.transaction() as holder:
        await database.lock(holder, "adapter:a")
        async with database.transaction() as other:
            assert not await other.scalar(taken, {"name": "adapter:a"})
            assert await other.scalar(taken, {"name": "adapter:b"})
    async with database.transaction() as other:
        assert await other.scalar(taken, {"name": "adapter:a"})
