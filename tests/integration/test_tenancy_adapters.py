"""Adapters on SQLite and PostgreSQL: versions, quotas, isolation, and files that never disagree with rows."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
import pytest_asyncio

from fixtures.tenancy import Time
from lamina.errors import InvalidAdapter, InvalidRequest, LimitExceeded, ModelNotFound, NotFound
from lamina.tenancy.adapters import MAX_PAGE, AdapterService
from lamina.tenancy.cache import TtlCache
from lamina.tenancy.database import Database
from lamina.tenancy.memory import MemoryIntake
from lamina.tenancy.records import AdapterRecord, AdapterStatus, Tenant
from lamina.tenancy.tenants import TenantService

MakeFolder = Callable[[str], Path]


@pytest.fixture
def store() -> MemoryIntake:
    return MemoryIntake()


@pytest.fixture
def adapters(database: Database, store: MemoryIntake, time: Time) -> AdapterService:
    return AdapterService(database=database, intake=store, base_model="base", max_adapters_per_tenant=5, clock=time)


@pytest_asyncio.fixture
async def acme(database: Database) -> Tenant:
    return await TenantService(database=database).create(name="acme")


@pytest_asyncio.fixture
async def beta(database: Database) -> Tenant:
    return await TenantService(database=database).create(name="beta")


async def test_versions(adapters: AdapterService, acme: Tenant, make_adapter_folder: MakeFolder, time: Time) -> None:
    """Each new digest is the next version; "name" and "name@latest" follow, "name@1" stays."""
    first = await adapters.intake(acme.id, name="tag", folder=make_adapter_folder("one"))
    second = await adapters.intake(acme.id, name="tag", folder=make_adapter_folder("two"))
    assert (first.version, second.version, first.created, second.created) == (1, 2, True, True)
    assert (first.reference, first.base_model, first.created_at) == ("tag@1", "base", time.now)
    for model, expected in [("tag", second), ("tag@latest", second), ("tag@2", second), ("tag@1", first)]:
        assert (await adapters.resolve(acme.id, model)).id == expected.id


async def test_the_same_content_again_is_the_same_version(
    adapters: AdapterService, acme: Tenant, make_adapter_folder: MakeFolder
) -> None:
    """An upload can be retried without harm; under another name the same content is an adapter of its own."""
    first = await adapters.intake(acme.id, name="tag", folder=make_adapter_folder("one"))
    again = await adapters.intake(acme.id, name="tag", folder=make_adapter_folder("one"))
    other = await adapters.intake(acme.id, name="twin", folder=make_adapter_folder("one"))
    assert (again.id, again.created) == (first.id, False)
    assert (other.digest, other.created, other.version) == (first.digest, True, 1)


async def test_equal_uploads_at_once_make_one_version(
    adapters: AdapterService, acme: Tenant, make_adapter_folder: MakeFolder
) -> None:
    """Of racing identical uploads exactly one creates."""
    folder = make_adapter_folder("one")
    records = await asyncio.gather(*(adapters.intake(acme.id, name="tag", folder=folder) for _ in range(4)))
    assert sorted(record.created for record in records) == [False, False, False, True]
    assert {record.version for record in records} == {1}


async def test_different_uploads_at_once_get_different_versions(
    adapters: AdapterService, acme: Tenant, make_adapter_folder: MakeFolder
) -> None:
    """Version numbers are never shared, whatever the order."""
    folders = [make_adapter_folder(str(index)) for index in range(4)]
    records = await asyncio.gather(*(adapters.intake(acme.id, name="tag", folder=f) for f in folders))
    assert sorted(record.version for record in records) == [1, 2, 3, 4]


async def test_the_quota_states_its_numbers_and_leaves_no_files(
    adapters: AdapterService, acme: Tenant, store: MemoryIntake, make_adapter_folder: MakeFolder
) -> None:
    """A full tenant is refused, keeps re-uploading what it has, and may go on after a deletion."""
    for index in range(5):
        await adapters.intake(acme.id, name=f"a{index}", folder=make_adapter_folder(str(index)))
    with pytest.raises(LimitExceeded, match="5 of at most 5") as caught:
        await adapters.intake(acme.id, name="more", folder=make_adapter_folder("more"))
    assert (caught.value.limit, caught.value.need, caught.value.have) == (5, 1, 0)
    assert len(store.files) == 5
    assert not (await adapters.intake(acme.id, name="a0", folder=make_adapter_folder("0"))).created
    await adapters.delete(acme.id, "a0")
    assert (await adapters.intake(acme.id, name="more", folder=make_adapter_folder("more"))).created


async def test_the_quota_holds_against_racing_uploads(
    adapters: AdapterService, acme: Tenant, store: MemoryIntake, make_adapter_folder: MakeFolder
) -> None:
    """Eight at once into five places: five."""
    folders = [make_adapter_folder(str(index)) for index in range(8)]
    results = await asyncio.gather(
        *(adapters.intake(acme.id, name=f"a{i}", folder=f) for i, f in enumerate(folders)),
        return_exceptions=True,
    )
    assert sum(isinstance(result, LimitExceeded) for result in results) == 3
    assert len(store.files) == 5


async def test_a_foreign_adapter_is_exactly_as_unknown_as_none(
    adapters: AdapterService, acme: Tenant, beta: Tenant, make_adapter_folder: MakeFolder, store: MemoryIntake
) -> None:
    """Tenant B cannot see, resolve, page past, or delete what tenant A owns, by name or by id."""
    mine = await adapters.intake(acme.id, name="tag", folder=make_adapter_folder("one"))
    for name in ("tag", "tag@1", "tag@latest", mine.id):
        for call in (adapters.resolve, adapters.get, adapters.delete):
            with pytest.raises(ModelNotFound) as foreign:
                await call(beta.id, name)
            unknown = ModelNotFound(name)
            assert (foreign.value.message, foreign.value.code) == (unknown.message, unknown.code)
    assert (await adapters.list(beta.id)).data == ()
    with pytest.raises(InvalidRequest, match="after"):
        await adapters.list(beta.id, after=mine.id)
    assert (await adapters.resolve(acme.id, "tag")).id == mine.id
    assert set(store.files) == {mine.digest}


async def test_two_tenants_may_use_one_name_and_share_files(
    adapters: AdapterService, acme: Tenant, beta: Tenant, make_adapter_folder: MakeFolder, store: MemoryIntake
) -> None:
    """Names are each tenant's own; files go only with the last owner."""
    ours = await adapters.intake(acme.id, name="tag", folder=make_adapter_folder("one"))
    theirs = await adapters.intake(beta.id, name="tag", folder=make_adapter_folder("one"))
    assert ours.digest == theirs.digest
    assert ours.id != theirs.id
    assert (await adapters.delete(acme.id, "tag")).removed_digests == ()
    assert store.contains(ours.digest)
    assert (await adapters.resolve(beta.id, "tag")).id == theirs.id
    assert (await adapters.delete(beta.id, "tag")).removed_digests == (ours.digest,)
    assert not store.files


