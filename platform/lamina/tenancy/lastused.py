"""When each key was last used: noted in memory, written in batches, never on a request's path."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from datetime import datetime

import structlog
from sqlalchemy import bindparam, or_, update

from lamina.errors import DatabaseUnavailable
from lamina.tenancy.database import Database
from lamina.tenancy.models import ApiKeyRow

__all__ = ["LastUsed"]

log = structlog.get_logger(__name__)


class LastUsed:
    """`touch` is synchronous and cheap; one background task at most writes what came in, every `interval_s`.

    A crash loses at most one interval. While the database is away, the notes wait for the next interval.
    """

    def __init__(self, *, database: Database, interval_s: float = 30.0) -> None:
        self._database = database
        self._interval_s = interval_s
        self._noted: dict[str, datetime] = {}
        self._task: asyncio.Task[None] | None = None
        self._closing = asyncio.Event()

    def touch(self, key_id: str, at: datetime) -> None:
        """Call inside a running event loop."""
        self._noted[key_id] = at
        if not self._closing.is_set() and (self._task is None or self._task.done()):
            self._task = asyncio.get_running_loop().create_task(self._flush_later(), name="lamina-last-used")

    async def flush(self) -> None:
        """Writes all notes now. Raises DatabaseUnavailable, keeping them."""
        noted, self._noted = self._noted, {}
        if not noted:
            return
        statement = (
            update(ApiKeyRow.__table__)  # type: ignore[arg-type]  # the table, for executemany with own bind names
            .where(ApiKeyRow.id == bindparam("key_id"))
            .where(or_(ApiKeyRow.last_used_at.is_(None), ApiKeyRow.last_used_at < bindparam("at")))
            .values(last_used_at=bindparam("at"))
        )
        rows = [{"key_id": key_id, "at": at} for key_id, at in sorted(noted.items())]
        try:
            async with self._database.transaction() as session:
                await (await session.connection()).execute(statement, rows)
        except BaseException:
            self._noted = noted | self._noted
            raise

    async def close(self) -> None:
        """Ends the task and writes what is left. Raises DatabaseUnavailable.

        A write under way is waited for: cancelled, it would take its connection along, whose thread would answer to a
        loop that may be closed by then.
        """
        self._closing.set()
        if self._task is not None:
            await asyncio.wait([self._task])
        await self.flush()

    async def _flush_later(self) -> None:
        while self._noted:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._closing.wait(), self._interval_s)
                return  # `close` writes what is left
            try:
                await self.flush()
            except DatabaseUnavailable as error:
                log.warning("last_used_not_written", keys=len(self._noted), error=error.message)
