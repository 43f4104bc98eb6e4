"""What each tenant is promised of the block pool and the tiers below. The engine enforces it; here it is kept."""

from __future__ import annotations

from sqlalchemy import ColumnElement, Row, ScalarSelect, Select, func, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from lamina.errors import InvalidRequest
from lamina.tenancy.clock import Clock, utcnow
from lamina.tenancy.database import Database
from lamina.tenancy.models import PinRow, QuotaRow, TenantRow
from lamina.tenancy.pools import note_pools, read_pools, require_coverable
from lamina.tenancy.records import PoolRecord, QuotaRecord
from lamina.tenancy.secret import kv_namespace
from lamina.tenancy.tenants import find_tenant
from lamina.types import QuotaPolicy, TierQuota, TierSize

__all__ = ["QuotaService"]

MAX_BLOCKS = 2**31 - 1
MAX_BYTES = 2**62 - 1


class QuotaService:
    """Quotas by tenant, over all processes that share the database; servers follow within seconds.

    All reservations together never exceed what a tier can cover, as far as a server has said how large that is.
    """

    def __init__(self, *, database: Database, secret: bytes, clock: Clock = utcnow) -> None:
        self._database = database
        self._secret = secret
        self._clock = clock
        self._tenants: dict[str, str] = {}  # by namespace
        self._namespaces: dict[str, str] = {}  # by tenant, as of the last look

    async def set(
        self,
        tenant: str,
        *,
        reserved_blocks: int = 0,
        limit_blocks: int | None = None,
        pin_limit_blocks: int = 0,
        host_reserved_bytes: int = 0,
        host_limit_bytes: int | None = None,
        host_pin_limit_bytes: int = 0,
        store_reserved_bytes: int = 0,
        store_limit_bytes: int | None = None,
    ) -> QuotaRecord:
        """Replaces a tenant's quota in all tiers. Raises NotFound, InvalidRequest, QuotaNotCoverable; then nothing
        changed."""
        gpu = TierQuota(reserved=reserved_blocks, limit=limit_blocks, pin_limit=pin_limit_blocks)
        host = TierQuota(reserved=host_reserved_bytes, limit=host_limit_bytes, pin_limit=host_pin_limit_bytes)
        store = TierQuota(reserved=store_reserved_bytes, limit=store_limit_bytes)
        _check(gpu, "{}_blocks", MAX_BLOCKS)
        _check(host, "host_{}_bytes", MAX_BYTES)
        _check(store, "store_{}_bytes", MAX_BYTES)
        async with self._database.transaction() as session:
            await self._database.lock(session, "quotas")
            owner = await find_tenant(session, tenant)
            wanted = QuotaPolicy(namespace="", gpu=gpu, host=host, store=store)
            await require_coverable(session, owner.id, wanted)
            row = await session.get(QuotaRow, owner.id) or QuotaRow(tenant_id=owner.id)
            _write(row, wanted)
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
            weight=weight,
            gpu=TierQuota(reserved=quota.reserved_blocks, limit=quota.limit_blocks, pin_limit=quota.pin_limit_blocks),
            host=TierQuota(
                reserved=quota.host_reserved_bytes,
                limit=quota.host_limit_bytes,
                pin_limit=quota.host_pin_limit_bytes,
            ),
            store=TierQuota(reserved=quota.store_reserved_bytes, limit=quota.store_limit_bytes),
        )

    async def deleted(self, namespaces: frozenset[str]) -> frozenset[str]:
        """Those of these that no tenant has, or not any more."""
        async with self._database.session() as session:
            found = frozenset(await session.scalars(select(TenantRow.id)))
        known = self._namespaces
        self._namespaces = {id_: known.get(id_) or kv_namespace(self._secret, id_) for id_ in found}
        return namespaces - frozenset(self._namespaces.values())

    async def tenants_of(self, namespaces: frozenset[str]) -> dict[str, str]:
        """Which tenant (by id) has which of these namespaces; unknown ones are left out."""
        if not namespaces <= self._tenants.keys():
            async with self._database.session() as session:
                found = await session.scalars(select(TenantRow.id))
                self._tenants = {kv_namespace(self._secret, tenant_id): tenant_id for tenant_id in found}
        return {namespace: self._tenants[namespace] for namespace in namespaces & self._tenants.keys()}

    # --- the pool -----------------------------------------------------------------------------------------

    async def note_pool(
        self,
        *,
        capacity_blocks: int,
        coverable_blocks: int,
        block_bytes: int,
        block_tokens: int,
        host: TierSize | None = None,
        store: TierSize | None = None,
    ) -> None:
        """A server says how large its engine's pool is, and the tiers below if it has any."""
        record = PoolRecord(
            capacity_blocks=capacity_blocks,
            coverable_blocks=coverable_blocks,
            block_bytes=block_bytes,
            block_tokens=block_tokens,
            seen_at=self._clock(),
            host=host,
            store=store,
        )
        async with self._database.transaction() as session:
            await self._database.lock(session, "quotas")
            await note_pools(session, record)

    async def pool(self) -> PoolRecord | None:
        """None: no server has run yet."""
        async with self._database.session() as session:
            return await read_pools(session)

    # --- how ----------------------------------------------------------------------------------------------

    def _query(self) -> Select[str, str, float, QuotaRow | None, int, int]:
        alive = (PinRow.tenant_id == TenantRow.id) & (PinRow.expires_at > self._clock())
        gpu, host = (_pinned_blocks(alive & (PinRow.floor == floor)) for floor in ("gpu", "host"))
        return select(TenantRow.id, TenantRow.name, TenantRow.weight, QuotaRow, gpu, host).outerjoin(QuotaRow)

    async def _one(self, session: AsyncSession, tenant_id: str) -> QuotaRecord:
        return _record((await session.execute(self._query().where(TenantRow.id == tenant_id))).one())