@pytest.mark.parametrize("reference", ["tag@2", "tag@latest", "id"])
async def test_deleting_one_version(
    adapters: AdapterService, acme: Tenant, make_adapter_folder: MakeFolder, reference: str
) -> None:
    """The newest left becomes the latest; a deleted version's number is never used again."""
    await adapters.intake(acme.id, name="tag", folder=make_adapter_folder("one"))
    second = await adapters.intake(acme.id, name="tag", folder=make_adapter_folder("two"))
    deleted = await adapters.delete(acme.id, second.id if reference == "id" else reference)
    assert [record.id for record in deleted.retired] == [second.id]
    assert deleted.retired[0].status is AdapterStatus.RETIRED
    assert (await adapters.resolve(acme.id, "tag")).version == 1
    with pytest.raises(ModelNotFound):
        await adapters.resolve(acme.id, "tag@2")
    with pytest.raises(ModelNotFound):
        await adapters.delete(acme.id, second.id)
    assert (await adapters.get(acme.id, second.id)).status is AdapterStatus.RETIRED
    again = await adapters.intake(acme.id, name="tag", folder=make_adapter_folder("two"))
    assert (again.version, again.created) == (3, True)


async def test_deleting_a_name_retires_all_versions(
    adapters: AdapterService, acme: Tenant, make_adapter_folder: MakeFolder, store: MemoryIntake
) -> None:
    """And nothing else of the tenant."""
    for content in ("one", "two"):
        await adapters.intake(acme.id, name="tag", folder=make_adapter_folder(content))
    kept = await adapters.intake(acme.id, name="kept", folder=make_adapter_folder("one"))
    deleted = await adapters.delete(acme.id, "tag")
    assert len(deleted.retired) == 2
    assert len(deleted.removed_digests) == 1
    assert set(store.files) == {kept.digest}
    assert [record.id for record in (await adapters.list(acme.id)).data] == [kept.id]


@pytest.mark.parametrize(
    "name",
    [
        "",
        "base",
        "tag@9",
        "tag@",
        "a/b",
        "../tag",
        "tag\0",
        "\ud800",
        "%",
        "_",
        "adp_aaaaaaaaaaaaaaaa",
        "x" * 100_000,
    ],
    ids=lambda name: repr(name)[:24],
)
async def test_whatever_is_no_adapter_is_not_found(
    adapters: AdapterService, acme: Tenant, make_adapter_folder: MakeFolder, name: str
) -> None:
    """No text reaches the database that it could choke on, and none matches by accident."""
    await adapters.intake(acme.id, name="tag", folder=make_adapter_folder("one"))
    for call in (adapters.resolve, adapters.get, adapters.delete):
        with pytest.raises(ModelNotFound):
            await call(acme.id, name)
    assert (await adapters.list(acme.id, name=name)).data == ()


