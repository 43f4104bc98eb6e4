"""Alembic's entry.

`lamina.tenancy.migrate` hands over a connection that is already in a locked transaction. The alembic command
line gives none; then `-x url=...` or LAMINA_DATABASE_URL names the database.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any, Literal

from alembic import context
from sqlalchemy import Connection
from sqlalchemy.pool import NullPool

from lamina.tenancy.database import make_engine
from lamina.tenancy.models import Base, UtcDateTime


def render(kind: str, item: Any, _: Any) -> str | Literal[False]:
    """Generated scripts must not import our types: the code moves on, history does not."""
    if kind == "type" and isinstance(item, UtcDateTime):
        return "sa.DateTime(timezone=True)"
    return False


def run(connection: Connection) -> None:
    context.configure(
        connection=connection,
        target_metadata=Base.metadata,
        transactional_ddl=True,  # alembic's default for SQLite is False, but SQLite can
        render_item=render,
        render_as_batch=connection.dialect.name == "sqlite",
    )
    with context.begin_transaction():
        context.run_migrations()


async def run_from_command_line() -> None:
    url = context.get_x_argument(as_dictionary=True).get("url") or os.environ.get("LAMINA_DATABASE_URL")
    if not url:
        raise SystemExit("Name the database: alembic -c migrations/alembic.ini -x url=sqlite+aiosqlite:///x.db ...")
    engine = make_engine(url, foreign_keys=False, poolclass=NullPool)
    async with engine.execution_options(lamina_begin="IMMEDIATE").begin() as connection:
        await connection.run_sync(run)
    await engine.dispose()


if context.is_offline_mode():
    raise SystemExit("Offline mode (--sql) is not supported: the scripts look at the connection.")
given: Connection | None = context.config.attributes.get("connection")
if given is not None:
    run(given)
else:
    asyncio.run(run_from_command_line())
