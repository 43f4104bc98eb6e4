"""What holds for every request: keys, ids, caps, counters, health and metrics."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from fastapi.routing import APIRoute

from fixtures.gateway import BASE, Kit, build
from lamina.gateway.auth import PUBLIC_PATHS

CHAT = {"model": BASE, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


def paths(kit: Kit) -> list[tuple[str, str]]:
    spec = kit.app.openapi()["paths"]
    return [(method, path) for path, methods in spec.items() for method in methods]


@pytest.mark.parametrize(
    "header",
    [None, "", "Bearer", "Bearer ", "Basic abc", "lamina_test_0_alice", "Bearer wrong", "Bearer " + "x" * 9999],
)
async def test_every_route_but_the_public_ones_needs_a_key(kit: Kit, header: str | None) -> None:
    """Also routes that don't exist: nothing is revealed to strangers."""
    async with kit.client() as client:
        del client.headers["authorization"]
        headers = {} if header is None else {"authorization": header}
        for method, path in [*paths(kit), ("get", "/v1/nothing")]:
            response = await client.request(method, path, headers=headers)
            if path in PUBLIC_PATHS:
                assert response.status_code == 200, path
                continue
            assert response.status_code == 401, path
            assert response.json()["error"]["code"] == "invalid_api_key"
            assert response.headers["www-authenticate"].startswith("Bearer")


def test_routes_are_what_the_contract_names(kit: Kit) -> None:
    assert {path for _, path in paths(kit)} == {
        "/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/models/{model}", "/v1/adapters",
        "/v1/adapters/{adapter}", "/v1/files", "/v1/files/{file_id}", "/tokenize", "/detokenize", "/health", "/metrics",
        "/v1/uploads", "/v1/uploads/{upload_id}/parts", "/v1/uploads/{upload_id}/complete",
        "/v1/uploads/{upload_id}/cancel", "/v1/pins", "/v1/pins/{pin_id}",
    }  # fmt: skip
    assert all(isinstance(route.path, str) for route in kit.app.routes if isinstance(route, APIRoute))


async def test_the_key_is_checked_before_the_body_is_read(kit: Kit) -> None:
    """A stranger can't make the server hold 8 MiB."""

    async def unread() -> Any:
        raise AssertionError("the body was read")
        yield b""

    async with kit.client("wrong") as client:
        response = await client.post("/v1/chat/completions", content=unread())
    assert response.status_code == 401


async def test_every_response_has_an_id_and_a_duration(kit: Kit) -> None:
    """Errors too; ids differ."""
    ids = set()
    async with kit.client() as client:
        for path in ("/v1/models", "/v1/nothing", "/health"):
            response = await client.get(path)
            assert response.headers["x-request-id"].startswith("req_")
            assert int(response.headers["openai-processing-ms"]) >= 0
            ids.add(response.headers["x-request-id"])
    assert len(ids) == 3


async def test_a_clients_own_id_is_echoed_without_tricks(kit: Kit) -> None:
    async with kit.client(**{"x-client-request-id": "abc-1<script>\t!" + "x" * 500}) as client:
        response = await client.get("/v1/models")
    assert response.headers["x-client-request-id"] == ("abc-1script" + "x" * 500)[:128]
    assert response.headers["x-request-id"] != response.headers["x-client-request-id"]


async def test_declared_body_size_is_capped(tmp_path: Path) -> None:
    kit = build(tmp_path, max_body_bytes=100)
    async with kit.client() as client:
        response = await client.post("/v1/chat/completions", json=CHAT | {"user": "x" * 100})
    error = response.json()["error"]
    assert response.status_code == 413
    assert (error["code"], error["details"]) == ("too_large", {"limit_bytes": 100})


async def test_streamed_body_size_is_capped(tmp_path: Path) -> None:
    kit = build(tmp_path, max_body_bytes=100)

    async def endless() -> Any:
        while True:
            yield b" " * 60

    async with kit.client() as client:
        response = await client.post(
            "/v1/chat/completions", content=endless(), headers={"content-type": "application/json"}
        )
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "too_large"


async def test_an_unexpected_error_is_a_500_without_internals(
    kit: Kit, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def broken(*_: object, **__: object) -> None:
        raise RuntimeError("password=hunter2")

    monkeypatch.setattr(kit.adapters, "list", broken)
    async with kit.client() as client:
        response = await client.get("/v1/models")
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "internal_error"
    assert "hunter2" not in response.text
    assert response.headers["x-request-id"] in response.text
    assert "hunter2" in capsys.readouterr().out


async def test_unknown_url_and_method_have_openais_shape(kit: Kit) -> None:
    async with kit.client() as client:
        missing, wrong = await client.get("/v1/nothing"), await client.put("/v1/models")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "unknown_url")
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (405, "method_not_allowed")
    assert wrong.headers["allow"] == "GET"


async def test_health(kit: Kit) -> None:
    async with kit.client() as client:
        assert (await client.get("/health")).json() == {"status": "ready"}
        kit.engine.ready = False
        response = await client.get("/health")
    assert response.status_code == 503
    assert response.headers["retry-after"] == "2"