async def test_refused_uploads_leave_nothing(
    adapters: AdapterService,
    acme: Tenant,
    make_adapter_folder: MakeFolder,
    store: MemoryIntake,
    tmp_path: Path,
) -> None:
    """Bad names, bad folders and unknown tenants: typed errors, no file, no row."""
    good = make_adapter_folder("one")
    with pytest.raises(InvalidRequest, match="base model"):
        await adapters.intake(acme.id, name="base", folder=good)
    with pytest.raises(InvalidAdapter, match="missing"):
        await adapters.intake(acme.id, name="tag", folder=tmp_path / "nothing")
    with pytest.raises(NotFound):
        await adapters.intake("ten_nobody", name="tag", folder=good)
    assert not store.files
    assert (await adapters.list(acme.id)).data == ()


async def test_unowned_digests(
    adapters: AdapterService, acme: Tenant, beta: Tenant, make_adapter_folder: MakeFolder
) -> None:
    """Those that no ready row of any tenant has, however many are asked for at once."""
    shared = await adapters.intake(acme.id, name="tag", folder=make_adapter_folder("shared"))
    await adapters.intake(beta.id, name="tag", folder=make_adapter_folder("shared"))
    mine = await adapters.intake(acme.id, name="mine", folder=make_adapter_folder("mine"))
    asked = [f"unknown-{number:04}" for number in range(1200)]
    assert await adapters.unowned([shared.digest, *asked, mine.digest]) == tuple(asked)
    for name in ("tag", "mine"):
        await adapters.delete(acme.id, name)
    assert await adapters.unowned([shared.digest, mine.digest]) == (mine.digest,)
    assert await adapters.unowned([]) == ()


async def test_an_adapter_of_another_base_model_does_not_resolve(
    database: Database,
    adapters: AdapterService,
    acme: Tenant,
    make_adapter_folder: MakeFolder,
    store: MemoryIntake,
) -> None:
    """After a change of the base model old adapters stay listed and deletable but are never served."""
    old = await adapters.intake(acme.id, name="tag", folder=make_adapter_folder("one"))
    newer = AdapterService(database=database, intake=store, base_model="base-2")
    with pytest.raises(ModelNotFound):
        await newer.resolve(acme.id, "tag")
    assert (await newer.get(acme.id, "tag")).id == old.id
    fresh = await newer.intake(acme.id, name="tag", folder=make_adapter_folder("one"))
    assert (fresh.version, fresh.created) == (2, True)
    assert (await adapters.resolve(acme.id, "tag")).version == 1
    assert (await newer.resolve(acme.id, "tag")).version == 2


