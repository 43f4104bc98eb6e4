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
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

__all__ = ["AdapterRow", "ApiKeyRow", "Base", "TenantRow", "UtcDateTime"]


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
