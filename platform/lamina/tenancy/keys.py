"""API keys: issued once, verified on every request, revoked and rotated.

What is stored is an HMAC with the server's secret as pepper. Verification looks a key up by its public id,
then compares in constant time. Only who presents the right secret learns that a key is expired or revoked;
everyone else gets one and the same message.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from lamina.errors import Conflict, InvalidRequest, NotFound, Unauthenticated
from lamina.tenancy.cache import TtlCache
from lamina.tenancy.clock import Clock, utcnow
from lamina.tenancy.database import Database
from lamina.tenancy.keyformat import INVALID_KEY, ApiKey, check_environment
from lamina.tenancy.lastused import LastUsed
from lamina.tenancy.models import ApiKeyRow, TenantRow
from lamina.tenancy.names import check_key_name, is_plausible
from lamina.tenancy.principal import ALL_SCOPES, Principal
from lamina.tenancy.records import IssuedKey, KeyRecord, RotatedKey, TenantStatus
from lamina.tenancy.secret import kv_namespace
from lamina.tenancy.tenants import lock_tenant

__all__ = ["MAX_OVERLAP", "KeyService", "VerifiedKey"]

MAX_OVERLAP = timedelta(days=30)  # how long a rotated key may live on


@dataclass(frozen=True, slots=True)
class VerifiedKey:
    """What is remembered of a key that was right: its HMAC, never its text."""

    mac: bytes
    expires_at: datetime | None
    principal: Principal


class KeyService:
    """Keys of one environment ("live", "test", ...). Close it to write the last uses.

    A verified key is remembered for `cache.ttl_s` seconds (5 by default). A revocation through this object
    holds at once; another process's holds here after that time at the latest, as does a change of the tenant.
    """

    def __init__(
        self,
        *,
        database: Database,
        secret: bytes,
        environment: str = "live",
        cache: TtlCache[str, VerifiedKey] | None = None,
        last_used: LastUsed | None = None,
        clock: Clock = utcnow,
    ) -> None:
        self._database = database
        self._secret = secret
        self._environment = check_environment(environment)
        self._cache = cache if cache is not None else TtlCache()
        self._last_used = last_used if last_used is not None else LastUsed(database=database)
        self._clock = clock

    async def close(self) -> None:
        await self._last_used.close()

    async def authenticate(self, raw: object) -> Principal:
        """Who holds the key `raw`. Raises Unauthenticated for whatever is no key, or DatabaseUnavailable."""
        key = ApiKey.parse(raw)
        if key.env != self._environment:
            raise Unauthenticated(
                f"This API key is for the environment {key.env!r}, but this server is {self._environment!r}; "
                "use a key of this environment."
            )
        mac = key.mac(self._secret)
        entry = self._cache.get(key.key_id)
        if entry is None or not hmac.compare_digest(entry.mac, mac):
            entry = await self._look_up(key.key_id, mac)
        now = self._clock()
        if entry.expires_at is not None and entry.expires_at <= now:
            raise Unauthenticated(
                f"This API key expired at {entry.expires_at.isoformat()}; ask your administrator for another."
            )
        self._last_used.touch(key.key_id, now)
        return entry.principal

    async def issue(
        self, tenant_id: str, *, name: str, scopes: Iterable[str], expires_at: datetime | None = None
    ) -> IssuedKey:
        """A new key; its `raw` text cannot be had again. Raises NotFound (tenant) or InvalidRequest."""
        name, scopes = check_key_name(name), _check_scopes(scopes)
        self._check_expiry(expires_at)
        async with self._database.transaction() as session:
            await lock_tenant(session, tenant_id)
            return self._add(session, tenant_id=tenant_id, name=name, scopes=scopes, expires_at=expires_at)

    async def get(self, key_id: str, *, tenant_id: str | None = None) -> KeyRecord:
        """Raises NotFound, also for another tenant's key if `tenant_id` is given."""
        async with self._database.session() as session:
            return _record(await _find(session, key_id, tenant_id))

    async def list(self, tenant_id: str | None = None) -> tuple[KeyRecord, ...]:
        """The tenant's keys (None: everyone's), oldest first, revoked ones included."""
        query = select(ApiKeyRow).order_by(ApiKeyRow.created_at, ApiKeyRow.id)
        if tenant_id is not None:
            query = query.where(ApiKeyRow.tenant_id == tenant_id)
        async with self._database.session() as session:
            return tuple(_record(row) for row in await session.scalars(query))

    async def revoke(self, key_id: str, *, tenant_id: str | None = None) -> KeyRecord:
        """Ends the key now; a second time changes nothing. Raises NotFound."""
        async with self._database.transaction() as session:
            row = await _find(session, key_id, tenant_id, lock=True)
            row.revoked_at = row.revoked_at or self._clock()
            record = _record(row)
        self._cache.forget(key_id)
        return record

    async def rotate(
        self,
        key_id: str,
        *,
        overlap: timedelta = timedelta(0),
        expires_at: datetime | None = None,
        tenant_id: str | None = None,
    ) -> RotatedKey:
        """A successor with the same name and scopes; the old key lives on for `overlap` (zero: it ends now).

        Both happen in one transaction. The successor expires at `expires_at`, by default as the old key did.
        Raises NotFound, InvalidRequest, or Conflict for a key that is over or was rotated before.
        """
        if not timedelta(0) <= overlap <= MAX_OVERLAP:
            raise InvalidRequest(f"overlap must be between 0 and {MAX_OVERLAP.days} days.", param="overlap")
        self._check_expiry(expires_at)
        async with self._database.transaction() as session:
            old = await _find(session, key_id, tenant_id, lock=True)
            now = self._clock()
            _refuse_rotation(old, now)
            issued = self._add(
                session,
                tenant_id=old.tenant_id,
                name=old.name,
                scopes=frozenset(old.scopes.split()),
                expires_at=expires_at or old.expires_at,
            )
            old.replaced_by = issued.record.id
            old.expires_at = min(old.expires_at or now + overlap, now + overlap)
            record = _record(old)
        self._cache.forget(key_id)
        return RotatedKey(issued=issued, old=record)

    async def _look_up(self, key_id: str, mac: bytes) -> VerifiedKey:
        epoch = self._cache.epoch
        query = select(ApiKeyRow, TenantRow).join(TenantRow, TenantRow.id == ApiKeyRow.tenant_id)
        async with self._database.session() as session:
            found = (await session.execute(query.where(ApiKeyRow.id == key_id))).one_or_none()
        # An unknown id is compared as well, so that both cases take the same time.
        expected = bytes(found[0].secret_hmac) if found is not None else bytes(len(mac))
        if not hmac.compare_digest(expected, mac) or found is None:
            raise Unauthenticated(INVALID_KEY)
        row, tenant = found
        if row.revoked_at is not None:
            raise Unauthenticated("This API key was revoked; ask your administrator for a new one.")
        if tenant.status != TenantStatus.ACTIVE.value:
            raise Unauthenticated("The tenant of this API key is suspended; ask your administrator.")
        entry = VerifiedKey(mac, row.expires_at, self._principal(row, tenant))
        self._cache.put(key_id, entry, epoch=epoch)
        return entry

    def _principal(self, row: ApiKeyRow, tenant: TenantRow) -> Principal:
        return Principal(
            tenant_id=tenant.id,
            tenant_name=tenant.name,
            key_id=row.id,
            scopes=frozenset(row.scopes.split()),
            weight=tenant.weight,
            namespace=kv_namespace(self._secret, tenant.id),
        )

    def _add(
        self,
        session: AsyncSession,
        *,
        tenant_id: str,
        name: str,
        scopes: frozenset[str],
        expires_at: datetime | None,
    ) -> IssuedKey:
        key = ApiKey.generate(self._environment)
        row = ApiKeyRow(
            id=key.key_id,
            tenant_id=tenant_id,
            name=name,
            env=key.env,
            secret_hmac=key.mac(self._secret),
            scopes=" ".join(sorted(scopes)),
            expires_at=expires_at,
            created_at=self._clock(),
        )
        session.add(row)
        return IssuedKey(raw=key.raw, record=_record(row))

    def _check_expiry(self, expires_at: datetime | None) -> None:
        if expires_at is None:
            return
        if expires_at.tzinfo is None:
            raise InvalidRequest("expires_at needs a time zone, for example 2027-01-31T00:00:00Z.", param="expires_at")
        if expires_at <= self._clock():
            raise InvalidRequest(f"expires_at {expires_at.isoformat()} is not in the future.", param="expires_at")


