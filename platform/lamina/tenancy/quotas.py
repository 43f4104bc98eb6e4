"""What each tenant is promised of the block pool. The engine enforces it; here it is kept and judged."""

from __future__ import annotations

from sqlalchemy import Row, Select, func, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from lamina.errors import InvalidRequest, QuotaNotCoverable
from lamina.tenancy.clock import Clock, utcnow
from lamina.tenancy.database import Database
from lamina.tenancy.models import PinRow, PoolRow, QuotaRow, TenantRow
from lamina.tenancy.records import PoolRecord, QuotaRecord
from lamina.tenancy.secret import kv_namespace
from lamina.tenancy.tenants import find_tenant
from lamina.types import QuotaPolicy

__all__ = ["QuotaService"]

MAX_BLOCKS = 2**31 - 1
_POOL = "device"


class QuotaService:
    """Quotas by tenant, over all processes that share the database; servers follow within seconds.

    All reservations together never exceed what the pool can cover, as far as a server has said how large that is.
    """

    def __init__(self, *, database: Database, secret: bytes, clock: Clock = utcnow) -> None:
        self._database = database
        self._secret = secret
        self._clock = clock
        self._tenants: dict[str, str] = {}  # by namespace

    async def set(
        self, tenant: str, *, reserved_blocks: int = 0, limit_blocks: int | None = None, pin_limit_blocks: int = 0
    ) -> QuotaRecord:
        """Replaces a tenant's quota. Raises NotFound, InvalidRequest, QuotaNotCoverable; then nothing changed."""
        _check(reserved_blocks, limit_blocks, pin_limit_blocks)
        async with self._database.transaction() as session:
            await self._database.lock(session, "quotas")
            owner = await find_tenant(session, tenant)
            await _require_coverable(session, owner.id, reserved_blocks)
            row = await session.get(QuotaRow, owner.id) or QuotaRow(tenant_id=owner.id)
            row.reserved_blocks, row.limit_blocks, row.pin_limit_blocks = (
                reserved_blocks,
                limit_blocks,
                pin_limit_blocks,
            )
            row.updated_at = self._clock()
            session.add(row)
            await session.flush()
            return await self._one(session, owner.id)

    async def remove(self, tenant: str) -> QuotaRecord:
        """Back to the default: nothing reserved, no limit, no pins. Raises NotFound."""
        async with self._database.transaction() as session:
            owner = await find_tenant(session, tenant)
            row = await session.get(QuotaRow, owner.id)
            if row is not None:
                await session.delete(row)
                await session.flush()
            return await self._one(session, owner.id)

    async def list(self) -> tuple[QuotaRecord, ...]:
        """Of all tenants, by name; those without a quota have the defaults."""
        async with self._database.session() as session:
            rows = await session.execute(self._query().order_by(TenantRow.name))
            return tuple(map(_record, rows))

    async def policies(self) -> tuple[QuotaPolicy, ...]:
        """What the engine has to know: every tenant that is not as all are by default."""
        special = or_(QuotaRow.tenant_id.is_not(None), TenantRow.weight != 1.0)
        query = select(TenantRow.id, TenantRow.weight, QuotaRow).outerjoin(QuotaRow).where(special)
        async with self._database.session() as session:
            rows = (await session.execute(query.order_by(TenantRow.id))).all()
        return tuple(self._policy(tenant_id, weight, quota) for tenant_id, weight, quota in rows)

    def _policy(self, tenant_id: str, weight: float, quota: QuotaRow | None) -> QuotaPolicy:
        namespace = kv_namespace(self._secret, tenant_id)
        if quota is None:
            return QuotaPolicy(namespace=namespace, weight=weight)
        return QuotaPolicy(
            namespace=namespace,
            reserved_blocks=quota.reserved_blocks,
            limit_blocks=quota.limit_blocks,
            pin_limit_blocks=quota.pin_limit_blocks,
            weight=weight,
        )

    async def tenants_of(self, namespaces: frozenset[str]) -> dict[str, str]:
        """Which tenant (by id) has which of these namespaces; unknown ones are left out."""
        if not namespaces <= self._tenants.keys():
            async with self._database.session() as session:
                found = await session.scalars(select(TenantRow.id))
                self._tenants = {kv_namespace(self._secret, tenant_id): tenant_id for tenant_id in found}
        return {namespace: self._tenants[namespace] for namespace in namespaces & self._tenants.keys()}

    # --- the pool -----------------------------------------------------------------------------------------

    async def note_pool(
        self, *, capacity_blocks: int, coverable_blocks: int, block_bytes: int, block_tokens: int
    ) -> None:
        """A server says how large its engine's pool is."""
        async with self._database.transaction() as session:
            await self._database.lock(session, "quotas")
            row = await session.get(PoolRow, _POOL) or PoolRow(name=_POOL)
            row.capacity_blocks, row.coverable_blocks = capacity_blocks, coverable_blocks
            row.block_bytes, row.block_tokens = block_bytes, block_tokens
            row.seen_at = self._clock()
            session.add(row)

    async def pool(self) -> PoolRecord | None:
        """None: no server has run yet."""
        async with self._database.session() as session:
            row = await session.get(PoolRow, _POOL)
        if row is None:
            return None
        return PoolRecord(
            capacity_blocks=row.capacity_blocks,
            coverable_blocks=row.coverable_blocks,
            block_bytes=row.block_bytes,
            block_tokens=row.block_tokens,
            seen_at=row.seen_at,
        )

    # --- how ----------------------------------------------------------------------------------------------

    def _query(self) -> Select[str, str, float, QuotaRow | None, int]:
        alive = (PinRow.tenant_id == TenantRow.id) & (PinRow.expires_at > self._clock())
        pinned = select(func.coalesce(func.sum(PinRow.blocks), 0)).where(alive).correlate(TenantRow).scalar_subquery()
        return select(TenantRow.id, TenantRow.name, TenantRow.weight, QuotaRow, pinned).outerjoin(QuotaRow)

    async def _one(self, session: AsyncSession, tenant_id: str) -> QuotaRecord:
        return _record((await session.execute(self._query().where(TenantRow.id == tenant_id))).one())


