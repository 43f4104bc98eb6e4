"""API keys on SQLite and PostgreSQL: who gets in, who learns what, and when a change takes effect."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime, timedelta

import pytest
import pytest_asyncio
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from fixtures.tenancy import SECRET, Time
from lamina.errors import Conflict, DatabaseUnavailable, InvalidRequest, NotFound, Unauthenticated
from lamina.tenancy.cache import TtlCache
from lamina.tenancy.database import Database
from lamina.tenancy.keyformat import INVALID_KEY, ApiKey
from lamina.tenancy.keys import MAX_OVERLAP, KeyService, VerifiedKey
from lamina.tenancy.lastused import LastUsed
from lamina.tenancy.records import IssuedKey, Tenant
from lamina.tenancy.tenants import TenantService

TTL_S = 5.0


def make_keys(database: Database, time: Time, *, environment: str = "live", secret: bytes = SECRET) -> KeyService:
    """One process's service; two of them on one database stand for two processes."""
    cache = TtlCache[str, VerifiedKey](ttl_s=TTL_S, monotonic=time.monotonic)
    last_used = LastUsed(database=database, interval_s=3600)
    return KeyService(
        database=database,
        secret=secret,
        environment=environment,
        cache=cache,
        last_used=last_used,
        clock=time,
    )


@pytest_asyncio.fixture
async def keys(database: Database, time: Time) -> AsyncIterator[KeyService]:
    service = make_keys(database, time)
    yield service
    await service.close()


@pytest_asyncio.fixture
async def elsewhere(database: Database, time: Time) -> AsyncIterator[KeyService]:
    service = make_keys(database, time)
    yield service
    await service.close()


@pytest_asyncio.fixture
async def acme(database: Database, time: Time) -> Tenant:
    return await TenantService(database=database, clock=time).create(name="acme", weight=2.0)


@pytest_asyncio.fixture
async def issued(keys: KeyService, acme: Tenant) -> IssuedKey:
    return await keys.issue(acme.id, name="ci", scopes=["inference", "adapters:read"])


async def test_a_principal_knows_its_tenant(keys: KeyService, issued: IssuedKey, acme: Tenant) -> None:
    """Id, name, weight, scopes and the KV namespace; the second time comes from the cache."""
    first = await keys.authenticate(issued.raw)
    assert (first.tenant_id, first.tenant_name, first.weight) == (acme.id, "acme", 2.0)
    assert first.key_id == issued.record.id
    assert first.scopes == {"inference", "adapters:read"}
    assert await keys.authenticate(issued.raw) is first


async def test_the_secret_is_nowhere_but_in_the_answer(database: Database, issued: IssuedKey, keys: KeyService) -> None:
    """Neither table, repr nor record holds it; the HMAC needs the server's secret."""
    secret = ApiKey.parse(issued.raw).secret
    assert secret not in repr(issued)
    async with database.session() as session:
        row = (await session.execute(text("SELECT * FROM api_keys"))).one()
    assert secret not in repr(row)
    assert secret.encode() not in bytes(row.secret_hmac)


async def test_malformed_unknown_and_wrong_secret_look_alike(keys: KeyService, issued: IssuedKey) -> None:
    """A stranger cannot tell a wrong secret for a real id from nonsense."""
    real, fake = ApiKey.parse(issued.raw), ApiKey.generate("live")
    tries = ["nonsense", fake.raw, ApiKey("live", real.public_id, fake.secret).raw]
    for warm in (False, True):
        for raw in tries:
            with pytest.raises(Unauthenticated) as caught:
                await keys.authenticate(raw)
            assert caught.value.message == INVALID_KEY
        if not warm:
            await keys.authenticate(issued.raw)


async def test_a_wrong_secret_never_learns_of_revocation_or_expiry(keys: KeyService, issued: IssuedKey) -> None:
    """Only the holder of the secret gets a reason."""
    await keys.revoke(issued.record.id)
    forged = ApiKey("live", ApiKey.parse(issued.raw).public_id, ApiKey.generate("live").secret)
    with pytest.raises(Unauthenticated) as caught:
        await keys.authenticate(forged.raw)
    assert caught.value.message == INVALID_KEY
    with pytest.raises(Unauthenticated, match="revoked"):
        await keys.authenticate(issued.raw)


async def test_a_key_of_another_environment_is_told_so(database: Database, time: Time, issued: IssuedKey) -> None:
    """A live key on a test server: a distinct message, with both names."""
    staging = make_keys(database, time, environment="test")
    with pytest.raises(Unauthenticated, match=r"'live'.*'test'"):
        await staging.authenticate(issued.raw)
    await staging.close()


async def test_another_servers_secret_voids_keys(database: Database, time: Time, issued: IssuedKey) -> None:
    """A copied table is useless without the secret file."""
    thief = make_keys(database, time, secret=bytes(32))
    with pytest.raises(Unauthenticated) as caught:
        await thief.authenticate(issued.raw)
    assert caught.value.message == INVALID_KEY
    await thief.close()