async def _find(session: AsyncSession, key_id: str, tenant_id: str | None, *, lock: bool = False) -> ApiKeyRow:
    query = select(ApiKeyRow).where(ApiKeyRow.id == key_id)
    if tenant_id is not None:
        query = query.where(ApiKeyRow.tenant_id == tenant_id)
    query = query.with_for_update() if lock else query
    row = await session.scalar(query) if is_plausible(key_id) else None
    if row is None:
        raise NotFound(f"There is no API key {key_id!r}. 'lamina keys list' shows all.", param="key_id")
    return row


def _refuse_rotation(row: ApiKeyRow, now: datetime) -> None:
    if row.revoked_at is not None:
        raise Conflict(f"API key {row.id} was revoked; issue a new one instead.")
    if row.replaced_by is not None:
        raise Conflict(f"API key {row.id} was rotated already, to {row.replaced_by}; rotate that one.")
    if row.expires_at is not None and row.expires_at <= now:
        raise Conflict(f"API key {row.id} expired at {row.expires_at.isoformat()}; issue a new one instead.")


def _check_scopes(scopes: Iterable[str]) -> frozenset[str]:
    wanted = frozenset(str(scope) for scope in scopes)
    known = ", ".join(sorted(ALL_SCOPES))
    if not wanted:
        raise InvalidRequest(f"An API key needs at least one scope of: {known}.", param="scopes")
    if unknown := wanted - ALL_SCOPES:
        raise InvalidRequest(
            f"Unknown scope(s) {', '.join(map(repr, sorted(unknown)))}; known are: {known}.", param="scopes"
        )
    return wanted


def _record(row: ApiKeyRow) -> KeyRecord:
    return KeyRecord(
        id=row.id,
        tenant_id=row.tenant_id,
        name=row.name,
        env=row.env,
        scopes=frozenset(row.scopes.split()),
        expires_at=row.expires_at,
        revoked_at=row.revoked_at,
        last_used_at=row.last_used_at,
        replaced_by=row.replaced_by,
        created_at=row.created_at,
    )
