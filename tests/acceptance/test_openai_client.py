"""The official client, unchanged, against the gateway on a real socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from fixtures.gateway import BASE, Kit, build, serve, until
from lamina.engine.testing import saying
from lamina.types import EngineFailure

HI: Any = [{"role": "user", "content": "hi"}]
PROMPT_TOKENS = len("<user>hi\n<assistant>")


@pytest.fixture
async def kit(tmp_path: Path) -> Kit:
    return build(tmp_path)


@pytest.fixture
async def url(kit: Kit) -> AsyncIterator[str]:
    async with serve(kit.app) as base:
        yield f"{base}/v1"


@pytest.fixture
async def client(kit: Kit, url: str) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(api_key=kit.key, base_url=url, max_retries=0) as made:
        yield made


async def test_chat(client: AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(model=BASE, messages=HI, max_completion_tokens=8, seed=1)
    assert answer.choices[0].message.content == "<user>hi"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (PROMPT_TOKENS, 8)
    assert answer._request_id is not None
    assert answer._request_id.startswith("req_")


async def test_chat_from_the_blocking_client(kit: Kit, url: str) -> None:
    """The one that most people use."""

    def ask() -> str:
        with OpenAI(api_key=kit.key, base_url=url) as blocking:
            chunks = blocking.chat.completions.create(model=BASE, messages=HI, max_tokens=8, stream=True)
            return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

    assert await asyncio.to_thread(ask) == "<user>hi"


async def test_chat_stream_with_usage(client: AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model=BASE, messages=HI, max_tokens=5, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "<user"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 5


async def test_cached_tokens_by_tier_are_an_extension_that_the_client_passes_on(client: AsyncOpenAI) -> None:
    """Whole and streamed, chat and completions: the client's own field, and ours beside it, which adds up to it."""
    long: Any = [{"role": "user", "content": "x" * 60}]
    details = []
    for _ in range(2):
        answer = await client.chat.completions.create(model=BASE, messages=long, max_tokens=1)
        assert answer.usage is not None
        details.append(answer.usage.prompt_tokens_details)
    stream = await client.chat.completions.create(
        model=BASE, messages=long, max_tokens=1, stream=True, stream_options={"include_usage": True}
    )
    details += [chunk.usage.prompt_tokens_details async for chunk in stream if chunk.usage is not None]
    for _ in range(2):
        text = await client.completions.create(model=BASE, prompt="y" * 40, max_tokens=1)
        assert text.usage is not None
        details.append(text.usage.prompt_tokens_details)
    chunks = await client.completions.create(
        model=BASE, prompt="y" * 40, max_tokens=1, stream=True, stream_options={"include_usage": True}
    )
    details += [chunk.usage.prompt_tokens_details async for chunk in chunks if chunk.usage is not None]
    assert [found.cached_tokens for found in details if found is not None] == [0, 64, 64, 0, 32, 32]
    for found in details:
        assert found is not None
        assert found.model_extra is not None
        assert sum(found.model_extra["cached_tokens_by_tier"].values()) == found.cached_tokens


async def test_chat_stream_helper_rebuilds_the_completion(kit: Kit, client: AsyncOpenAI) -> None:
    """The client's own accumulator finds nothing amiss."""
    kit.engine.script = saying(*b"hello")
    async with client.chat.completions.stream(model=BASE, messages=HI, logprobs=True) as stream:
        final = await stream.get_final_completion()
    assert final.choices[0].message.content == "hello"
    assert final.choices[0].logprobs is not None
    assert len(final.choices[0].logprobs.content or []) == 5


