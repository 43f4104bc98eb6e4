"""The tenants themselves: made, listed, changed and deleted by the operator."""

from __future__ import annotations

from sqlalchemy import delete, func, or_, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession

from lamina.errors import Conflict, InvalidRequest, NotFound
from lamina.tenancy.clock import Clock, utcnow
from lamina.tenancy.database import Database
from lamina.tenancy.ids import new_id
from lamina.tenancy.models import AdapterRow, ApiKeyRow, PinRow, QuotaRow, TenantRow
from lamina.tenancy.names import check_tenant_name, check_weight, is_plausible
from lamina.tenancy.records import AdapterStatus, DeletedTenant, Tenant, TenantStatus

__all__ = ["TenantService", "find_tenant", "lock_tenant"]


async def lock_tenant(session: AsyncSession, tenant_id: str) -> TenantRow:
    """The tenant's row, held until the transaction ends. Raises NotFound."""
    query = select(TenantRow).where(TenantRow.id == tenant_id).with_for_update()
    row = await session.scalar(query) if is_plausible(tenant_id) else None
    if row is None:
        raise _unknown(tenant_id)
    return row


class TenantService:
    """Tenants by id or by name (names never look like ids)."""

    def __init__(self, *, database: Database, clock: Clock = utcnow) -> None:
        self._database = database
        self._clock = clock

    async def create(self, *, name: str, weight: float = 1.0) -> Tenant:
        """Raises InvalidRequest (name, weight) or Conflict (the name is taken)."""
        row = TenantRow(
            id=new_id("ten"),
            name=check_tenant_name(name),
            weight=check_weight(weight),
            status=TenantStatus.ACTIVE.value,
            created_at=self._clock(),
        )
        try:
            async with self._database.transaction() as session:
                session.add(row)
        except IntegrityError as error:
            raise Conflict(f"A tenant named {name!r} exists already; choose another name.", param="name") from error
        return _record(row)

    async def get(self, tenant: str) -> Tenant:
        """By id or name. Raises NotFound."""
        async with self._database.session() as session:
            return _record(await find_tenant(session, tenant))

    async def list(self) -> tuple[Tenant, ...]:
        """All tenants, by name."""
        async with self._database.session() as session:
            rows = await session.scalars(select(TenantRow).order_by(TenantRow.name))
            return tuple(_record(row) for row in rows)

    async def update(
        self, tenant: str, *, weight: float | None = None, status: TenantStatus | str | None = None
    ) -> Tenant:
        """Changes the share or suspends. Keys verified earlier follow within `KeyService`'s cache time.

        Raises NotFound or InvalidRequest.
        """
        async with self._database.transaction() as session:
            row = await lock_tenant(session, (await find_tenant(session, tenant)).id)
            if weight is not None:
                row.weight = check_weight(weight)
            if status is not None:
                row.status = _check_status(status).value
            return _record(row)

    async def delete(self, tenant: str, *, force: bool = False) -> DeletedTenant:
        """Deletes the tenant for good; while it owns live keys or ready adapters, only with `force`.

        Those go with it. The caller gives the digests to `AdapterService.remove_unowned`, which removes the
        files that nobody else needs.

        Raises NotFound or Conflict.
        """
        async with self._database.transaction() as session:
            row = await lock_tenant(session, (await find_tenant(session, tenant)).id)
            if not force:
                await self._refuse_if_used(session, row)
            digests = await session.scalars(select(AdapterRow.digest).where(AdapterRow.tenant_id == row.id).distinct())
            deleted = DeletedTenant(tenant=_record(row), adapter_digests=tuple(sorted(digests)))
            for owned in (ApiKeyRow, AdapterRow, PinRow, QuotaRow):
                await session.execute(delete(owned).where(owned.tenant_id == row.id))
            await session.delete(row)
            return deleted

    async def _refuse_if_used(self, session: AsyncSession, row: TenantRow) -> None:
        expired = ApiKeyRow.expires_at.is_not(None) & (ApiKeyRow.expires_at <= self._clock())
        keys = await session.scalar(
            select(func.count()).where(ApiKeyRow.tenant_id == row.id, ApiKeyRow.revoked_at.is_(None), ~expired)
        )
        adapters = await session.scalar(
            select(func.count()).where(AdapterRow.tenant_id == row.id, AdapterRow.status == AdapterStatus.READY.value)
        )
        if keys or adapters:
            raise Conflict(
                f"Tenant {row.name!r} still owns {keys} live key(s) and {adapters} ready adapter version(s). "
                "Revoke and delete them first, or force the deletion."
            )


async def find_tenant(session: AsyncSession, tenant: str) -> TenantRow:
    """By id or name. Raises NotFound."""
    query = select(TenantRow).where(or_(TenantRow.id == tenant, TenantRow.name == tenant))
    row = await session.scalar(query) if is_plausible(tenant) else None
    if row is None:
        raise _unknown(tenant)
    return row


def _unknown(tenant: str) -> NotFound:
    return NotFound(f"There is no tenant {tenant!r}. 'lamina tenants list' shows all.", param="tenant")


def _check_status(status: TenantStatus | str) -> TenantStatus:
    try:
        return TenantStatus(status)
    except ValueError:
        known = ", ".join(TenantStatus)
        raise InvalidRequest(f"A tenant's status is one of {known}; got {status!r}.", param="status") from None


def _record(row: TenantRow) -> Tenant:
    return Tenant(
        id=row.id,
        name=row.name,
        weight=row.weight,
        status=TenantStatus(row.status),
        created_at=row.created_at,
    )