async def test_expiry_holds_at_once_even_for_a_cached_key(keys: KeyService, acme: Tenant, time: Time) -> None:
    """The cache never stretches a key's life."""
    issued = await keys.issue(acme.id, name="short", scopes=["inference"], expires_at=time.now + timedelta(seconds=2))
    await keys.authenticate(issued.raw)
    time.advance(seconds=1.9)
    await keys.authenticate(issued.raw)
    time.advance(seconds=0.1)
    with pytest.raises(Unauthenticated, match="expired at 2030-01-01T00:00:02"):
        await keys.authenticate(issued.raw)


async def test_revocation_here_at_once_elsewhere_within_the_ttl(
    keys: KeyService, elsewhere: KeyService, issued: IssuedKey, time: Time
) -> None:
    """The stated bound is the real one."""
    await keys.authenticate(issued.raw)
    await elsewhere.authenticate(issued.raw)
    await keys.revoke(issued.record.id)
    with pytest.raises(Unauthenticated, match="revoked"):
        await keys.authenticate(issued.raw)
    await elsewhere.authenticate(issued.raw)
    time.advance(seconds=TTL_S)
    with pytest.raises(Unauthenticated, match="revoked"):
        await elsewhere.authenticate(issued.raw)


async def test_revoking_twice_keeps_the_first_time(keys: KeyService, issued: IssuedKey, time: Time) -> None:
    """Revocation is idempotent."""
    first = await keys.revoke(issued.record.id)
    time.advance(days=1)
    assert await keys.revoke(issued.record.id) == first
    assert first.revoked_at == time.now - timedelta(days=1)


async def test_a_suspended_tenants_keys_are_refused_and_come_back(
    database: Database, keys: KeyService, issued: IssuedKey, acme: Tenant, time: Time
) -> None:
    """Suspension needs no change to any key."""
    tenants = TenantService(database=database, clock=time)
    await tenants.update(acme.id, status="suspended")
    with pytest.raises(Unauthenticated, match="suspended"):
        await keys.authenticate(issued.raw)
    await tenants.update(acme.id, status="active")
    await keys.authenticate(issued.raw)


async def test_rotation_with_overlap(keys: KeyService, elsewhere: KeyService, issued: IssuedKey, time: Time) -> None:
    """Both keys work during the overlap, in every process; then only the successor, with the same rights."""
    await elsewhere.authenticate(issued.raw)
    rotated = await keys.rotate(issued.record.id, overlap=timedelta(hours=1))
    assert rotated.old.replaced_by == rotated.issued.record.id
    for service in (keys, elsewhere):
        old, new = await service.authenticate(issued.raw), await service.authenticate(rotated.issued.raw)
        assert (old.tenant_id, old.scopes, old.namespace) == (new.tenant_id, new.scopes, new.namespace)
    time.advance(hours=1)
    for service in (keys, elsewhere):
        with pytest.raises(Unauthenticated, match="expired"):
            await service.authenticate(issued.raw)
        await service.authenticate(rotated.issued.raw)


async def test_rotation_without_overlap_ends_the_old_key_now(keys: KeyService, issued: IssuedKey) -> None:
    """The default is the safe one after a leak."""
    await keys.authenticate(issued.raw)
    rotated = await keys.rotate(issued.record.id)
    with pytest.raises(Unauthenticated, match="expired"):
        await keys.authenticate(issued.raw)
    await keys.authenticate(rotated.issued.raw)


async def test_rotation_never_lengthens_the_old_key(keys: KeyService, acme: Tenant, time: Time) -> None:
    """An overlap beyond its expiry is cut; the successor inherits the expiry unless told otherwise."""
    soon, later = time.now + timedelta(hours=1), time.now + timedelta(days=90)
    issued = await keys.issue(acme.id, name="k", scopes=["inference"], expires_at=soon)
    rotated = await keys.rotate(issued.record.id, overlap=timedelta(days=1), expires_at=later)
    assert rotated.old.expires_at == soon
    assert rotated.issued.record.expires_at == later
    again = await keys.rotate(rotated.issued.record.id)
    assert again.issued.record.expires_at == later


async def test_two_rotations_at_once_make_one_successor(keys: KeyService, issued: IssuedKey) -> None:
    """A retried or doubled rotation is a conflict that names the successor."""
    results = await asyncio.gather(*(keys.rotate(issued.record.id) for _ in range(3)), return_exceptions=True)
    assert sorted(type(result).__name__ for result in results) == ["Conflict", "Conflict", "RotatedKey"]
    assert len(await keys.list()) == 2


async def test_dead_keys_cannot_be_rotated(keys: KeyService, acme: Tenant, issued: IssuedKey, time: Time) -> None:
    """Rotation must not bring a revoked or expired key back."""
    short = await keys.issue(acme.id, name="k", scopes=["inference"], expires_at=time.now + timedelta(hours=1))
    await keys.revoke(issued.record.id)
    time.advance(hours=1)
    for dead, why in ((issued, "revoked"), (short, "expired")):
        with pytest.raises(Conflict, match=why):
            await keys.rotate(dead.record.id)


