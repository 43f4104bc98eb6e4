"""The tables. Rows never leave this room: services hand out the frozen records of `records.py`.

Versions of an adapter are immutable: a row's digest never changes, and `retired` rows stay so that a version
number is never used twice.
"""

from __future__ import annotations

from datetime import UTC, datetime

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    DateTime,
    Dialect,
    ForeignKey,
    Index,
    LargeBinary,
    MetaData,
    String,
    TypeDecorator,
    UniqueConstraint,
    true,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

__all__ = ["AdapterRow", "ApiKeyRow", "Base", "PinRow", "PoolRow", "QuotaRow", "TenantRow", "UtcDateTime"]


class UtcDateTime(TypeDecorator[datetime]):
    """Timezone-aware UTC instants on every database (SQLite itself forgets time zones)."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError("naive datetimes are ambiguous; pass a timezone-aware one")
        return value.astimezone(UTC)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


class Base(DeclarativeBase):
    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "ck": "ck_%(table_name)s_%(constraint_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
            "pk": "pk_%(table_name)s",
        }
    )


class TenantRow(Base):
    __tablename__ = "tenants"
    __table_args__ = (
        UniqueConstraint("name"),
        CheckConstraint("weight > 0", name="weight_positive"),
        CheckConstraint("status IN ('active', 'suspended')", name="status_known"),
    )

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    name: Mapped[str] = mapped_column(String(64))
    weight: Mapped[float]
    status: Mapped[str] = mapped_column(String(16))
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)


class ApiKeyRow(Base):
    __tablename__ = "api_keys"
    __table_args__ = (Index(None, "tenant_id", "created_at", "id"),)

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"))
    name: Mapped[str] = mapped_column(String(64))
    env: Mapped[str] = mapped_column(String(16))
    secret_hmac: Mapped[bytes] = mapped_column(LargeBinary(32))
    scopes: Mapped[str] = mapped_column(String(256))  # sorted, separated by one space
    expires_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    revoked_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    last_used_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    replaced_by: Mapped[str | None] = mapped_column(String(32))  # set by rotation, so that it happens once
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)


class AdapterRow(Base):
    __tablename__ = "adapters"
    __table_args__ = (
        UniqueConstraint("tenant_id", "name", "version"),
        Index(None, "tenant_id", "created_at", "id"),
        Index(None, "digest"),
        CheckConstraint("version >= 1", name="version_positive"),
        CheckConstraint("status IN ('ready', 'retired')", name="status_known"),
    )

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"))
    name: Mapped[str] = mapped_column(String(64))
    version: Mapped[int]
    digest: Mapped[str] = mapped_column(String(64))
    base_model: Mapped[str] = mapped_column(String(255))
    rank: Mapped[int]
    size_bytes: Mapped[int] = mapped_column(BigInteger)
    status: Mapped[str] = mapped_column(String(16))
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)


class QuotaRow(Base):
    """What a tenant is promised: blocks of the device pool, bytes of the tiers below. Without a row nothing."""

    __tablename__ = "quotas"
    __table_args__ = (
        CheckConstraint("0 <= pin_limit_blocks AND pin_limit_blocks <= reserved_blocks", name="pins_out_of_reserved"),
        CheckConstraint("limit_blocks IS NULL OR limit_blocks >= reserved_blocks", name="limit_covers_reserved"),
        CheckConstraint(
            "0 <= host_pin_limit_bytes AND host_pin_limit_bytes <= host_reserved_bytes",
            name="host_pins_out_of_reserved",
        ),
        CheckConstraint(
            "host_limit_bytes IS NULL OR host_limit_bytes >= host_reserved_bytes", name="host_limit_covers_reserved"
        ),
        CheckConstraint("0 <= store_reserved_bytes", name="store_reserved_not_negative"),
        CheckConstraint(
            "store_limit_bytes IS NULL OR store_limit_bytes >= store_reserved_bytes", name="store_limit_covers_reserved"
        ),
    )

    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"), primary_key=True)
    reserved_blocks: Mapped[int]
    limit_blocks: Mapped[int | None]  # none: the whole pool
    pin_limit_blocks: Mapped[int]
    host_reserved_bytes: Mapped[int] = mapped_column(BigInteger)
    host_limit_bytes: Mapped[int | None] = mapped_column(BigInteger)  # none: all of it
    host_pin_limit_bytes: Mapped[int] = mapped_column(BigInteger)
    store_reserved_bytes: Mapped[int] = mapped_column(BigInteger)
    store_limit_bytes: Mapped[int | None] = mapped_column(BigInteger)  # none: all of it
    updated_at: Mapped[datetime] = mapped_column(UtcDateTime)


class PinRow(Base):
    """A prefix that a tenant has leased. Its tokens are kept, so that any engine finds the same blocks again."""

    __tablename__ = "pins"
    __table_args__ = (
        Index(None, "tenant_id", "created_at", "id"),
        Index(None, "expires_at"),
        CheckConstraint("blocks >= 1", name="blocks_positive"),
    )

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"))
    model: Mapped[str] = mapped_column(String(256))  # as the tenant named it
    adapter_digest: Mapped[str | None] = mapped_column(String(64))
    model_digest: Mapped[str] = mapped_column(String(64))  # another base model means other tokens
    token_ids: Mapped[bytes] = mapped_column(LargeBinary)  # of the granted blocks, little-endian uint32
    floor: Mapped[str] = mapped_column(String(8))
    blocks: Mapped[int]
    clipped_blocks: Mapped[int]
    ttl_s: Mapped[float]
    hard_max_s: Mapped[float]
    hits: Mapped[int]
    last_hit_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    expires_at: Mapped[datetime] = mapped_column(UtcDateTime)
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)


class PoolRow(Base):
    """How large a tier of the engine is, as a server last saw it: what quotas are judged by without an engine.

    The device pool is counted in blocks, the tiers below in bytes. A tier that the server has not got has no row.
    """

    __tablename__ = "kv_pools"

    name: Mapped[str] = mapped_column(String(32), primary_key=True)  # device, host, store
    capacity: Mapped[int | None] = mapped_column(BigInteger)  # none: the store does not say
    coverable: Mapped[int | None] = mapped_column(BigInteger)
    limits: Mapped[bool] = mapped_column(server_default=true())  # false: it can hold nobody to a limit
    block_bytes: Mapped[int] = mapped_column(BigInteger)
    block_tokens: Mapped[int]
    seen_at: Mapped[datetime] = mapped_column(UtcDateTime)