async def _require_coverable(session: AsyncSession, tenant_id: str, reserved_blocks: int) -> None:
    pool = await session.get(PoolRow, _POOL)
    if pool is None:
        return  # the first server will say it
    total = func.coalesce(func.sum(QuotaRow.reserved_blocks), 0)
    others = await session.scalar(select(total).where(QuotaRow.tenant_id != tenant_id)) or 0
    left = max(pool.coverable_blocks - others, 0)
    if reserved_blocks > left:
        raise QuotaNotCoverable(
            f"{reserved_blocks} blocks cannot be reserved: of the {pool.coverable_blocks} that can be promised to all "
            f"tenants together, the others leave {left}. Lower a reservation first.",
            limit=pool.coverable_blocks,
            need=reserved_blocks,
            have=left,
        )


def _check(reserved: int, limit: int | None, pin_limit: int) -> None:
    if not 0 <= reserved <= MAX_BLOCKS:
        raise InvalidRequest(f"reserved_blocks must be 0 ... {MAX_BLOCKS}, not {reserved}.", param="reserved_blocks")
    if limit is not None and not max(reserved, 1) <= limit <= MAX_BLOCKS:
        raise InvalidRequest(
            f"limit_blocks must be at least 1 and what is reserved ({reserved}), not {limit}.", param="limit_blocks"
        )
    if not 0 <= pin_limit <= reserved:
        raise InvalidRequest(
            f"pin_limit_blocks comes out of what is reserved: 0 ... {reserved}, not {pin_limit}.",
            param="pin_limit_blocks",
        )


def _record(row: Row[str, str, float, QuotaRow | None, int]) -> QuotaRecord:
    tenant_id, name, weight, quota, pinned = row
    return QuotaRecord(
        tenant_id=tenant_id,
        tenant_name=name,
        reserved_blocks=0 if quota is None else quota.reserved_blocks,
        limit_blocks=None if quota is None else quota.limit_blocks,
        pin_limit_blocks=0 if quota is None else quota.pin_limit_blocks,
        weight=weight,
        pinned_blocks=int(pinned),
        updated_at=None if quota is None else quota.updated_at,
    )