@pytest.mark.parametrize("overlap", [timedelta(seconds=-1), MAX_OVERLAP + timedelta(seconds=1)])
async def test_overlaps_out_of_range(keys: KeyService, issued: IssuedKey, overlap: timedelta) -> None:
    """The limit is stated."""
    with pytest.raises(InvalidRequest, match="30 days"):
        await keys.rotate(issued.record.id, overlap=overlap)


async def test_bad_issues(keys: KeyService, acme: Tenant, time: Time) -> None:
    """Unknown tenant, unknown or no scope, bad name, past or naive expiry: typed, and no row is left."""
    good = {"name": "k", "scopes": ["inference"]}
    with pytest.raises(NotFound):
        await keys.issue("ten_nobody", name="k", scopes=["inference"])
    for change, why in [
        ({"scopes": ["inference", "root"]}, "'root'"),
        ({"scopes": []}, "at least one"),
        ({"scopes": "inference"}, "Unknown scope"),
        ({"name": "a b"}, "key name"),
        ({"expires_at": time.now}, "future"),
        ({"expires_at": datetime(2040, 1, 1)}, "time zone"),  # naive on purpose
    ]:
        with pytest.raises(InvalidRequest, match=why):
            await keys.issue(acme.id, **{**good, **change})  # type: ignore[arg-type]
    assert await keys.list() == ()


async def test_a_tenant_touches_only_its_own_keys(
    database: Database, keys: KeyService, issued: IssuedKey, time: Time
) -> None:
    """With a tenant id given, another tenant's key is unknown."""
    beta = await TenantService(database=database, clock=time).create(name="beta")
    for call in (
        keys.get(issued.record.id, tenant_id=beta.id),
        keys.revoke(issued.record.id, tenant_id=beta.id),
        keys.rotate(issued.record.id, tenant_id=beta.id),
    ):
        with pytest.raises(NotFound):
            await call
    assert await keys.list(beta.id) == ()
    await keys.authenticate(issued.raw)


async def test_last_use_is_written_in_batches(
    database: Database, keys: KeyService, issued: IssuedKey, time: Time
) -> None:
    """A request writes nothing; a flush writes the newest use, and never goes back in time."""
    for _ in range(3):
        await keys.authenticate(issued.raw)
        time.advance(seconds=1)
    assert (await keys.get(issued.record.id)).last_used_at is None
    await keys._last_used.flush()
    assert (await keys.get(issued.record.id)).last_used_at == time.now - timedelta(seconds=1)
    late = LastUsed(database=database)
    late.touch(issued.record.id, time.now - timedelta(days=1))
    await late.close()
    assert (await keys.get(issued.record.id)).last_used_at == time.now - timedelta(seconds=1)


async def test_last_use_is_flushed_by_itself_and_at_the_end(
    database: Database, keys: KeyService, issued: IssuedKey, time: Time
) -> None:
    """The background task needs no help; closing writes what is left."""
    quick = LastUsed(database=database, interval_s=0.01)
    quick.touch(issued.record.id, time.now)
    assert quick._task is not None
    await asyncio.wait([quick._task])
    assert (await keys.get(issued.record.id)).last_used_at == time.now
    quick.touch(issued.record.id, time.now + timedelta(seconds=9))
    await quick.close()
    assert (await keys.get(issued.record.id)).last_used_at == time.now + timedelta(seconds=9)


async def test_closing_lets_a_write_finish(
    keys: KeyService, issued: IssuedKey, time: Time, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cancelled query takes its connection along."""
    notes = LastUsed(database=database, interval_s=0.001)
    writing, go_on, transaction = asyncio.Event(), asyncio.Event(), database.transaction

    @asynccontextmanager
    async def slow() -> AsyncIterator[AsyncSession]:
        async with transaction() as session:
            writing.set()
            await go_on.wait()
            yield session

    monkeypatch.setattr(database, "transaction", slow)
    notes.touch(issued.record.id, time.now)
    await writing.wait()
    closing = asyncio.create_task(notes.close())
    await asyncio.sleep(0)
    go_on.set()
    await closing
    assert notes._task is not None
    assert not notes._task.cancelled()
    assert (await keys.get(issued.record.id)).last_used_at == time.now


async def test_an_outage_keeps_the_notes(
    keys: KeyService, issued: IssuedKey, time: Time, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uses noted while the database is away are written when it is back."""
    notes = LastUsed(database=database)

    def away() -> None:
        raise DatabaseUnavailable

    with monkeypatch.context() as patch:
        patch.setattr(database, "transaction", away)
        notes.touch(issued.record.id, time.now)
        with pytest.raises(DatabaseUnavailable):
            await notes.flush()
    await notes.close()
    assert (await keys.get(issued.record.id)).last_used_at == time.now


async def test_a_cached_key_needs_no_database(
    keys: KeyService, issued: IssuedKey, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request path costs no round trip within the cache time."""
    await keys.authenticate(issued.raw)

    def away() -> None:
        raise AssertionError("a query on the request path")

    monkeypatch.setattr(database, "session", away)
    await keys.authenticate(issued.raw)
