"""Bad input over HTTP: each case is a clear error before anything runs, and nothing is left behind."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from fixtures.gateway import BASE, Kit, zipped
from lamina.gateway.schemas.chat import ChatRequest
from lamina.gateway.schemas.completions import CompletionRequest

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]


async def refused(kit: Kit, body: dict[str, Any], *, path: str = CHAT, key: str | None = None) -> dict[str, Any]:
    """The error of a 4xx; the engine must not have been asked."""
    async with kit.client(key) as client:
        response = await client.post(path, json={"model": BASE, "messages": HI, **body})
    assert 400 <= response.status_code < 500
    assert kit.engine.submitted == []
    error: dict[str, Any] = response.json()["error"]
    return error | {"status": response.status_code}


async def test_unknown_model(kit: Kit) -> None:
    error = await refused(kit, {"model": "gpt-9"})
    assert (error["status"], error["code"], error["param"]) == (404, "model_not_found", "model")


async def test_foreign_adapter_is_like_an_unknown_model(kit: Kit, tmp_path: Any) -> None:
    """Word for word, so that its existence can't be guessed."""
    await kit.add_adapter(tmp_path, "secret", tenant="bob")
    foreign = await refused(kit, {"model": "secret"})
    missing = await refused(kit, {"model": "nothing"})
    assert foreign["status"] == 404
    assert foreign["message"].replace("secret", "nothing") == missing["message"]


@pytest.mark.parametrize("name", ["../../etc/passwd", "a b", "\u0000", "x" * 256, "a'; DROP TABLE adapters;--"])
async def test_hostile_model_names(kit: Kit, name: str) -> None:
    assert (await refused(kit, {"model": name}))["status"] == 404


async def test_bad_key(kit: Kit) -> None:
    error = await refused(kit, {}, key="lamina_live_nope_nope")
    assert (error["status"], error["code"]) == (401, "invalid_api_key")


async def test_prompt_longer_than_the_context(kit: Kit) -> None:
    """The limit and the need are in the message and in the details."""
    error = await refused(kit, {"messages": [{"role": "user", "content": "x" * 2000}]})
    assert (error["status"], error["code"], error["param"]) == (400, "context_length_exceeded", "messages")
    assert "1024 tokens" in error["message"]
    assert error["details"]["limit"] == 1024
    assert error["details"]["prompt"] > 2000


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("value", [0, -1, -(10**30), 1.5, "10", True, []])
async def test_max_tokens_zero_negative_or_of_a_wrong_type(kit: Kit, name: str, value: Any) -> None:
    error = await refused(kit, {name: value})
    assert (error["status"], error["param"]) == (400, name)


@pytest.mark.parametrize("value", [1024, 10**9, 10**300])
async def test_max_tokens_huge(kit: Kit, value: int) -> None:
    error = await refused(kit, {"max_tokens": value})
    assert (error["code"], error["param"]) == ("context_length_exceeded", "max_tokens")


async def test_two_different_max_tokens(kit: Kit) -> None:
    error = await refused(kit, {"max_tokens": 5, "max_completion_tokens": 6})
    assert error["param"] == "max_tokens"