async def test_models_are_the_base_and_the_tenants_own(kit: Kit, tmp_path: Path) -> None:
    """One entry per adapter, whatever its versions; single ones by any name that works in a request."""
    await kit.add_adapter(tmp_path, "poet", r=4)
    digest = await kit.add_adapter(tmp_path, "poet", r=8)
    await kit.add_adapter(tmp_path, "secret", tenant="bob")
    async with kit.client() as client:
        listed = (await client.get("/v1/models")).json()
        assert [model["id"] for model in listed["data"]] == [BASE, "poet"]
        assert listed["data"][1].pop("created") == 1767225600
        assert listed["data"][1] == {
            "id": "poet", "object": "model", "owned_by": "alice", "parent": BASE, "digest": digest,
        }  # fmt: skip
        assert (await client.get("/v1/models/org%2Fbase-model")).json()["id"] == BASE
        assert (await client.get(f"/v1/models/{BASE}")).json()["id"] == BASE
        assert (await client.get("/v1/models/poet@1")).json()["id"] == "poet@1"
        assert (await client.get("/v1/models/secret")).status_code == 404


async def test_model_list_goes_through_all_pages(kit: Kit, tmp_path: Path) -> None:
    for number in range(205):
        await kit.add_adapter(tmp_path, f"a{number}")
    async with kit.client() as client:
        assert len((await client.get("/v1/models")).json()["data"]) == 206


async def test_tokenize_and_detokenize(kit: Kit) -> None:
    async with kit.client() as client:
        whole = (await client.post("/tokenize", json={"prompt": "hé", "return_token_strs": True})).json()
        assert whole == {
            "count": 3, "max_model_len": 1024, "tokens": [104, 195, 169], "token_strs": ["h", "\ufffd", "\ufffd"],
        }  # fmt: skip
        chat = {"model": BASE, "messages": CHAT["messages"], "add_generation_prompt": False}
        tokens = (await client.post("/tokenize", json=chat)).json()["tokens"]
        assert (await client.post("/detokenize", json={"tokens": tokens})).json() == {"prompt": "<user>hi\n"}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": CHAT["messages"]}, "prompt"),
        ("/tokenize", {"prompt": "a", "x": 1}, "x"),
        ("/detokenize", {"tokens": [999]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens.0"),
    ],
)
async def test_tokens_refusals(kit: Kit, path: str, body: dict[str, Any], param: str) -> None:
    async with kit.client() as client:
        response = await client.post(path, json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


async def test_tokenize_for_an_unknown_model_is_404(kit: Kit) -> None:
    async with kit.client() as client:
        response = await client.post("/tokenize", json={"model": "nope", "prompt": "x"})
    assert response.status_code == 404


async def test_metrics_tell_of_requests_and_engine(kit: Kit) -> None:
    async with kit.client() as client:
        await client.post("/v1/chat/completions", json=CHAT)
        await client.get("/v1/models/nope")
        await client.get("/v1/nothing/at/all")
        text = (await client.get("/metrics")).text
    for line in (
        'lamina_http_requests_total{route="/v1/chat/completions",status="200"} 1.0',
        'lamina_http_requests_total{route="/v1/models/{model:path}",status="404"} 1.0',
        'lamina_http_requests_total{route="unmatched",status="404"} 1.0',
        "lamina_http_requests_in_flight 1.0",  # this one
        "lamina_time_to_first_token_seconds_count 1.0",
        "lamina_inter_token_latency_seconds_count 1.0",
        "lamina_e2e_request_latency_seconds_count 1.0",
        "lamina_engine_up 1.0",
        "lamina_num_requests_running 0.0",
        "lamina_num_requests_waiting 0.0",
        "lamina_kv_cache_usage_perc 0.0",
        'lamina_kv_blocks{state="free"} 64.0',
        "lamina_engine_prefix_hit_tokens_total 0.0",
        'lamina_cache_config_info{block_size="16",num_gpu_blocks="64"} 1.0',
    ):
        assert line in text
    assert 'lamina_lora_requests_info{max_lora="0",running_lora_adapters="",waiting_lora_adapters=""}' in text


async def test_metrics_name_running_adapters_by_digest(kit: Kit, tmp_path: Path) -> None:
    """Tenants' names for them are nobody else's business."""
    digest = await kit.add_adapter(tmp_path, "poet")
    stream = kit.engine.submit(await adapter_request(kit, digest))
    await anext(stream)
    async with kit.client() as client:
        text = (await client.get("/metrics")).text
    await stream.aclose()
    assert f'lamina_adapter_requests{{adapter="{digest}",state="running"}} 1.0' in text
    assert f'lamina_lora_adapter_loaded{{adapter_name="{digest}",level="device",pinned="false"}} 1.0' in text
    assert f'running_lora_adapters="{digest}"' in text
    assert "poet" not in text


async def test_metrics_without_an_engine(kit: Kit) -> None:
    kit.engine.ready = False
    async with kit.client() as client:
        response = await client.get("/metrics")
    assert response.status_code == 200
    assert "lamina_engine_up 0.0" in response.text


async def test_start_sweeps_what_a_killed_gateway_left(kit: Kit) -> None:
    left = kit.uploads / "incoming-left"
    left.mkdir(parents=True)
    os.utime(left, (time.time() - 3600,) * 2)
    async with kit.app.router.lifespan_context(kit.app):
        assert kit.staged() == []


async def adapter_request(kit: Kit, digest: str) -> Any:
    from lamina.types import GenerationRequest, SamplingParams

    return GenerationRequest(
        request_id="r", prompt_token_ids=(1, 2), sampling=SamplingParams(max_tokens=9), adapter=digest
    )


async def test_each_request_is_logged_with_who_and_what(kit: Kit, capsys: pytest.CaptureFixture[str]) -> None:
    """But never with the key itself."""
    async with kit.client() as client:
        response = await client.get("/v1/models")
    (line,) = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert line["event"] == "request"
    assert (line["method"], line["path"], line["status"]) == ("GET", "/v1/models", 200)
    assert line["request_id"] == response.headers["x-request-id"]
    assert (line["tenant"], line["key"]) == ("ten_alice", "key_0")
    assert kit.key not in str(line)