async def test_comments_while_the_first_token_is_awaited(tmp_path: Path) -> None:
    """The client skips them, and hears of a failure as of any in mid-stream."""
    kit = build(tmp_path, ping_interval_s=0.01)
    async with serve(kit.app) as url, AsyncOpenAI(api_key=kit.key, base_url=f"{url}/v1", max_retries=0) as client:
        kit.engine.pause()
        stream = await client.chat.completions.create(model=BASE, messages=HI, max_tokens=5, stream=True)
        await asyncio.sleep(0.1)
        kit.engine.resume()
        assert "".join([c.choices[0].delta.content or "" async for c in stream]) == "<user"
        kit.engine.pause()
        kit.engine.failure = EngineFailure("not_found", "It was deleted.")
        stream = await client.chat.completions.create(model=BASE, messages=HI, max_tokens=5, stream=True)
        kit.engine.resume()
        with pytest.raises(openai.APIError, match="It was deleted"):
            _ = [chunk async for chunk in stream]
    assert kit.engine.running == ()


async def test_several_choices_and_a_stop_string(client: AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(model=BASE, messages=HI, n=3, stop=["hi"], max_tokens=50)
    assert [choice.message.content for choice in answer.choices] == ["<user>", "user>", "ser>"]
    assert {choice.finish_reason for choice in answer.choices} == {"stop"}


async def test_chat_logprobs(client: AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(model=BASE, messages=HI, max_tokens=2, logprobs=True, top_logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [entry.token for entry in logprobs.content] == ["<", "u"]
    assert logprobs.content[0].bytes == [60]
    assert [top.token for top in logprobs.content[0].top_logprobs] == ["<", "="]


async def test_our_extensions_go_through_extra_body(kit: Kit, client: AsyncOpenAI) -> None:
    await client.chat.completions.create(
        model=BASE, messages=HI, max_tokens=4, extra_body={"top_k": 5, "min_p": 0.1, "ignore_eos": True}
    )
    sampling = kit.engine.submitted[0].sampling
    assert (sampling.top_k, sampling.min_p, sampling.ignore_eos) == (5, 0.1, True)


async def test_completions(client: AsyncOpenAI) -> None:
    answer = await client.completions.create(model=BASE, prompt=["ab", "xy"], max_tokens=4, logprobs=1, n=2)
    assert [choice.text for choice in answer.choices] == ["abab", "baba", "xyxy", "yxyx"]
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.text_offset == [0, 1, 2, 3]


async def test_completions_stream(client: AsyncOpenAI) -> None:
    stream = await client.completions.create(model=BASE, prompt=[104, 105], max_tokens=4, stream=True, echo=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == "hihihi"


async def test_models(kit: Kit, client: AsyncOpenAI, tmp_path: Path) -> None:
    """Names with slashes arrive percent-encoded."""
    await kit.add_adapter(tmp_path, "poet")
    assert [model.id async for model in client.models.list()] == [BASE, "poet"]
    assert (await client.models.retrieve(BASE)).id == BASE
    assert (await client.models.retrieve("poet@1")).owned_by == "alice"


async def test_two_tenants_at_once_see_their_own_adapters_only(kit: Kit, url: str, tmp_path: Path) -> None:
    """Concurrent streams; the engine gets each tenant's namespace."""
    mine = await kit.add_adapter(tmp_path, "poet", tenant="alice")
    theirs = await kit.add_adapter(tmp_path, "poet", tenant="bob")

    async def ask(key: str) -> str:
        async with AsyncOpenAI(api_key=key, base_url=url) as tenant:
            answer = await tenant.chat.completions.with_raw_response.create(model="poet", messages=HI, max_tokens=3)
            return answer.headers["x-lamina-adapter-digest"]

    assert await asyncio.gather(ask(kit.key), ask(kit.keys.issue("bob"))) == [mine, theirs]
    assert len({request.namespace for request in kit.engine.submitted}) == 2


@pytest.mark.parametrize(
    ("body", "error", "code", "param"),
    [
        ({"model": "nope"}, openai.NotFoundError, "model_not_found", "model"),
        ({"max_tokens": 0}, openai.BadRequestError, "invalid_request", "max_tokens"),
        ({"max_tokens": 10**9}, openai.BadRequestError, "context_length_exceeded", "max_tokens"),
        ({"messages": []}, openai.BadRequestError, "invalid_request", "messages"),
        ({"tools": [{"type": "function"}]}, openai.BadRequestError, "unsupported_parameter", "tools"),
        ({"extra_body": {"nonsense": 1}}, openai.BadRequestError, "unknown_parameter", "nonsense"),
    ],
)
async def test_errors_are_the_clients_own_classes(
    client: AsyncOpenAI, body: Any, error: type[openai.APIStatusError], code: str, param: str
) -> None:
    with pytest.raises(error) as info:
        await client.chat.completions.create(**{"model": BASE, "messages": HI, **body})
    assert (info.value.code, info.value.param) == (code, param)
    assert info.value.request_id is not None


async def test_bad_keys(kit: Kit, url: str) -> None:
    async with AsyncOpenAI(api_key="lamina_live_x_y", base_url=url) as stranger:
        with pytest.raises(openai.AuthenticationError) as info:
            await stranger.models.list()
    assert info.value.code == "invalid_api_key"
    async with AsyncOpenAI(api_key=kit.keys.issue("bob", scopes=frozenset({"usage:read"})), base_url=url) as limited:
        with pytest.raises(openai.PermissionDeniedError):
            await limited.chat.completions.create(model=BASE, messages=HI)


async def test_the_client_retries_as_told(kit: Kit, url: str) -> None:
    """503 with retry-after-ms: it waits that long and succeeds unnoticed."""
    kit.engine.ready = False

    async def come_up() -> None:
        await until(lambda: b'status="503"' in kit.deps.metrics.render(None, None))
        kit.engine.ready = True

    async with AsyncOpenAI(api_key=kit.key, base_url=url, max_retries=2) as patient:
        starting = asyncio.create_task(come_up())
        answer = await patient.chat.completions.create(model=BASE, messages=HI, max_tokens=2)
        await starting
    assert answer.choices[0].message.content == "<u"


async def test_a_failure_in_mid_stream_reaches_the_caller(kit: Kit, client: AsyncOpenAI) -> None:
    kit.engine.failure, kit.engine.fail_after = EngineFailure("engine_unavailable", "The engine died."), 3
    stream = await client.chat.completions.create(model=BASE, messages=HI, stream=True)
    for _ in range(1 + 3):
        await anext(stream)  # the role and three deltas
    with pytest.raises(openai.APIError, match="The engine died") as info:
        await anext(stream)
    assert info.value.code == "engine_unavailable"


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_stops_the_engine(kit: Kit, client: AsyncOpenAI, stream: bool) -> None:
    """While streaming and while waiting for the whole."""
    kit.engine.script = saying(*b"x" * 900)
    kit.engine.delay_s = 0.02
    if stream:
        answer = await client.chat.completions.create(model=BASE, messages=HI, max_tokens=900, stream=True)
        await anext(aiter(answer))
        await answer.close()
    else:
        with pytest.raises(openai.APITimeoutError):
            await client.chat.completions.create(model=BASE, messages=HI, max_tokens=900, timeout=0.5)
    await until(lambda: kit.engine.running == ())
    assert kit.engine.cancelled == [(kit.engine.submitted[0].request_id, None)]
    await until(lambda: b'status="499"' in kit.deps.metrics.render(None, None))


async def test_a_client_that_leaves_the_queue_is_forgotten(kit: Kit, client: AsyncOpenAI) -> None:
    """Before the first token, when nothing was sent yet."""
    kit.engine.pause()
    with pytest.raises(openai.APITimeoutError):
        await client.chat.completions.create(model=BASE, messages=HI, stream=True, timeout=0.5)
    await until(lambda: kit.engine.running == ())


async def test_many_streams_at_once(kit: Kit, client: AsyncOpenAI) -> None:
    async def ask(number: int) -> str:
        messages: Any = [{"role": "user", "content": f"{number:03}"}]
        stream = await client.chat.completions.create(model=BASE, messages=messages, max_tokens=9, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    answers = await asyncio.gather(*(ask(number) for number in range(40)))
    assert answers == [f"<user>{number:03}" for number in range(40)]
    assert kit.engine.running == ()