def _pinned_blocks(which: ColumnElement[bool]) -> ScalarSelect[int]:
    return select(func.coalesce(func.sum(PinRow.blocks), 0)).where(which).correlate(TenantRow).scalar_subquery()


def _check(quota: TierQuota, name: str, most: int) -> None:
    """`name`: how the fields are called to whoever sets them."""
    reserved, limit, pin_limit = (name.format(field) for field in ("reserved", "limit", "pin_limit"))
    if not 0 <= quota.reserved <= most:
        raise InvalidRequest(f"{reserved} must be 0 ... {most}, not {quota.reserved}.", param=reserved)
    if quota.limit is not None and not max(quota.reserved, 1) <= quota.limit <= most:
        raise InvalidRequest(
            f"{limit} must be at least 1 and what is reserved ({quota.reserved}), not {quota.limit}.", param=limit
        )
    if not 0 <= quota.pin_limit <= quota.reserved:
        raise InvalidRequest(
            f"{pin_limit} comes out of what is reserved: 0 ... {quota.reserved}, not {quota.pin_limit}.",
            param=pin_limit,
        )


def _write(row: QuotaRow, wanted: QuotaPolicy) -> None:
    row.reserved_blocks, row.limit_blocks, row.pin_limit_blocks = (
        wanted.gpu.reserved,
        wanted.gpu.limit,
        wanted.gpu.pin_limit,
    )
    row.host_reserved_bytes, row.host_limit_bytes, row.host_pin_limit_bytes = (
        wanted.host.reserved,
        wanted.host.limit,
        wanted.host.pin_limit,
    )
    row.store_reserved_bytes, row.store_limit_bytes = wanted.store.reserved, wanted.store.limit


def _record(row: Row[str, str, float, QuotaRow | None, int, int]) -> QuotaRecord:
    tenant_id, name, weight, quota, pinned, host_pinned = row
    return QuotaRecord(
        tenant_id=tenant_id,
        tenant_name=name,
        reserved_blocks=0 if quota is None else quota.reserved_blocks,
        limit_blocks=None if quota is None else quota.limit_blocks,
        pin_limit_blocks=0 if quota is None else quota.pin_limit_blocks,
        host_reserved_bytes=0 if quota is None else quota.host_reserved_bytes,
        host_limit_bytes=None if quota is None else quota.host_limit_bytes,
        host_pin_limit_bytes=0 if quota is None else quota.host_pin_limit_bytes,
        store_reserved_bytes=0 if quota is None else quota.store_reserved_bytes,
        store_limit_bytes=None if quota is None else quota.store_limit_bytes,
        weight=weight,
        pinned_blocks=int(pinned),
        host_pinned_blocks=int(host_pinned),
        updated_at=None if quota is None else quota.updated_at,
    )
