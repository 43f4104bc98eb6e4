"""What the services answer: frozen values, safe to keep after the session is gone."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Generic, TypeVar

from lamina.types import TierSize

__all__ = [
    "AdapterRecord",
    "AdapterStatus",
    "DeletedAdapters",
    "DeletedTenant",
    "IssuedKey",
    "KeyRecord",
    "Page",
    "PinEntry",
    "PoolRecord",
    "QuotaRecord",
    "Reconciliation",
    "RotatedKey",
    "Tenant",
    "TenantStatus",
]

T = TypeVar("T")


class TenantStatus(StrEnum):
    ACTIVE = "active"
    SUSPENDED = "suspended"  # its keys are refused; nothing is deleted


class AdapterStatus(StrEnum):
    READY = "ready"
    RETIRED = "retired"  # resolves no more; the row keeps its version number taken


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    id: str  # ten_...
    name: str
    weight: float
    status: TenantStatus
    created_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRecord:
    """An API key without its secret."""

    id: str  # key_...
    tenant_id: str
    name: str
    env: str
    scopes: frozenset[str]
    expires_at: datetime | None
    revoked_at: datetime | None
    last_used_at: datetime | None  # lags by the flush interval
    replaced_by: str | None
    created_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class IssuedKey:
    """A new key. `raw` is shown once and stored nowhere; it is kept out of `repr`, and so out of logs."""

    raw: str
    record: KeyRecord

    def __repr__(self) -> str:
        return f"IssuedKey(raw=<secret>, record={self.record!r})"


@dataclass(frozen=True, slots=True, kw_only=True)
class RotatedKey:
    """The new key, and the old one with the expiry that the overlap gave it."""

    issued: IssuedKey
    old: KeyRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterRecord:
    """One immutable version of a tenant's adapter."""

    id: str  # adp_...
    tenant_id: str
    name: str
    version: int
    digest: str  # hex; names the folder in the adapter store
    base_model: str
    rank: int
    size_bytes: int
    status: AdapterStatus
    created_at: datetime
    created: bool = False  # True only in the answer of the intake that made this version

    @property
    def reference(self) -> str:
        """The model name that means exactly this version, for example "support@3"."""
        return f"{self.name}@{self.version}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeletedTenant:
    """Who was deleted, and the digests its adapter versions had; other tenants may have them too."""

    tenant: Tenant
    adapter_digests: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeletedAdapters:
    """What a deletion retired, and the digests that no row needs any more (their files are gone)."""

    retired: tuple[AdapterRecord, ...]
    removed_digests: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reconciliation:
    """Difference between the store's folders and the table's rows."""

    removed_digests: tuple[str, ...]  # orphan folders, removed
    missing: tuple[AdapterRecord, ...]  # ready rows whose files are gone: upload them again or delete them


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaRecord:
    """What a tenant is promised of each tier: 0 <= pin_limit <= reserved <= limit. In blocks: the device pool."""

    tenant_id: str
    tenant_name: str
    reserved_blocks: int
    limit_blocks: int | None  # None: the whole pool
    pin_limit_blocks: int
    host_reserved_bytes: int
    host_limit_bytes: int | None
    host_pin_limit_bytes: int
    store_reserved_bytes: int
    store_limit_bytes: int | None
    weight: float  # the tenant's
    pinned_blocks: int  # on the device, by pins that have not expired
    host_pinned_blocks: int  # in host memory, likewise
    updated_at: datetime | None  # None: never set, so these are the defaults


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolRecord:
    """The block pool and the tiers below as a server last saw them."""

    capacity_blocks: int
    coverable_blocks: int  # can be promised to all tenants together
    block_bytes: int
    block_tokens: int
    seen_at: datetime
    host: TierSize | None = None  # None: host memory is no tier there
    store: TierSize | None = None  # None: there is none


@dataclass(frozen=True, slots=True, kw_only=True)
class PinEntry:
    """A pin as it is kept. What it holds right now only the engine knows."""

    id: str  # pin_...
    tenant_id: str
    model: str
    adapter_digest: str | None
    floor: str
    blocks: int
    clipped_blocks: int
    ttl_s: float
    hits: int
    last_hit_at: datetime | None
    expires_at: datetime
    created_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Page(Generic[T]):
    """A slice of a list, newest first; pass `last_id` as `after` to get the next one."""

    data: tuple[T, ...]
    has_more: bool
    first_id: str | None
    last_id: str | None
