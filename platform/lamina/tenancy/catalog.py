"""Tenants' adapters after they were taken in: resolved, listed, retired, and reconciled with their files.

Files live in a content-addressed store that tenants share, ownership lives in rows. Files come before the row
and go after it, so that a ready row always has its files; a crash in between leaves a folder without a row,
which `reconcile` removes. Removing a digest's files and entering a row for it hold the lock of that digest.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable

from sqlalchemy import ColumnElement, Select, false, select, tuple_
from sqlalchemy.ext.asyncio import AsyncSession

from lamina.errors import InvalidRequest, ModelNotFound
from lamina.tenancy.cache import TtlCache
from lamina.tenancy.database import Database
from lamina.tenancy.intake import AdapterFiles
from lamina.tenancy.models import AdapterRow
from lamina.tenancy.names import is_plausible, parse_reference
from lamina.tenancy.records import AdapterRecord, AdapterStatus, DeletedAdapters, Page, Reconciliation
from lamina.tenancy.tenants import lock_tenant

__all__ = ["MAX_PAGE", "AdapterCatalog", "ready_rows", "record_of"]

MAX_PAGE = 1000
_LOOK_UP = 500  # values in one query: SQLite and PostgreSQL bound them
RESOLVED_S = 2.0  # how long a resolved model name is remembered
_READY = AdapterStatus.READY.value


class AdapterCatalog:
    """Another tenant's adapter is as unknown as one that does not exist.

    What a model name resolved to is remembered for `cache.ttl_s` seconds (2 by default). A change made through
    this object holds at once; another process's holds here after that time at the latest.
    """

    def __init__(
        self,
        *,
        database: Database,
        files: AdapterFiles,
        base_model: str,
        cache: TtlCache[tuple[str, str], AdapterRecord] | None = None,
    ) -> None:
        self._database = database
        self._files = files
        self._base_model = base_model
        self._resolved = cache if cache is not None else TtlCache(ttl_s=RESOLVED_S)

    async def resolve(self, tenant_id: str, model_name: str) -> AdapterRecord:
        """The tenant's ready adapter that "name", "name@3" or "name@latest" means. Raises ModelNotFound."""
        known = self._resolved.get((tenant_id, model_name))
        if known is not None:
            return known
        epoch = self._resolved.epoch
        on_this_base = AdapterRow.base_model == self._base_model
        async with self._database.session() as session:
            row = await _latest(session, tenant_id, model_name, on_this_base)
        if row is None:
            raise ModelNotFound(model_name)
        record = record_of(row)
        self._resolved.put((tenant_id, model_name), record, epoch=epoch)
        return record

    async def get(self, tenant_id: str, name_or_id: str) -> AdapterRecord:
        """By id (retired ones too) or by reference, whatever the base model. Raises ModelNotFound."""
        async with self._database.session() as session:
            row = await _by_id(session, tenant_id, name_or_id) or await _latest(session, tenant_id, name_or_id)
        if row is None:
            raise ModelNotFound(name_or_id)
        return record_of(row)

    async def list(
        self, tenant_id: str, *, after: str | None = None, limit: int = 100, name: str | None = None
    ) -> Page[AdapterRecord]:
        """Ready versions, newest first; `after` is the last id of the page before. Raises InvalidRequest."""
        if not 1 <= limit <= MAX_PAGE:
            raise InvalidRequest(f"limit must be between 1 and {MAX_PAGE}; got {limit}.", param="limit")
        position = tuple_(AdapterRow.created_at, AdapterRow.id)
        query = ready_rows(tenant_id).order_by(AdapterRow.created_at.desc(), AdapterRow.id.desc()).limit(limit + 1)
        if name is not None:
            query = query.where(AdapterRow.name == name) if is_plausible(name) else query.where(false())
        async with self._database.session() as session:
            if after is not None:
                cursor = await _by_id(session, tenant_id, after)
                if cursor is None:
                    raise InvalidRequest(f"after={after!r} is not the id of one of your adapters.", param="after")
                query = query.where(position < tuple_(cursor.created_at, cursor.id))
            rows = tuple(await session.scalars(query))
        data = tuple(record_of(row) for row in rows[:limit])
        return Page(
            data=data,
            has_more=len(rows) > limit,
            first_id=data[0].id if data else None,
            last_id=data[-1].id if data else None,
        )

    async def delete(self, tenant_id: str, name_or_id: str) -> DeletedAdapters:
        """Retires one version ("adp_...", "name@3", "name@latest") or all of them ("name").

        `removed_digests` are the ones that no tenant uses any more: their files are gone, and an engine
        should unload them. Never show that list to a tenant. Raises ModelNotFound.
        """
        async with self._database.transaction() as session:
            await lock_tenant(session, tenant_id)
            rows = await _to_delete(session, tenant_id, name_or_id)
            if not rows:
                raise ModelNotFound(name_or_id)
            for row in rows:
                row.status = AdapterStatus.RETIRED.value
            retired = tuple(record_of(row) for row in rows)
        self._resolved.clear()
        removed = await self.remove_unowned({record.digest for record in retired})
        return DeletedAdapters(retired=retired, removed_digests=removed)

    async def reconcile(self) -> Reconciliation:
        """Removes folders that no ready row owns, and reports ready rows whose files are missing.

        A database that has never seen an adapter owns none of the files: it is more likely the wrong database
        (a mistyped URL, a fresh one) than an explanation for them, so nothing is removed then.
        Safe beside running intakes. Call at start, and after a tenant was deleted by force.
        """
        await asyncio.to_thread(self._files.sweep)
        stored = await asyncio.to_thread(self._files.digests)
        async with self._database.session() as session:
            known = await session.scalar(select(AdapterRow.id).limit(1)) is not None
            owned = set(await session.scalars(select(AdapterRow.digest).where(AdapterRow.status == _READY)))
        removed = await self.remove_unowned(set(stored) - owned) if known else ()
        return Reconciliation(removed_digests=removed, missing=await self._missing())

    async def unowned(self, digests: Collection[str]) -> tuple[str, ...]:
        """Those that no ready row has, of whatever tenant and base model."""
        known = sorted(set(digests))
        owned: set[str] = set()
        async with self._database.session() as session:
            for start in range(0, len(known), _LOOK_UP):
                some = AdapterRow.digest.in_(known[start : start + _LOOK_UP])
                owned.update(await session.scalars(select(AdapterRow.digest).where(some, AdapterRow.status == _READY)))
        return tuple(digest for digest in known if digest not in owned)

    async def remove_unowned(self, digests: Iterable[str]) -> tuple[str, ...]:
        """Removes the files of those digests that no ready row has, and names them."""
        removed = []
        for digest in sorted(digests):
            async with self._database.transaction() as session:
                await self.lock_digest(session, digest)
                owner = select(AdapterRow.id).where(AdapterRow.digest == digest, AdapterRow.status == _READY)
                if await session.scalar(owner.limit(1)) is None:
                    await asyncio.to_thread(self._files.remove, digest)
                    removed.append(digest)
        return tuple(removed)

    async def _missing(self) -> tuple[AdapterRecord, ...]:
        query = select(AdapterRow).where(AdapterRow.status == _READY).order_by(AdapterRow.created_at, AdapterRow.id)
        async with self._database.session() as session:
            records = [record_of(row) for row in await session.scalars(query)]
        stored = set(await asyncio.to_thread(self._files.digests))
        return tuple(record for record in records if record.digest not in stored)

    async def lock_digest(self, session: AsyncSession, digest: str) -> None:
        """Held until the transaction ends by whoever removes this digest's files or enters a row for it."""
        await self._database.lock(session, f"adapter:{digest}")


