"""Uploads in parts."""

from __future__ import annotations

import asyncio
import hashlib
import os
from pathlib import Path
from typing import Any

import pytest

from fixtures.gateway import Kit, in_pieces, zipped
from lamina.errors import InvalidRequest, LimitExceeded, NotFound, TooLarge
from lamina.gateway import staging
from lamina.gateway.pending import MAX_PER_TENANT, PendingUpload, PendingUploads

DATA = b"0123456789"


class Clock:
    now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def uploads(tmp_path: Path, clock: Clock) -> PendingUploads:
    return PendingUploads(tmp_path / "root", max_bytes=100, clock=clock)


def part(tmp_path: Path, data: bytes) -> Path:
    path = tmp_path / "part"
    path.write_bytes(data)
    return path


def begun(uploads: PendingUploads, tmp_path: Path, *pieces: bytes) -> tuple[PendingUpload, list[str]]:
    upload = uploads.create("alice", filename="a.zip", size=len(DATA))
    return upload, [uploads.add(upload, part(tmp_path, piece)) for piece in pieces]


def test_parts_are_put_together_in_the_order_of_the_list(uploads: PendingUploads, tmp_path: Path) -> None:
    """Not in the order in which they arrived; the upload is over then."""
    upload, (tail, head) = begun(uploads, tmp_path, DATA[4:], DATA[:4])
    md5 = hashlib.md5(DATA).hexdigest().upper()
    whole = uploads.assemble(upload, [head, tail], tmp_path, md5=md5)
    assert whole.read_bytes() == DATA
    assert list((tmp_path / "root").iterdir()) == []
    with pytest.raises(NotFound):
        uploads.get("alice", upload.id)
    with pytest.raises(NotFound):
        uploads.add(upload, part(tmp_path, b""))


@pytest.mark.parametrize(
    "choose", [lambda a, b: [a], lambda a, b: [a, b, b], lambda a, b: [a, "part_" + "0" * 32], lambda a, b: [a, "../x"]]
)
def test_a_wrong_list_leaves_the_upload_open(uploads: PendingUploads, tmp_path: Path, choose: Any) -> None:
    upload, (head, tail) = begun(uploads, tmp_path, DATA[:4], DATA[4:])
    with pytest.raises(InvalidRequest) as info:
        uploads.assemble(upload, choose(head, tail), tmp_path, md5=None)
    assert info.value.param == "part_ids"
    assert uploads.assemble(upload, [head, tail], tmp_path, md5=None).read_bytes() == DATA


def test_a_wrong_checksum_is_refused(uploads: PendingUploads, tmp_path: Path) -> None:
    upload, parts = begun(uploads, tmp_path, DATA)
    with pytest.raises(InvalidRequest) as info:
        uploads.assemble(upload, parts, tmp_path, md5="0" * 32)
    assert info.value.param == "md5"


def test_more_than_announced_is_refused(uploads: PendingUploads, tmp_path: Path) -> None:
    upload, _ = begun(uploads, tmp_path, DATA[:4])
    with pytest.raises(InvalidRequest, match=r"add up to 14 bytes, but 10"):
        uploads.add(upload, part(tmp_path, DATA))


def test_announcing_too_much_is_refused(uploads: PendingUploads) -> None:
    with pytest.raises(TooLarge):
        uploads.create("alice", filename="a", size=101)


def test_open_uploads_are_limited_per_tenant(uploads: PendingUploads) -> None:
    for _ in range(MAX_PER_TENANT):
        uploads.create("alice", filename="a", size=1)
    uploads.create("bob", filename="a", size=1)
    with pytest.raises(LimitExceeded):
        uploads.create("alice", filename="a", size=1)


def test_uploads_expire(uploads: PendingUploads, tmp_path: Path, clock: Clock) -> None:
    """Known no more, and removed when the next one is created."""
    upload, _ = begun(uploads, tmp_path, DATA)
    clock.now += 3600
    with pytest.raises(NotFound):
        uploads.get("alice", upload.id)
    fresh = uploads.create("alice", filename="a", size=1)
    assert [folder.name for folder in (tmp_path / "root").iterdir()] == [f"pending-{fresh.id}"]


@pytest.mark.parametrize("about", [None, b"", b'{"id": "upl', b'{"id": 1}', b"\xff"])
def test_what_a_crash_leaves_goes_after_the_same_time(
    uploads: PendingUploads, tmp_path: Path, clock: Clock, about: bytes | None
) -> None:
    """Killed while it created an upload or removed one: a folder that may hold parts and says not whose it is."""
    left = tmp_path / "root" / ("pending-upload_" + "0" * 32)
    left.mkdir(parents=True)
    (left / ("part_" + "0" * 32)).write_bytes(DATA)
    if about is not None:
        (left / "about.json").write_bytes(about)
    os.utime(left, (clock.now, clock.now))
    clock.now += 3599
    uploads.sweep()
    assert left.exists()
    clock.now += 1
    uploads.sweep()
    assert list((tmp_path / "root").iterdir()) == []


