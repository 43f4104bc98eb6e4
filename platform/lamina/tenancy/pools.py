"""How large the tiers of the engine are, as a server last saw them, and whether they cover what is to be reserved.

A quota of host memory is kept in whole blocks by the engine, so what is reserved there counts rounded up.
"""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import InstrumentedAttribute

from lamina.errors import InvalidRequest, QuotaNotCoverable
from lamina.tenancy.models import PoolRow, QuotaRow
from lamina.tenancy.records import PoolRecord
from lamina.types import QuotaPolicy, TierSize

__all__ = ["note_pools", "read_pools", "require_coverable"]

_DEVICE, _HOST, _STORE = "device", "host", "store"
_OTHER_STORE = "LMCache's format has no quotas: use a redis:// store for them."


async def note_pools(session: AsyncSession, pool: PoolRecord) -> None:
    """Keeps the sizes; a tier that the server has not got is forgotten."""
    sizes = {
        _DEVICE: TierSize(pool.capacity_blocks, pool.coverable_blocks),
        _HOST: pool.host,
        _STORE: pool.store,
    }
    for name, size in sizes.items():
        row = await session.get(PoolRow, name)
        if size is None:
            if row is not None:
                await session.delete(row)
            continue
        row = row or PoolRow(name=name)
        row.capacity, row.coverable, row.limits = size.capacity, size.coverable, size.limits
        row.block_bytes, row.block_tokens, row.seen_at = pool.block_bytes, pool.block_tokens, pool.seen_at
        session.add(row)


async def read_pools(session: AsyncSession) -> PoolRecord | None:
    """None: no server has run yet."""
    rows = {row.name: row for row in await session.scalars(select(PoolRow))}
    device = rows.get(_DEVICE)
    if device is None or device.capacity is None or device.coverable is None:
        return None
    return PoolRecord(
        capacity_blocks=device.capacity,
        coverable_blocks=device.coverable,
        block_bytes=device.block_bytes,
        block_tokens=device.block_tokens,
        seen_at=device.seen_at,
        host=_size(rows.get(_HOST)),
        store=_size(rows.get(_STORE)),
    )


def _size(row: PoolRow | None) -> TierSize | None:
    return None if row is None else TierSize(row.capacity, row.coverable, row.limits)


@dataclass(frozen=True, slots=True)
class _Tier:
    """What there is of a tier, in `unit`s, and what each tenant has reserved of it: `column`, counted in `whole`s."""

    name: str
    unit: str
    coverable: int | None
    column: InstrumentedAttribute[int]
    param: str
    whole: int = 1
    remedy: str = "Lower a reservation first."


async def require_coverable(session: AsyncSession, tenant_id: str, wanted: QuotaPolicy) -> None:
    """Raises QuotaNotCoverable, naming the tier, if the other tenants do not leave what is to be reserved.

    Raises InvalidRequest for a limit of a store that can hold nobody to one: the engine would refuse the whole policy.
    Before a server has run nobody knows, and the first one will say.
    """
    pool = await read_pools(session)
    if pool is None:
        return
    await _require(session, tenant_id, wanted.gpu.reserved, _device(pool))
    await _require(session, tenant_id, wanted.host.reserved, _host(pool))
    await _require(session, tenant_id, wanted.store.reserved, _store(pool))
    if wanted.store.limit is not None and pool.store is not None and not pool.store.limits:
        raise InvalidRequest(
            f"The server's store does not know who pays for a block, so it can hold nobody to a limit. {_OTHER_STORE}",
            param="store_limit_bytes",
        )


def _device(pool: PoolRecord) -> _Tier:
    return _Tier("gpu", "blocks", pool.coverable_blocks, QuotaRow.reserved_blocks, "reserved_blocks")


def _host(pool: PoolRecord) -> _Tier:
    column, param = QuotaRow.host_reserved_bytes, "host_reserved_bytes"
    if pool.host is None:
        remedy = "The server keeps no blocks in host memory: set LAMINA_HOST_KV_BYTES and start it first."
        return _Tier("host", "bytes of host memory", 0, column, param, remedy=remedy)
    return _Tier("host", "bytes of host memory", pool.host.coverable, column, param, whole=max(pool.block_bytes, 1))


def _store(pool: PoolRecord) -> _Tier:
    column, param = QuotaRow.store_reserved_bytes, "store_reserved_bytes"
    if pool.store is None:
        remedy = "The server has no store: set LAMINA_KV_STORE_URL and start it first."
        return _Tier("store", "bytes of the store", 0, column, param, remedy=remedy)
    size = pool.store
    if not size.limits:
        return _Tier("store", "bytes of the store", 0, column, param, remedy=_OTHER_STORE)
    if size.coverable == 0:
        remedy = "The store has no maxmemory: set it there, or LAMINA_KV_STORE_BYTES, and start the server first."
        return _Tier("store", "bytes of the store", 0, column, param, remedy=remedy)
    return _Tier("store", "bytes of the store", size.coverable, column, param)


async def _require(session: AsyncSession, tenant_id: str, reserved: int, tier: _Tier) -> None:
    if tier.coverable is None or reserved == 0:
        return
    others = await session.scalars(select(tier.column).where(QuotaRow.tenant_id != tenant_id))
    left = max(tier.coverable - sum(_rounded_up(other, tier.whole) for other in others), 0)
    if _rounded_up(reserved, tier.whole) > left:
        raise QuotaNotCoverable(
            f"{reserved} {tier.unit} cannot be reserved: of the {tier.coverable} that can be promised to all "
            f"tenants together, the others leave {left}. {tier.remedy}",
            limit=tier.coverable,
            need=reserved,
            have=left,
            tier=tier.name,
            param=tier.param,
        )


def _rounded_up(number: int, whole: int) -> int:
    return -(-number // whole) * whole
