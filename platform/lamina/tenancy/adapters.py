"""Taking adapters in: validate, publish the files, enter the row, or leave nothing behind."""

from __future__ import annotations

import asyncio
from pathlib import Path

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from lamina.errors import LaminaError, LimitExceeded
from lamina.tenancy.cache import TtlCache
from lamina.tenancy.catalog import MAX_PAGE, AdapterCatalog, ready_rows, record_of
from lamina.tenancy.clock import Clock, utcnow
from lamina.tenancy.database import Database
from lamina.tenancy.ids import new_id
from lamina.tenancy.intake import AdapterIntake, ValidatedAdapter
from lamina.tenancy.models import AdapterRow
from lamina.tenancy.names import check_adapter_name
from lamina.tenancy.records import AdapterRecord, AdapterStatus
from lamina.tenancy.tenants import lock_tenant

__all__ = ["MAX_PAGE", "AdapterService"]


class AdapterService(AdapterCatalog):
    """The catalogue of one base model's adapters, plus what it takes to add to it."""

    def __init__(
        self,
        *,
        database: Database,
        intake: AdapterIntake,
        base_model: str,
        max_adapters_per_tenant: int = 1000,
        cache: TtlCache[tuple[str, str], AdapterRecord] | None = None,
        clock: Clock = utcnow,
    ) -> None:
        super().__init__(database=database, files=intake, base_model=base_model, cache=cache)
        self._intake = intake
        self._limit = max_adapters_per_tenant
        self._clock = clock

    async def intake(self, tenant_id: str, *, name: str, folder: Path) -> AdapterRecord:
        """Takes in a PEFT folder as the next version of `name`; `folder` stays the caller's.

        If a ready version of this name has the same digest, that version is the answer (`created` False).
        Raises InvalidRequest (name), InvalidAdapter, NotFound (tenant), LimitExceeded.
        """
        check_adapter_name(name, base_model=self._base_model)
        adapter = await asyncio.to_thread(self._intake.validate, folder)
        await asyncio.to_thread(self._intake.publish, folder, adapter)
        try:
            async with self._database.transaction() as session:
                await self.lock_digest(session, adapter.digest)
                await lock_tenant(session, tenant_id)
                record = await self._enter(session, tenant_id, name, adapter)
                # A deletion of the last other owner may have removed the files since they were published.
                if not await asyncio.to_thread(self._intake.contains, adapter.digest):
                    await asyncio.to_thread(self._intake.publish, folder, adapter)
        except LaminaError:
            await self.remove_unowned([adapter.digest])
            raise
        self._resolved.clear()
        return record

    async def _enter(
        self, session: AsyncSession, tenant_id: str, name: str, adapter: ValidatedAdapter
    ) -> AdapterRecord:
        same = ready_rows(tenant_id).where(
            AdapterRow.name == name,
            AdapterRow.digest == adapter.digest,
            AdapterRow.base_model == self._base_model,
        )
        known = await session.scalar(same.order_by(AdapterRow.version.desc()).limit(1))
        if known is not None:
            return record_of(known)
        await self._check_quota(session, tenant_id)
        mine = (AdapterRow.tenant_id == tenant_id) & (AdapterRow.name == name)
        newest = await session.scalar(select(func.max(AdapterRow.version)).where(mine))
        row = AdapterRow(
            id=new_id("adp"),
            tenant_id=tenant_id,
            name=name,
            version=(newest or 0) + 1,
            digest=adapter.digest,
            base_model=self._base_model,
            rank=adapter.rank,
            size_bytes=adapter.size_bytes,
            status=AdapterStatus.READY.value,
            created_at=self._clock(),
        )
        session.add(row)
        await session.flush()
        return record_of(row, created=True)

    async def _check_quota(self, session: AsyncSession, tenant_id: str) -> None:
        used = await session.scalar(select(func.count()).select_from(ready_rows(tenant_id).subquery())) or 0
        if used >= self._limit:
            raise LimitExceeded(
                f"This tenant has {used} of at most {self._limit} ready adapter versions; delete one first.",
                limit=self._limit,
                need=1,
                have=max(0, self._limit - used),
            )