def test_a_crash_while_expired_uploads_are_removed_leaves_nothing_for_good(
    uploads: PendingUploads, tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder has a name that the next sweep of staging folders knows."""
    begun(uploads, tmp_path, DATA)
    clock.now += 3600
    with monkeypatch.context() as killed:
        killed.setattr("shutil.rmtree", lambda *_, **__: None)
        uploads.sweep()
    (left,) = (tmp_path / "root").iterdir()
    os.utime(left, (0, 0))
    assert staging.sweep(tmp_path / "root") == [left]
    assert list((tmp_path / "root").iterdir()) == []


def test_uploads_outlive_a_restart(uploads: PendingUploads, tmp_path: Path, clock: Clock) -> None:
    upload, parts = begun(uploads, tmp_path, DATA)
    later = PendingUploads(tmp_path / "root", max_bytes=100, clock=clock)
    assert later.assemble(later.get("alice", upload.id), parts, tmp_path, md5=None).read_bytes() == DATA


@pytest.mark.parametrize("upload_id", ["", "upload_0", "../root", "upload_" + "0" * 32, "upload_" + "\u0660" * 32])
def test_unknown_ids(uploads: PendingUploads, upload_id: str) -> None:
    with pytest.raises(NotFound):
        uploads.get("alice", upload_id)


def test_another_tenants_upload_is_unknown(uploads: PendingUploads) -> None:
    upload = uploads.create("alice", filename="a", size=1)
    with pytest.raises(NotFound):
        uploads.get("bob", upload.id)


async def test_over_http(kit: Kit) -> None:
    """Create, parts in parallel, complete: an adapter, and nothing left on disk."""
    data = zipped()
    async with kit.client() as client:
        created = await client.post(
            "/v1/uploads",
            json={"filename": "poet.zip", "purpose": "adapter", "bytes": len(data), "mime_type": "application/zip"},
        )
        upload = created.json()
        assert (upload["object"], upload["status"], upload["file"]) == ("upload", "pending", None)
        assert upload["expires_at"] - upload["created_at"] == 3600
        url = f"/v1/uploads/{upload['id']}"
        sent = [client.post(f"{url}/parts", files={"data": piece}) for piece in in_pieces(data, 100)]
        parts = [response.json()["id"] for response in await asyncio.gather(*sent)]
        done = (await client.post(f"{url}/complete", json={"part_ids": parts})).json()
        assert (done["status"], done["file"]["filename"]) == ("completed", "poet")
        assert (await client.post(f"{url}/complete", json={"part_ids": parts})).status_code == 404
        assert (await client.get("/v1/models/poet")).status_code == 200
    assert kit.staged() == []


async def test_cancel_over_http(kit: Kit) -> None:
    async with kit.client() as client:
        upload = (await client.post("/v1/uploads", json={"filename": "a", "purpose": "adapter", "bytes": 9})).json()
        await client.post(f"/v1/uploads/{upload['id']}/parts", files={"data": b"x"})
        assert kit.staged() != []
        assert (await client.post(f"/v1/uploads/{upload['id']}/cancel")).json()["status"] == "cancelled"
        assert (await client.post(f"/v1/uploads/{upload['id']}/cancel")).status_code == 404
    assert kit.staged() == []


async def test_a_refused_adapter_ends_the_upload(kit: Kit) -> None:
    async with kit.client() as client:
        upload = (await client.post("/v1/uploads", json={"filename": "a", "purpose": "adapter", "bytes": 4})).json()
        part = await client.post(f"/v1/uploads/{upload['id']}/parts", files={"data": b"junk"})
        response = await client.post(f"/v1/uploads/{upload['id']}/complete", json={"part_ids": [part.json()["id"]]})
    assert response.status_code == 422
    assert kit.staged() == []


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"filename": "a", "purpose": "batch", "bytes": 4}, "purpose"),
        ({"filename": "a", "purpose": "adapter", "bytes": 0}, "bytes"),
        ({"filename": "", "purpose": "adapter", "bytes": 4}, "filename"),
        ({"purpose": "adapter", "bytes": 4}, "filename"),
        ({"filename": "a", "purpose": "adapter", "bytes": 4, "expires_after": {}}, "expires_after"),
    ],
)
async def test_refusals_over_http(kit: Kit, body: dict[str, Any], param: str) -> None:
    async with kit.client() as client:
        response = await client.post("/v1/uploads", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


async def test_parts_are_capped_and_need_their_name(kit: Kit) -> None:
    async with kit.client() as client:
        upload = (await client.post("/v1/uploads", json={"filename": "a", "purpose": "adapter", "bytes": 4})).json()
        url = f"/v1/uploads/{upload['id']}/parts"
        assert (await client.post(url, files={"data": bytes(200_000)})).status_code == 413
        assert (await client.post(url, files={"file": b"x"})).json()["error"]["param"] == "data"
        assert (await client.post("/v1/uploads/upload_x/parts", files={"data": b"x"})).status_code == 404
