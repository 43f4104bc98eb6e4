"""POST /v1/chat/completions."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from fixtures.gateway import BASE, Kit, build, sse, until
from lamina.engine.testing import saying
from lamina.gateway.codec import LONG_CHARS
from lamina.gateway.testing import ByteCodec
from lamina.types import EngineFailure

URL = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]


async def post(kit: Kit, **body: Any) -> Any:
    async with kit.client() as client:
        return await client.post(URL, json={"model": BASE, "messages": HI, **body})


async def test_an_answer(kit: Kit) -> None:
    """The twin echoes the rendered conversation."""
    response = await post(kit, max_tokens=8)
    body = response.json()
    assert response.status_code == 200
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    assert body["model"] == BASE
    assert body["system_fingerprint"] == "fp_7e577e577e577e57"
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "<user>hi", "refusal": None},
            "logprobs": None,
            "finish_reason": "length",
        }
    ]
    prompt = len("<user>hi\n<assistant>")
    assert body["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": 8,
        "total_tokens": prompt + 8,
        "prompt_tokens_details": {"cached_tokens": 0, "cached_tokens_by_tier": {"gpu": 0, "host": 0, "store": 0}},
    }


async def test_the_stream_has_the_order_that_clients_rely_on(kit: Kit) -> None:
    """Role, deltas, empty delta with the reason, usage without choices, [DONE]; usage is null before."""
    kit.engine.script = saying(*b"ok")
    response = await post(kit, stream=True, stream_options={"include_usage": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    *chunks, done = sse(response.text)
    assert done == "[DONE]"
    assert [chunk["choices"][0]["delta"] for chunk in chunks[:-1]] == [
        {"role": "assistant", "content": ""},
        {"content": "o"},
        {"content": "k"},
        {},
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]] == [None, None, None, "stop"]
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * 4
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 2
    assert len({chunk["id"] for chunk in chunks}) == 1


async def test_without_include_usage_no_chunk_has_usage(kit: Kit) -> None:
    response = await post(kit, stream=True, max_tokens=2)
    assert all("usage" not in chunk for chunk in sse(response.text)[:-1])


async def test_stream_and_whole_agree(kit: Kit) -> None:
    """Text, reasons and log-probabilities, for two choices with a stop string."""
    wanted = {"n": 2, "max_tokens": 12, "stop": "hi", "logprobs": True, "top_logprobs": 1}
    whole = (await post(kit, **wanted)).json()["choices"]
    texts, tokens = ["", ""], [[], []]
    reasons: list[Any] = [None, None]
    for chunk in sse((await post(kit, stream=True, **wanted)).text)[:-1]:
        choice = chunk["choices"][0]
        texts[choice["index"]] += choice["delta"].get("content", "")
        tokens[choice["index"]] += (choice["logprobs"] or {"content": []})["content"]
        reasons[choice["index"]] = choice["finish_reason"] or reasons[choice["index"]]
    assert texts == [choice["message"]["content"] for choice in whole] == ["<user>", "user>"]
    assert reasons == [choice["finish_reason"] for choice in whole] == ["stop", "stop"]
    assert tokens == [choice["logprobs"]["content"] for choice in whole]
    assert ["".join(token["token"] for token in each) for each in tokens] == texts


async def test_events_are_ascii(kit: Kit) -> None:
    """U+2028 is a line end to some clients' line splitters."""
    kit.engine.script = saying(*"\u2028é".encode())
    response = await post(kit, stream=True)
    assert response.text.isascii()
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in sse(response.text)[:-1])
    assert text == "\u2028é"


async def test_content_parts_and_developer_messages(kit: Kit) -> None:
    messages = [
        {"role": "developer", "content": "be terse"},
        {"role": "user", "content": [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]},
    ]
    response = await post(kit, messages=messages, max_tokens=40)
    assert response.json()["choices"][0]["message"]["content"].startswith("<system>be terse\n<user>one two\n")


async def test_our_own_answer_can_be_sent_back(kit: Kit) -> None:
    """Clients append `message` as it came, with all its nulls."""
    message = (await post(kit, max_tokens=2)).json()["choices"][0]["message"]
    echoed = message | {"annotations": [], "tool_calls": None, "function_call": None, "audio": None}
    assert (await post(kit, messages=[*HI, echoed, *HI])).status_code == 200


async def test_continue_final_message(kit: Kit) -> None:
    messages = [*HI, {"role": "assistant", "content": "Once"}]
    await post(kit, messages=messages, continue_final_message=True)
    assert bytes(kit.engine.submitted[0].prompt_token_ids) == b"<user>hi\n<assistant>Once"


@pytest.mark.parametrize("extra", [{"add_generation_prompt": True}, {"messages": HI}])
async def test_continue_final_message_needs_an_assistant(kit: Kit, extra: dict[str, Any]) -> None:
    messages = {"messages": [*HI, {"role": "assistant", "content": "Once"}]}
    response = await post(kit, continue_final_message=True, **{**messages, **extra})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "continue_final_message"


async def test_add_generation_prompt_can_be_switched_off(kit: Kit) -> None:
    await post(kit, add_generation_prompt=False)
    assert bytes(kit.engine.submitted[0].prompt_token_ids) == b"<user>hi\n"


