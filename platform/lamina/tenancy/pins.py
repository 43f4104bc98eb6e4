"""Pins as they outlive engines: who leased which prefix, until when."""

from __future__ import annotations

import struct
from collections.abc import Collection, Sequence
from datetime import UTC, datetime

from sqlalchemy import delete, func, select
from sqlalchemy.ext.asyncio import AsyncSession

from lamina.errors import LimitExceeded, NotFound
from lamina.tenancy.clock import Clock, utcnow
from lamina.tenancy.database import Database
from lamina.tenancy.models import PinRow
from lamina.tenancy.names import is_plausible
from lamina.tenancy.records import PinEntry
from lamina.tenancy.secret import kv_namespace
from lamina.tenancy.tenants import lock_tenant
from lamina.types import PinOrder, PinRecord, PinState

__all__ = ["PinService"]

_LOOK_UP = 500  # values in one query: SQLite and PostgreSQL bound them


class PinService:
    """Another tenant's pin is as unknown as one that does not exist, and so is an expired one."""

    def __init__(self, *, database: Database, secret: bytes, max_pins: int = 1000, clock: Clock = utcnow) -> None:
        """`max_pins`: of one tenant at a time."""
        self._database = database
        self._secret = secret
        self._limit = max_pins
        self._clock = clock

    async def add(
        self, tenant_id: str, *, model: str, model_digest: str, order: PinOrder, pin: PinState, block_tokens: int
    ) -> PinEntry:
        """Keeps what an engine has granted. Raises LimitExceeded, and NotFound for an unknown tenant."""
        row = PinRow(
            id=pin.pin_id,
            tenant_id=tenant_id,
            model=model,
            adapter_digest=order.adapter,
            model_digest=model_digest,
            token_ids=_packed(order.token_ids[: pin.blocks * block_tokens]),
            floor=pin.floor,
            blocks=pin.blocks,
            clipped_blocks=pin.clipped_blocks,
            ttl_s=pin.ttl_s,
            hard_max_s=pin.hard_max_s,
            hits=pin.hits,
            last_hit_at=None if pin.last_hit_at is None else _instant(pin.last_hit_at),
            expires_at=_instant(pin.expires_at),
            created_at=_instant(pin.created_at),
        )
        async with self._database.transaction() as session:
            await lock_tenant(session, tenant_id)
            await self._check_number(session, tenant_id)
            session.add(row)
            await session.flush()
            return _entry(row)

    async def get(self, tenant_id: str, pin_id: str) -> PinEntry:
        """Raises NotFound."""
        async with self._database.session() as session:
            return _entry(await self._find(session, tenant_id, pin_id))

    async def list(self, tenant_id: str) -> tuple[PinEntry, ...]:
        """The tenant's pins that have not expired, oldest first."""
        mine = (PinRow.tenant_id == tenant_id) & (PinRow.expires_at > self._clock())
        async with self._database.session() as session:
            rows = await session.scalars(select(PinRow).where(mine).order_by(PinRow.created_at, PinRow.id))
            return tuple(map(_entry, rows))

    async def remove(self, tenant_id: str, pin_id: str) -> None:
        """Raises NotFound."""
        async with self._database.transaction() as session:
            await session.delete(await self._find(session, tenant_id, pin_id))

    async def update(self, tenant_id: str, pin: PinState) -> PinEntry:
        """After a renewal: the engine's times count. Raises NotFound."""
        async with self._database.transaction() as session:
            row = await self._find(session, tenant_id, pin.pin_id)
            row.ttl_s, row.expires_at = pin.ttl_s, _instant(pin.expires_at)
            return _entry(row)

    # --- for engines --------------------------------------------------------------------------------------

    async def alive(self, model_digest: str) -> frozenset[str]:
        """Ids of all pins on this base model that have not expired."""
        async with self._database.session() as session:
            living = (PinRow.model_digest == model_digest) & (PinRow.expires_at > self._clock())
            return frozenset(await session.scalars(select(PinRow.id).where(living)))

    async def records(self, pin_ids: Collection[str]) -> tuple[PinRecord, ...]:
        """What an engine needs to take these pins back, oldest first."""
        wanted = sorted(pin_ids)
        found: list[PinRow] = []
        async with self._database.session() as session:
            for start in range(0, len(wanted), _LOOK_UP):
                some = PinRow.id.in_(wanted[start : start + _LOOK_UP])
                found += await session.scalars(select(PinRow).where(some))
        return tuple(map(self._record, sorted(found, key=lambda row: (row.created_at, row.id))))

    async def note(self, pins: Sequence[PinState]) -> None:
        """Keeps what hits have changed since, and drops the rows of pins that have expired."""
        by_id = {pin.pin_id: pin for pin in pins if pin.hits}
        wanted = sorted(by_id)
        async with self._database.transaction() as session:
            for start in range(0, len(wanted), _LOOK_UP):
                some = PinRow.id.in_(wanted[start : start + _LOOK_UP])
                for row in await session.scalars(select(PinRow).where(some)):
                    _note(row, by_id[row.id])
            await session.execute(delete(PinRow).where(PinRow.expires_at <= self._clock()))

    # --- how ----------------------------------------------------------------------------------------------

    async def _check_number(self, session: AsyncSession, tenant_id: str) -> None:
        mine = (PinRow.tenant_id == tenant_id) & (PinRow.expires_at > self._clock())
        used = await session.scalar(select(func.count()).select_from(PinRow).where(mine)) or 0
        if used >= self._limit:
            raise LimitExceeded(
                f"This tenant has {used} of at most {self._limit} pins; end one first.",
                limit=self._limit,
                need=1,
                have=max(0, self._limit - used),
            )

    async def _find(self, session: AsyncSession, tenant_id: str, pin_id: str) -> PinRow:
        mine = (PinRow.id == pin_id) & (PinRow.tenant_id == tenant_id) & (PinRow.expires_at > self._clock())
        row: PinRow | None = await session.scalar(select(PinRow).where(mine)) if is_plausible(pin_id) else None
        if row is None:
            raise NotFound(f"There is no pin {pin_id!r}; it may have expired.")
        return row

    def _record(self, row: PinRow) -> PinRecord:
        order = PinOrder(
            namespace=kv_namespace(self._secret, row.tenant_id),
            token_ids=_unpacked(row.token_ids),
            adapter=row.adapter_digest,
            floor=row.floor,
            ttl_s=row.ttl_s,
            hard_max_s=row.hard_max_s,
        )
        return PinRecord(
            pin_id=row.id,
            order=order,
            created_at=row.created_at.timestamp(),
            expires_at=row.expires_at.timestamp(),
            hits=row.hits,
            last_hit_at=None if row.last_hit_at is None else row.last_hit_at.timestamp(),
            clipped_blocks=row.clipped_blocks,
        )


def _note(row: PinRow, pin: PinState) -> None:
    row.hits = max(row.hits, pin.hits)
    row.last_hit_at = None if pin.last_hit_at is None else _instant(pin.last_hit_at)
    row.expires_at = max(row.expires_at, _instant(pin.expires_at))


def _instant(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


def _packed(token_ids: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(token_ids)}I", *token_ids)


def _unpacked(data: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(data) // 4}I", data)


def _entry(row: PinRow) -> PinEntry:
    return PinEntry(
        id=row.id,
        tenant_id=row.tenant_id,
        model=row.model,
        adapter_digest=row.adapter_digest,
        floor=row.floor,
        blocks=row.blocks,
        clipped_blocks=row.clipped_blocks,
        ttl_s=row.ttl_s,
        hits=row.hits,
        last_hit_at=row.last_hit_at,
        expires_at=row.expires_at,
        created_at=row.created_at,
    )