def ready_rows(tenant_id: str) -> Select[AdapterRow]:
    return select(AdapterRow).where(AdapterRow.tenant_id == tenant_id, AdapterRow.status == _READY)


async def _by_id(session: AsyncSession, tenant_id: str, adapter_id: str) -> AdapterRow | None:
    if not is_plausible(adapter_id):
        return None
    mine = (AdapterRow.id == adapter_id) & (AdapterRow.tenant_id == tenant_id)
    row: AdapterRow | None = await session.scalar(select(AdapterRow).where(mine))
    return row


async def _latest(
    session: AsyncSession, tenant_id: str, model_name: str, *conditions: ColumnElement[bool]
) -> AdapterRow | None:
    reference = parse_reference(model_name)
    if reference is None:
        return None
    query = ready_rows(tenant_id).where(AdapterRow.name == reference.name, *conditions)
    if reference.version is not None:
        query = query.where(AdapterRow.version == reference.version)
    row: AdapterRow | None = await session.scalar(query.order_by(AdapterRow.version.desc()).limit(1))
    return row


async def _to_delete(session: AsyncSession, tenant_id: str, adapter: str) -> list[AdapterRow]:
    if "@" not in adapter and (reference := parse_reference(adapter)):
        rows = list(await session.scalars(ready_rows(tenant_id).where(AdapterRow.name == reference.name)))
        if rows:
            return rows
    one = await _by_id(session, tenant_id, adapter) or await _latest(session, tenant_id, adapter)
    return [one] if one is not None and one.status == _READY else []


def record_of(row: AdapterRow, *, created: bool = False) -> AdapterRecord:
    return AdapterRecord(
        id=row.id,
        tenant_id=row.tenant_id,
        name=row.name,
        version=row.version,
        digest=row.digest,
        base_model=row.base_model,
        rank=row.rank,
        size_bytes=row.size_bytes,
        status=AdapterStatus(row.status),
        created_at=row.created_at,
        created=created,
    )