async def test_a_resolved_name_needs_no_database_until_something_changes(
    database: Database,
    store: MemoryIntake,
    acme: Tenant,
    make_adapter_folder: MakeFolder,
    time: Time,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Changes here hold at once, changes elsewhere within the cache time; unknown names are never remembered."""

    def service() -> AdapterService:
        cache = TtlCache[tuple[str, str], AdapterRecord](ttl_s=2, monotonic=time.monotonic)
        return AdapterService(database=database, intake=store, base_model="base", cache=cache)

    def away() -> None:
        raise AssertionError("a query on the request path")

    here, elsewhere = service(), service()
    for adapters in (here, elsewhere):
        with pytest.raises(ModelNotFound):
            await adapters.resolve(acme.id, "tag")
    await here.intake(acme.id, name="tag", folder=make_adapter_folder("one"))
    assert (await here.resolve(acme.id, "tag")).version == (await elsewhere.resolve(acme.id, "tag")).version == 1
    with monkeypatch.context() as patch:
        patch.setattr(database, "session", away)
        await here.resolve(acme.id, "tag")
    await here.intake(acme.id, name="tag", folder=make_adapter_folder("two"))
    assert (await here.resolve(acme.id, "tag")).version == 2
    await here.delete(acme.id, "tag")
    with pytest.raises(ModelNotFound):
        await here.resolve(acme.id, "tag")
    assert (await elsewhere.resolve(acme.id, "tag")).version == 1
    time.advance(seconds=2)
    with pytest.raises(ModelNotFound):
        await elsewhere.resolve(acme.id, "tag")


async def test_pages(
    adapters: AdapterService, acme: Tenant, beta: Tenant, make_adapter_folder: MakeFolder, time: Time
) -> None:
    """Newest first, each once, also where several share an instant, and while new ones arrive."""
    made = []
    for index in range(4):
        record = await adapters.intake(acme.id, name=f"a{index}", folder=make_adapter_folder(str(index)))
        made.append(record.id)
        if index % 2:
            time.advance(microseconds=1)
    await adapters.intake(beta.id, name="other", folder=make_adapter_folder("other"))
    first = await adapters.list(acme.id, limit=3)
    assert first.has_more
    await adapters.intake(acme.id, name="late", folder=make_adapter_folder("late"))
    rest = await adapters.list(acme.id, limit=3, after=first.last_id)
    assert not rest.has_more
    seen = [record.id for record in (*first.data, *rest.data)]
    assert sorted(seen) == sorted(made)
    assert set(seen[:2]) == set(made[2:])
    assert (first.first_id, rest.last_id) == (seen[0], seen[-1])
    assert [record.name for record in (await adapters.list(acme.id, name="late")).data] == ["late"]


@pytest.mark.parametrize("limit", [0, -1, MAX_PAGE + 1, 10**30])
async def test_page_limits(adapters: AdapterService, acme: Tenant, limit: int) -> None:
    """The range is stated."""
    with pytest.raises(InvalidRequest, match=str(MAX_PAGE)):
        await adapters.list(acme.id, limit=limit)


async def test_a_crash_between_files_and_row_is_cleaned_up(
    adapters: AdapterService, acme: Tenant, make_adapter_folder: MakeFolder, store: MemoryIntake
) -> None:
    """Files without a row go; files with one stay."""
    kept = await adapters.intake(acme.id, name="tag", folder=make_adapter_folder("one"))
    orphan = make_adapter_folder("orphan")
    store.publish(orphan, store.validate(orphan))
    report = await adapters.reconcile()
    assert report.removed_digests == (store.validate(orphan).digest,)
    assert report.missing == ()
    assert set(store.files) == {kept.digest}


async def test_a_crash_between_retiring_and_removing_is_cleaned_up(
    adapters: AdapterService,
    acme: Tenant,
    make_adapter_folder: MakeFolder,
    store: MemoryIntake,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The deletion counts once the row is retired; the files follow at the next reconciliation."""
    await adapters.intake(acme.id, name="tag", folder=make_adapter_folder("one"))

    def crash(_: str) -> None:
        raise OSError("power cut")

    with monkeypatch.context() as patch:
        patch.setattr(store, "remove", crash)
        with pytest.raises(OSError, match="power cut"):
            await adapters.delete(acme.id, "tag")
    with pytest.raises(ModelNotFound):
        await adapters.resolve(acme.id, "tag")
    assert len((await adapters.reconcile()).removed_digests) == 1
    assert not store.files


async def test_lost_files_are_reported_and_healed_by_the_next_upload(
    adapters: AdapterService, acme: Tenant, make_adapter_folder: MakeFolder, store: MemoryIntake
) -> None:
    """A ready row without files is named; the same upload brings the files back."""
    record = await adapters.intake(acme.id, name="tag", folder=make_adapter_folder("one"))
    store.files.clear()
    assert [missing.id for missing in (await adapters.reconcile()).missing] == [record.id]
    assert not (await adapters.intake(acme.id, name="tag", folder=make_adapter_folder("one"))).created
    assert (await adapters.reconcile()).missing == ()


async def test_a_deletion_during_an_upload_of_the_same_content_leaves_it_whole(
    adapters: AdapterService,
    acme: Tenant,
    beta: Tenant,
    make_adapter_folder: MakeFolder,
    store: MemoryIntake,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """B's upload finds A's files, A deletes before B's row is in: B's row must still end up with files."""
    folder = make_adapter_folder("one")
    await adapters.intake(acme.id, name="tag", folder=folder)
    loop, publish = asyncio.get_running_loop(), store.publish
    calls = 0

    def publish_then_delete(*args: object) -> None:
        nonlocal calls
        calls += 1
        publish(*args)  # type: ignore[arg-type]
        if calls == 1:
            asyncio.run_coroutine_threadsafe(adapters.delete(acme.id, "tag"), loop).result(30)

    monkeypatch.setattr(store, "publish", publish_then_delete)
    theirs = await adapters.intake(beta.id, name="tag", folder=folder)
    assert calls == 2
    assert store.contains(theirs.digest)
    assert (await adapters.reconcile()).missing == ()


async def test_an_empty_database_removes_nothing(
    adapters: AdapterService, make_adapter_folder: MakeFolder, store: MemoryIntake
) -> None:
    """Started with a mistyped or fresh database URL, the server must not delete every tenant's adapters."""
    folder = make_adapter_folder("someone's")
    store.publish(folder, store.validate(folder))
    report = await adapters.reconcile()
    assert report.removed_digests == ()
    assert len(store.files) == 1