async def test_ignored_parameters_are_accepted(kit: Kit) -> None:
    """What does not change the answer, and neutral values of what would."""
    response = await post(
        kit, max_tokens=1, user="u", metadata={"a": "b"}, store=True, safety_identifier="s", service_tier="flex",
        verbosity="low", prompt_cache_key="k", parallel_tool_calls=True, tools=[], tool_choice="none",
        response_format={"type": "text"}, modalities=["text"], functions=None, reasoning_effort=None, audio=None,
    )  # fmt: skip
    assert response.status_code == 200


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("response_format", {"type": "json_object"}),
        ("response_format", {"type": "json_schema", "json_schema": {}}),
        ("audio", {"voice": "alloy"}),
        ("modalities", ["text", "audio"]),
        ("web_search_options", {}),
        ("tool_choice", "required"),
        ("reasoning_effort", "high"),
        ("cache_salt", "mine"),
        ("priority", 9),
        ("chat_template", "{{ evil }}"),
    ],
)
async def test_unsupported_parameters_are_refused_by_name(kit: Kit, name: str, value: Any) -> None:
    """Ignoring them would change the meaning; tenants' templates, priorities and salts are never taken."""
    response = await post(kit, **{name: value})
    error = response.json()["error"]
    assert response.status_code == 400
    assert (error["code"], error["param"]) == ("unsupported_parameter", name)


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]},
        {"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]},
        {"role": "tool", "content": "42", "tool_call_id": "1"},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]},
    ],
)
async def test_unsupported_content_is_refused(kit: Kit, message: dict[str, Any]) -> None:
    response = await post(kit, messages=[message])
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "unsupported_parameter"


async def test_a_template_that_refuses_is_a_400(kit: Kit) -> None:
    response = await post(kit, messages=[{"role": "assistant", "content": "me first"}])
    assert response.status_code == 400
    assert "must not begin" in response.json()["error"]["message"]


async def test_the_engine_gets_the_tenants_identity(kit: Kit, tmp_path: Path) -> None:
    """Namespace, weight and digest come from the key and the adapter, never from the body."""
    digest = await kit.add_adapter(tmp_path, "poet")
    response = await post(kit, model="poet", seed=3, temperature=0)
    (request,) = kit.engine.submitted
    assert request.tenant == "ten_alice"
    assert request.namespace == (await kit.keys.authenticate(kit.key)).namespace
    assert request.adapter == digest
    assert response.headers["x-lamina-adapter-digest"] == digest
    assert response.json()["model"] == "poet"


async def test_a_version_can_be_asked_for(kit: Kit, tmp_path: Path) -> None:
    first = await kit.add_adapter(tmp_path, "poet", r=4)
    await kit.add_adapter(tmp_path, "poet", r=8)
    response = await post(kit, model="poet@1", max_tokens=1)
    assert response.headers["x-lamina-adapter-digest"] == first


async def test_cached_tokens_are_reported(kit: Kit) -> None:
    await post(kit, max_tokens=1)
    usage = (await post(kit, max_tokens=1)).json()["usage"]
    by_tier = {"gpu": 16, "host": 0, "store": 0}
    assert usage["prompt_tokens_details"] == {"cached_tokens": 16, "cached_tokens_by_tier": by_tier}


async def test_a_refusal_is_an_http_error_even_for_streams(kit: Kit) -> None:
    """Decided before the first byte."""
    kit.engine.ready = False
    response = await post(kit, stream=True)
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "engine_unavailable"
    assert response.headers["retry-after-ms"] == "2000"


@pytest.mark.parametrize("stream", [True, False])
async def test_a_failure_before_the_first_token_is_an_http_error(kit: Kit, stream: bool) -> None:
    kit.engine.failure = EngineFailure("engine_overloaded", "full", None, 1.5)
    response = await post(kit, stream=stream)
    assert response.status_code == 503
    assert response.headers["retry-after"] == "2"


@pytest.mark.parametrize("stream", [True, False])
async def test_an_adapter_that_is_deleted_before_its_first_load_is_not_found(
    kit: Kit, tmp_path: Path, stream: bool
) -> None:
    """The engine learns it only when the request's turn comes; the status can still say it."""
    await kit.add_adapter(tmp_path, "poet")
    kit.engine.failure = EngineFailure("not_found", "The adapter was deleted before the request could run.", "model")
    response = await post(kit, model="poet", stream=stream)
    assert response.status_code == 404
    error = response.json()["error"]
    assert (error["code"], error["param"]) == ("not_found", "model")
    assert "was deleted" in error["message"]


async def test_a_failure_in_mid_stream_is_an_error_event(kit: Kit) -> None:
    """The last event has the error; there is no [DONE] and no reason that would make it look complete."""
    kit.engine.failure, kit.engine.fail_after = EngineFailure("engine_error", "secret detail"), 2
    events = sse((await post(kit, stream=True)).text)
    assert events[-1]["error"]["code"] == "engine_error"
    assert events[-1]["error"]["type"] == "server_error"
    assert "secret" not in str(events)
    assert all(event["choices"][0]["finish_reason"] is None for event in events[:-1])
    assert 'lamina_stream_errors_total{code="engine_error"} 1.0' in kit.deps.metrics.render(None, None).decode()


async def test_a_silent_engine_is_given_up(tmp_path: Path) -> None:
    kit = build(tmp_path, first_event_timeout_s=0.05)
    kit.engine.pause()
    response = await post(kit)
    assert response.status_code == 503
    assert "0.05 s" in response.json()["error"]["message"]
    assert kit.engine.running == ()


async def test_a_long_conversation_does_not_hold_up_the_loop(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rendering and tokenizing of long texts happen in a thread."""
    threads = set()

    def encode(self: ByteCodec, text: str, *, add_special_tokens: bool = True) -> list[int]:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            threads.add("worker")
        else:
            threads.add("loop")
        return list(text.encode())

    monkeypatch.setattr(ByteCodec, "encode", encode)
    await post(kit, messages=[{"role": "user", "content": "x" * LONG_CHARS}])
    assert threads == {"worker"}


async def test_a_cancelled_server_leaves_nothing_running(kit: Kit) -> None:
    kit.engine.pause()
    task = asyncio.create_task(post(kit))
    await until(lambda: kit.engine.running)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert kit.engine.running == ()
