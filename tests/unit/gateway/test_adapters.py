"""/v1/adapters: uploads of every kind, listing, deletion."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from fixtures.gateway import CONFIG_JSON, PEFT, WEIGHTS_BYTES, Kit, build, tarred, zipped
from lamina.errors import EngineUnavailable, LimitExceeded

URL = "/v1/adapters"


async def upload(kit: Kit, files: dict[str, Any], **fields: str) -> Any:
    async with kit.client() as client:
        return await client.post(URL, files=files, data=fields)


@pytest.mark.parametrize(
    "files",
    [
        pytest.param({"file": ("a.zip", zipped())}, id="zip"),
        pytest.param({"file": ("a.tar", tarred())}, id="tar"),
        pytest.param({"file": ("a.tar.gz", tarred(mode="w:gz"))}, id="tar.gz"),
        pytest.param({"file": ("whatever", zipped())}, id="the name says nothing"),
        pytest.param({"adapter_config": ("x", CONFIG_JSON), "adapter_model": ("y", WEIGHTS_BYTES)}, id="two files"),
    ],
)
async def test_upload(kit: Kit, files: dict[str, Any]) -> None:
    """The answer describes the new version, and nothing is left in the staging folder."""
    response = await upload(kit, files, name="poet")
    body = response.json()
    assert response.status_code == 201
    assert body["object"] == "adapter"
    assert (body["name"], body["version"], body["rank"]) == ("poet", 1, 4)
    assert body["size_bytes"] == len(WEIGHTS_BYTES)
    assert kit.staged() == []


async def test_every_form_of_upload_gives_the_same_identity(kit: Kit) -> None:
    digests = set()
    for data in (zipped(), tarred(), tarred(mode="w:gz")):
        digests.add((await upload(kit, {"file": ("a", data)}, name="poet")).json()["digest"])
    assert len(digests) == 1


@pytest.mark.parametrize(
    ("files", "fields", "status", "param"),
    [
        ({"file": ("a", zipped())}, {}, 400, "name"),
        ({"file": ("a", zipped())}, {"name": "a/b"}, 400, "name"),
        ({"file": ("a", zipped())}, {"name": "x" * 65}, 400, "name"),
        ({"file": ("a", zipped())}, {"name": "a", "mode": "fast"}, 400, "mode"),
        ({"weights": ("a", zipped())}, {"name": "a"}, 400, "weights"),
        ({"adapter_config": ("a", CONFIG_JSON)}, {"name": "a"}, 400, "file"),
        ({"file": ("a", zipped()), "adapter_config": ("a", b"{}")}, {"name": "a"}, 400, "file"),
        ({"file": ("a", b"no archive")}, {"name": "a"}, 422, "file"),
        ({"file": ("a", zipped({"adapter_config.json": b"{}"}))}, {"name": "a"}, 422, "file"),
        ({"file": ("a", zipped({**PEFT, "adapter_config.json": b"?"}))}, {"name": "a"}, 422, None),
        (
            {"adapter_config": ("a", b" " * (1 << 21)), "adapter_model": ("a", b"")},
            {"name": "a"},
            422,
            "adapter_config",
        ),
    ],
)
async def test_refusals_leave_nothing_behind(
    kit: Kit, files: dict[str, Any], fields: dict[str, str], status: int, param: str | None
) -> None:
    response = await upload(kit, files, **fields)
    assert response.status_code == status
    assert response.json()["error"]["param"] == param
    assert kit.staged() == []
    async with kit.client() as client:
        assert (await client.get(URL)).json()["data"] == []


async def test_all_violations_come_at_once(kit: Kit) -> None:
    response = await upload(kit, {"file": ("a", zipped({"../x": b"", "/y": b""}))}, name="a")
    assert response.json()["error"]["code"] == "invalid_adapter"
    assert len(response.json()["error"]["details"]["violations"]) == 2


@pytest.mark.parametrize("kind", ["application/json", "application/octet-stream"])
async def test_upload_needs_a_form(kit: Kit, kind: str) -> None:
    async with kit.client() as client:
        response = await client.post(URL, content=zipped(), headers={"content-type": kind})
    assert response.status_code == 400
    assert "multipart/form-data" in response.json()["error"]["message"]


async def test_oversized_upload_is_refused_by_its_declared_size(tmp_path: Path) -> None:
    kit = build(tmp_path, max_upload_bytes=1000)
    response = await upload(kit, {"file": ("a", bytes(200_000))}, name="a")
    assert response.status_code == 413
    assert response.json()["error"]["details"] == {"limit_bytes": 1000}
    assert kit.staged() == []


async def test_oversized_upload_of_unknown_size_is_stopped(tmp_path: Path) -> None:
    kit = build(tmp_path, max_upload_bytes=1000)

    async def endless() -> Any:
        yield b'--b\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\n'
        while True:
            yield bytes(10_000)

    async with kit.client() as client:
        headers = {"content-type": "multipart/form-data; boundary=b"}
        response = await client.post(URL, content=endless(), headers=headers)
    assert response.status_code == 413
    assert kit.staged() == []


async def test_client_that_disconnects_in_mid_upload_leaves_nothing(kit: Kit) -> None:
    """No file, no row, and no answer to nobody."""
    body = b'--b\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\n' + bytes(2 << 20)
    seen: list[int] = []
    messages = iter([{"type": "http.request", "body": body, "more_body": True}, {"type": "http.disconnect"}])

    async def receive() -> dict[str, Any]:
        message = next(messages)
        if message["type"] == "http.disconnect":
            seen.append(len(kit.staged()))
        return message

    async def send(message: object) -> None:
        raise AssertionError("answered a client that has gone")

    headers = {"authorization": f"Bearer {kit.key}", "content-type": "multipart/form-data; boundary=b"}
    scope = {
        "type": "http", "method": "POST", "path": URL, "raw_path": URL.encode(), "query_string": b"",
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
    }  # fmt: skip
    await kit.app(scope, receive, send)  # type: ignore[arg-type]
    assert seen == [2]  # the folder and the part were there
    assert kit.staged() == []
    assert (await kit.adapters.list("ten_alice")).data == ()
    assert 'route="/v1/adapters",status="499"} 1.0' in kit.deps.metrics.render(None, None).decode()


async def test_client_that_disconnects_before_the_end_of_a_real_connection(kit: Kit, tmp_path: Path) -> None:
    """The same through a socket."""
    from fixtures.gateway import serve, until

    async with serve(kit.app) as url:
        host, port = url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(
            f"POST {URL} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {kit.key}\r\ncontent-length: 9000000\r\n"
            "content-type: multipart/form-data; boundary=b\r\n\r\n--b\r\ncontent-disposition: form-data; "
            'name="file"; filename="a"\r\n\r\n'.encode()
            + bytes(3 << 20)
        )
        await writer.drain()
        await until(lambda: any(path.name == "part-1" for path in kit.staged()))
        writer.close()
        await until(lambda: kit.staged() == [])


async def test_a_failing_store_leaves_nothing_behind(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    async def intake(*_: object, **__: object) -> None:
        raise LimitExceeded("too many adapters", limit=1, need=1, have=0)

    monkeypatch.setattr(kit.adapters, "intake", intake)
    response = await upload(kit, {"file": ("a", zipped())}, name="a")
    assert response.status_code == 429
    assert response.headers["x-should-retry"] == "false"
    assert kit.staged() == []


async def test_list_is_paginated_newest_first(kit: Kit) -> None:
    for number in range(5):
        await upload(kit, {"file": ("a", zipped())}, name=f"a{number}")
    names: list[str] = []
    after: dict[str, str] = {}
    async with kit.client() as client:
        while True:
            page = (await client.get(URL, params={"limit": 2, **after})).json()
            names += [each["name"] for each in page["data"]]
            assert page["first_id"] == page["data"][0]["id"]
            if not page["has_more"]:
                break
            after = {"after": page["last_id"]}
    assert names == ["a4", "a3", "a2", "a1", "a0"]


@pytest.mark.parametrize("query", ["limit=0", "limit=101", "limit=x", "after=adp_nope"])
async def test_bad_pages_are_refused(kit: Kit, query: str) -> None:
    async with kit.client() as client:
        response = await client.get(f"{URL}?{query}")
    assert response.status_code == 400
    assert response.json()["error"]["param"] == query.split("=")[0]


async def test_show_by_id_and_name(kit: Kit) -> None:
    created = (await upload(kit, {"file": ("a", zipped())}, name="poet")).json()
    async with kit.client() as client:
        for key in (created["id"], "poet", "poet@1", "poet@latest"):
            assert (await client.get(f"{URL}/{key}")).json()["id"] == created["id"]
        assert (await client.get(f"{URL}/poet@2")).status_code == 404


async def test_delete_unloads_what_nobody_uses(kit: Kit) -> None:
    """Two tenants with the same content: the engine drops it with the last one."""
    other = kit.keys.issue("bob")
    digest = (await upload(kit, {"file": ("a", zipped())}, name="poet")).json()["digest"]
    async with kit.client(other) as client:
        await client.post(URL, files={"file": ("a", zipped())}, data={"name": "mine"})
    async with kit.client() as client:
        response = await client.delete(f"{URL}/poet")
        assert response.json() == {"id": "poet", "object": "adapter.deleted", "deleted": True}
        assert kit.engine.unloaded == []
        assert (await client.delete(f"{URL}/poet")).status_code == 404
    async with kit.client(other) as client:
        await client.delete(f"{URL}/mine")
    assert kit.engine.unloaded == [digest]


async def test_delete_works_while_the_engine_is_down(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    async def unload(digest: str) -> None:
        raise EngineUnavailable

    await upload(kit, {"file": ("a", zipped())}, name="poet")
    monkeypatch.setattr(kit.engine, "unload_adapter", unload)
    async with kit.client() as client:
        assert (await client.delete(f"{URL}/poet")).status_code == 200


async def test_another_tenants_adapter_is_unknown_everywhere(kit: Kit) -> None:
    created = (await upload(kit, {"file": ("a", zipped())}, name="poet")).json()
    async with kit.client(kit.keys.issue("bob")) as client:
        for key in ("poet", created["id"]):
            assert (await client.get(f"{URL}/{key}")).status_code == 404
            assert (await client.delete(f"{URL}/{key}")).status_code == 404
            assert (await client.get(f"/v1/files/{key}")).status_code == 404
            assert (await client.get(f"/v1/models/{key}")).status_code == 404
        assert (await client.get(URL)).json()["data"] == []


@pytest.mark.parametrize(
    ("method", "path", "scope"),
    [
        ("POST", URL, "adapters:write"),
        ("DELETE", f"{URL}/x", "adapters:write"),
        ("GET", URL, "adapters:read"),
        ("GET", f"{URL}/x", "adapters:read"),
        ("POST", "/v1/files", "adapters:write"),
        ("GET", "/v1/files", "adapters:read"),
        ("DELETE", "/v1/files/x", "adapters:write"),
        ("POST", "/v1/chat/completions", "inference"),
        ("POST", "/v1/completions", "inference"),
        ("POST", "/tokenize", "inference"),
    ],
)
async def test_scopes(kit: Kit, method: str, path: str, scope: str) -> None:
    """A key without the scope is told which one it lacks; one with only that scope gets further."""
    every = {"inference", "adapters:read", "adapters:write"}
    bodies = {
        "/v1/chat/completions": {"model": "none", "messages": [{"role": "user", "content": "x"}]},
        "/v1/completions": {"model": "none", "prompt": "x"},
        "/tokenize": {"prompt": "x"},
    }
    async with kit.client(kit.keys.issue("bob", scopes=frozenset(every - {scope}))) as client:
        response = await client.request(method, path, json=bodies.get(path))
        assert response.status_code == 403
        assert response.json()["error"]["code"] == "insufficient_scope"
        assert response.json()["error"]["details"] == {"scope": scope}
    async with kit.client(kit.keys.issue("bob", scopes=frozenset({scope}))) as client:
        assert (await client.request(method, path, json=bodies.get(path))).status_code != 403


async def test_files_are_adapters(kit: Kit) -> None:
    """The name is the file's, without folder and ending."""
    async with kit.client() as client:
        response = await client.post(
            "/v1/files",
            files={"file": ("C:\\models\\my-poet.tar.gz", tarred(mode="w:gz"))},
            data={"purpose": "adapter"},
        )
        body = response.json()
        assert response.status_code == 200
        assert (body["object"], body["filename"], body["status"]) == ("file", "my-poet", "processed")
        assert (await client.get(f"/v1/files/{body['id']}")).json() == body
        assert (await client.get("/v1/files")).json()["data"] == [body]
        assert (await client.get("/v1/files?purpose=batch")).json()["data"] == []
        deleted = (await client.delete(f"/v1/files/{body['id']}")).json()
        assert deleted == {"id": body["id"], "object": "file", "deleted": True}
        assert (await client.get(f"/v1/files/{body['id']}")).status_code == 404


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"purpose": "batch"}, "purpose"),
        ({}, "purpose"),
        ({"purpose": "adapter", "expires_after[anchor]": "created_at"}, "expires_after"),
    ],
)
async def test_files_of_other_purposes_are_refused(kit: Kit, fields: dict[str, str], param: str) -> None:
    async with kit.client() as client:
        response = await client.post("/v1/files", files={"file": ("a.zip", zipped())}, data=fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


async def test_a_file_without_a_usable_name_is_refused(kit: Kit) -> None:
    async with kit.client() as client:
        response = await client.post("/v1/files", files={"file": ("..zip", zipped())}, data={"purpose": "adapter"})
    assert response.status_code == 400
    assert json.loads(response.text)["error"]["param"] == "name"