@pytest.mark.parametrize("messages", [[], None, "hi", {}, [None], ["hi"], [{}], [{"role": "user"}], [[]]])
async def test_messages_empty_or_of_a_wrong_type(kit: Kit, messages: Any) -> None:
    error = await refused(kit, {"messages": messages})
    assert error["status"] == 400
    assert error["param"].startswith("messages")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", "0.5"), ("temperature", -0.1), ("temperature", 2.1), ("temperature", True), ("top_p", 0),
        ("top_p", 1.01), ("n", 0), ("n", 17), ("n", "2"), ("seed", 1.5), ("seed", 2**63), ("stop", 5), ("stop", [1]),
        ("stop", ["x"] * 17), ("stop", ""), ("presence_penalty", 3), ("frequency_penalty", -3), ("logit_bias", []),
        ("logit_bias", {"a": 1}), ("logit_bias", {"1": "x"}), ("stream", "yes"), ("stream_options", []),
        ("logprobs", 1), ("top_logprobs", 21), ("top_logprobs", 2), ("user", 7), ("model", ""), ("model", 3),
        ("top_k", -2), ("min_p", 2), ("repetition_penalty", 0), ("min_tokens", -1), ("stop_token_ids", ["a"]),
        ("metadata", [1]), ("verbosity", "loud"),
    ],
)  # fmt: skip
async def test_wrong_types_and_ranges(kit: Kit, name: str, value: Any) -> None:
    """400, not FastAPI's 422, and the parameter is named."""
    error = await refused(kit, {name: value})
    assert (error["status"], error["type"]) == (400, "invalid_request_error")
    assert error["param"].split(".")[0] == name


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999"])
async def test_numbers_that_are_not_finite(kit: Kit, value: str) -> None:
    """Python's JSON reader takes them; we don't."""
    body = json.dumps({"model": BASE, "messages": HI})[:-1] + f', "temperature": {value}}}'
    async with kit.client() as client:
        response = await client.post(CHAT, content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "temperature"


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b"null", b'"text"', b"{'a': 1}", b'{"a": 1,}', b"\xff\xfe", b'{"model": "\xff"}',
        b"[" * 100_000, b'{"max_tokens": ' + b"9" * 5000 + b"}",
    ],
    ids=range(11),
)  # fmt: skip
async def test_invalid_json(kit: Kit, body: bytes) -> None:
    """Whatever breaks the parser: one and the same kind of answer."""
    async with kit.client() as client:
        response = await client.post(CHAT, content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"
    assert kit.engine.submitted == []


async def test_json_without_its_content_type(kit: Kit) -> None:
    async with kit.client() as client:
        response = await client.post(CHAT, content=b'{"model": "x", "messages": []}')
    assert response.status_code == 400
    assert "Content-Type: application/json" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    "extra",
    [
        b'"messages": [{"role": "user", "content": "\\ud800"}]',
        b'"messages": [{"role": "user", "content": [{"type": "text", "text": "\\ud800"}]}]',
        b'"messages": [{"role": "user", "content": "x"}], "stop": "\\ud800"',
        b'"messages": [{"role": "user", "content": "x"}], "\\ud800": 1',
        b'"messages": [{"role": "\\ud800", "content": "x"}]',
    ],
)
async def test_half_a_surrogate_pair(kit: Kit, extra: bytes) -> None:
    """Valid JSON, but no valid Unicode: refused wherever it is, and the refusal itself can be written."""
    body = b'{"model": "%s", %s}' % (BASE.encode(), extra)
    async with kit.client() as client:
        response = await client.post(CHAT, content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"
    assert kit.engine.submitted == []


@pytest.mark.parametrize("name", ["temprature", "guided_choice", "__class__", "extra_body", "n\n"])
async def test_unknown_parameters(kit: Kit, name: str) -> None:
    """A typing error must not silently change the answer."""
    error = await refused(kit, {name: 1})
    assert (error["code"], error["param"]) == ("unknown_parameter", name)


async def test_unknown_role(kit: Kit) -> None:
    error = await refused(kit, {"messages": [{"role": "wizard", "content": "x"}]})
    assert error["param"] == "messages.0.role"


async def test_too_many_messages(kit: Kit) -> None:
    assert (await refused(kit, {"messages": HI * 4097}))["param"] == "messages"


async def test_an_upload_that_is_a_pickle(kit: Kit) -> None:
    """Never loaded, whatever it is called."""
    pickled = zipped({"adapter_config.json": b"{}", "adapter_model.bin": b"\x80\x04N."})
    async with kit.client() as client:
        response = await client.post("/v1/adapters", files={"file": ("a.zip", pickled)}, data={"name": "a"})
    assert response.status_code == 422
    assert "pickle" in response.text
    assert kit.staged() == []


async def test_an_upload_with_names_that_climb(kit: Kit) -> None:
    climbing = zipped({"../../adapter_config.json": b"{}", "adapter_model.safetensors": b""})
    async with kit.client() as client:
        response = await client.post("/v1/adapters", files={"file": ("a.zip", climbing)}, data={"name": "a"})
    assert response.status_code == 422
    assert "leads out of the archive" in response.text
    assert kit.staged() == []


async def test_a_zip_bomb(kit: Kit) -> None:
    """The cap on unpacked bytes is the cap on uploads."""
    bomb = zipped({"adapter_config.json": b"{}", "adapter_model.safetensors": bytes(3 << 20)})
    small = type(kit.deps.config)(max_upload_bytes=1 << 20)
    object.__setattr__(kit.deps, "config", small)
    async with kit.client() as client:
        response = await client.post("/v1/adapters", files={"file": ("a.zip", bomb)}, data={"name": "a"})
    assert response.status_code == 413
    assert "unpacks to more than the limit" in response.text
    assert kit.staged() == []


HUGE: dict[str, tuple[str, dict[str, Any]]] = {
    "prompt-of-bad-ids": ("/v1/completions", {"messages": None, "prompt": [1] * 50_000 + [None] * 50_000}),
    "prompt-of-bad-lists": ("/v1/completions", {"messages": None, "prompt": [[None]] * 50_000}),
    "content-of-bad-parts": (CHAT, {"messages": [{"role": "user", "content": [None] * 100_000}]}),
    "bad-messages": (CHAT, {"messages": [None] * 4000}),
    "bad-stop": (CHAT, {"stop": [None] * 100_000}),
}


@pytest.mark.parametrize(("path", "body"), HUGE.values(), ids=HUGE.keys())
def test_a_huge_wrong_list_is_refused_at_its_first_element(path: str, body: dict[str, Any]) -> None:
    """Validation must not collect an error for each of a million elements: memory and the event loop are shared."""
    request = {"model": BASE, "messages": HI, **body}
    if request["messages"] is None:
        del request["messages"]
    schema = CompletionRequest if path == "/v1/completions" else ChatRequest
    with pytest.raises(ValidationError) as refusal:
        schema.model_validate(request)
    assert refusal.value.error_count() < 10


@pytest.mark.parametrize("name", ["logit_bias", "metadata"])
async def test_a_huge_wrong_object_is_refused_by_its_size(kit: Kit, name: str) -> None:
    error = await refused(kit, {name: {str(number): [] for number in range(100_000)}})
    assert (error["status"], error["param"]) == (400, name)
    assert "at most 1024 items, not 100000" in error["message"]
    assert "more invalid" not in error["message"]


async def test_a_hundred_thousand_unknown_parameters_are_refused_by_the_first(kit: Kit) -> None:
    """The same answer as to one, for the price of one."""
    many = {f"unknown_{number}": number for number in range(100_000)}
    one = await refused(kit, {"unknown_0": 0})
    assert await refused(kit, many) == one
    assert (one["code"], one["param"]) == ("unknown_parameter", "unknown_0")
    with pytest.raises(ValidationError) as refusal:
        ChatRequest.model_validate({"model": BASE, "messages": HI, **many})
    assert refusal.value.error_count() == 1


async def test_unknown_fields_of_a_message_are_refused_by_the_first(kit: Kit) -> None:
    message = HI[0] | {f"unknown_{number}": number for number in range(100_000)}
    error = await refused(kit, {"messages": [message]})
    assert (error["code"], error["param"]) == ("unknown_parameter", "messages.0.unknown_0")
