"""Client and engine process over a real socket, with a core that does no arithmetic."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import zmq
import zmq.asyncio

from lamina.engine.wire import AskStats, encode
from lamina.errors import (
    Conflict,
    ContextLengthExceeded,
    EngineInternal,
    EngineUnavailable,
    InvalidRequest,
    NotFound,
    QuotaNotCoverable,
)
from lamina.types import (
    FinishReason,
    GenerationRequest,
    PinOrder,
    PinRecord,
    PrefixExplanation,
    PrefixOrder,
    QuotaPolicy,
    SamplingParams,
    TierQuota,
    TokenEvent,
    VerifyOrder,
)
from support.fake_engine import (
    BUG,
    CORRUPT,
    ENDLESS,
    FATAL,
    INFO,
    REFUSE,
    SLOW_STEP,
    Harness,
    harness,
    request,
)


@pytest.fixture
async def engine() -> AsyncIterator[Harness]:
    async with harness() as running:
        await asyncio.wait_for(running.client.wait_ready(), 30)
        yield running


async def collect(engine: Harness, wanted: GenerationRequest) -> list[TokenEvent]:
    async with asyncio.timeout(30):
        return [event async for event in engine.client.submit(wanted)]


def tokens_of(events: list[TokenEvent], index: int = 0) -> list[int]:
    return [token for event in events if event.index == index for token in event.token_ids]


async def test_a_request_streams_its_tokens_and_ends(engine: Harness) -> None:
    """Tokens arrive in order, the last event carries the reason, and the core's description is known."""
    events = await collect(engine, request("a", tokens=5))
    assert tokens_of(events) == [0, 1, 2, 3, 4]
    assert [event.finish_reason for event in events if event.finish_reason] == [FinishReason.LENGTH]
    assert events[-1].finish_reason is FinishReason.LENGTH
    assert engine.client.info == INFO


async def test_all_choices_arrive_in_one_stream(engine: Harness) -> None:
    """With n = 3 the stream ends after the last choice's last event, each choice in order."""
    events = await collect(engine, request("a", tokens=4, n=3))
    assert {index: tokens_of(events, index) for index in range(3)} == {
        0: [0, 1, 2, 3],
        1: [1000, 1001, 1002, 1003],
        2: [2000, 2001, 2002, 2003],
    }
    assert sum(event.finish_reason is not None for event in events) == 3


async def test_concurrent_requests_do_not_mix(engine: Harness) -> None:
    """Forty requests at once each get exactly their own tokens."""
    results = await asyncio.gather(*(collect(engine, request(f"r{i}", tokens=i % 7 + 1)) for i in range(40)))
    for i, events in enumerate(results):
        assert {event.request_id for event in events} == {f"r{i}"}
        assert tokens_of(events) == list(range(i % 7 + 1))


async def test_a_refusal_is_raised_as_the_same_error(engine: Harness) -> None:
    """The core's error crosses the border with type, message, param and typed attributes."""
    with pytest.raises(ContextLengthExceeded, match="4096 tokens") as caught:
        await collect(engine, request("a", kind=REFUSE))
    assert (caught.value.limit, caught.value.prompt, caught.value.param) == (4096, 5000, "messages")


async def test_a_bug_in_submit_costs_one_request(engine: Harness) -> None:
    """An unexpected exception refuses that request, reveals nothing, and the core serves on."""
    with pytest.raises(EngineInternal) as caught:
        await collect(engine, request("a", kind=BUG))
    assert "bug that one" not in caught.value.message
    assert tokens_of(await collect(engine, request("b"))) == [0, 1, 2]


async def test_what_cannot_be_encoded_is_the_callers_fault(engine: Harness) -> None:
    """An integer beyond 64 bits is an InvalidRequest and leaves nothing behind."""
    huge = GenerationRequest(request_id="a", prompt_token_ids=(0,), sampling=SamplingParams(seed=2**70))
    with pytest.raises(InvalidRequest, match="64 bits"):
        await collect(engine, huge)
    assert tokens_of(await collect(engine, request("a"))) == [0, 1, 2]


async def test_an_id_in_use_is_refused_and_does_not_disturb_its_owner(engine: Harness) -> None:
    """A second request of the same id raises Conflict; the first goes on."""
    first = engine.client.submit(request("a", tokens=ENDLESS))
    await anext(first)
    with pytest.raises(Conflict):
        await collect(engine, request("a"))
    assert tokens_of([await anext(first)]) == [1]
    await first.aclose()


async def test_closing_the_iterator_cancels_in_the_core(engine: Harness) -> None:
    """`aclose` in mid-stream ends all choices in the core."""
    stream = engine.client.submit(request("a", tokens=ENDLESS, n=2))
    await anext(stream)
    await stream.aclose()
    await core_settles(engine, cancelled=2)


async def test_cancelling_the_consumer_cancels_in_the_core(engine: Harness) -> None:
    """A cancelled task, as of a disconnected client, frees what its request held."""
    started = asyncio.Event()

    async def consume() -> None:
        async for _ in engine.client.submit(request("a", tokens=ENDLESS)):
            started.set()

    task = asyncio.create_task(consume())
    await asyncio.wait_for(started.wait(), 30)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await core_settles(engine, cancelled=1)


async def test_one_choice_can_be_cancelled(engine: Harness) -> None:
    """`cancel(id, index)` ends that choice with CANCELLED and leaves the others; unknown ids are ignored."""
    stream = engine.client.submit(request("a", tokens=ENDLESS, n=2))
    await anext(stream)
    await engine.client.cancel("unknown")
    await engine.client.cancel("a", 1)
    async with asyncio.timeout(30):
        ended = next_finished(stream)
        assert (await ended).index == 1
    await engine.client.cancel("a")
    last = await next_finished(stream)
    assert (last.index, last.finish_reason) == (0, FinishReason.CANCELLED)
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def test_adapters_are_unloaded_in_the_core(engine: Harness) -> None:
    """`unload_adapter` reaches the core, and `stats` brings its answer back."""
    await engine.client.unload_adapter("abc")
    stats = await engine.client.stats()
    assert [adapter.digest for adapter in stats.adapters] == ["abc"]


async def test_a_long_step_is_not_taken_for_death() -> None:
    """Heartbeats go on while the core's thread is busy for longer than the time-out."""
    async with harness(heartbeat_timeout_s=1.0) as engine:
        await engine.client.wait_ready()
        events = await collect(engine, request("a", kind=SLOW_STEP, tokens=3, detail=2500))
        assert tokens_of(events) == [0, 1, 2]
        assert len(engine.processes) == 1


async def test_a_frozen_engine_is_lost_and_replaced() -> None:
    """An engine that stops answering without dying ends its requests, is killed and restarted."""
    async with harness(heartbeat_timeout_s=1.0) as engine:
        await engine.client.wait_ready()
        stream = engine.client.submit(request("a", tokens=ENDLESS))
        await anext(stream)
        os.kill(engine.supervisor.pid, signal.SIGSTOP)
        async with asyncio.timeout(30):
            last = await next_finished(stream)
            assert last.error is not None
            await engine.client.wait_ready()
        assert await engine.processes[0].wait() == -signal.SIGKILL
        assert tokens_of(await collect(engine, request("b"))) == [0, 1, 2]


async def test_a_hung_step_is_lost_and_replaced() -> None:
    """A loop that does not turn is given up although its process still sends heartbeats."""
    async with harness(stall_timeout_s=0.5) as engine:
        await engine.client.wait_ready()
        events = await collect(engine, request("a", kind=SLOW_STEP, tokens=3, detail=60_000))
        assert events[-1].finish_reason is FinishReason.ERROR
        await asyncio.wait_for(engine.client.wait_ready(), 30)
        assert await engine.processes[0].wait() == -signal.SIGKILL


async def test_a_killed_engine_ends_its_requests_and_comes_back(engine: Harness) -> None:
    """SIGKILL in mid-stream: each open choice gets an error, new ones are refused, service resumes."""
    stream = engine.client.submit(request("a", tokens=ENDLESS, n=2))
    await anext(stream)
    os.kill(engine.supervisor.pid, signal.SIGKILL)
    async with asyncio.timeout(1 + 4):  # within a second; four more for a busy machine
        ends = [await next_finished(stream), await next_finished(stream)]
    for index, end in enumerate(ends):
        assert (end.index, end.finish_reason) == (index, FinishReason.ERROR)
        assert end.error is not None
        assert end.error.code == "engine_unavailable"
        assert end.error.retry_after_s is not None
        assert end.error.retry_after_s > 0
    assert not engine.client.ready
    with pytest.raises(EngineUnavailable) as caught:
        await collect(engine, request("b"))
    assert caught.value.retry_after_s is not None
    with pytest.raises(EngineUnavailable):
        await engine.client.stats()
    await asyncio.wait_for(engine.client.wait_ready(), 30)
    assert tokens_of(await collect(engine, request("a"))) == [0, 1, 2]
    assert len(engine.processes) == 2


async def test_a_request_without_a_first_event_is_refused_when_the_engine_dies(engine: Harness) -> None:
    """Nothing was produced yet, so the caller gets an exception, and may honestly try again."""
    blocker = engine.client.submit(request("a", kind=SLOW_STEP, tokens=3, detail=60_000))
    await anext(blocker)
    waiting = asyncio.create_task(collect(engine, request("b")))
    await asyncio.sleep(0)  # it has been sent
    os.kill(engine.supervisor.pid, signal.SIGKILL)
    with pytest.raises(EngineUnavailable):
        await asyncio.wait_for(waiting, 30)
    await blocker.aclose()


@pytest.mark.parametrize("kind", [FATAL, CORRUPT])
async def test_a_core_that_cannot_be_trusted_is_replaced(engine: Harness, kind: int) -> None:
    """A fatal error in a step, or books that do not balance when idle, ends the process with status 70."""
    if kind == FATAL:
        assert (await collect(engine, request("a", kind=kind)))[-1].finish_reason is FinishReason.ERROR
    else:
        await collect(engine, request("a", kind=kind))
    assert await asyncio.wait_for(engine.processes[0].wait(), 30) == 70
    await asyncio.wait_for(engine.client.wait_ready(), 30)
    assert tokens_of(await collect(engine, request("b"))) == [0, 1, 2]


async def test_sigterm_under_load_ends_everything_and_exits_0(engine: Harness) -> None:
    """`stop` lets the core say CANCELLED for all that ran; no process is left."""
    streams = [engine.client.submit(request(f"r{i}", tokens=ENDLESS)) for i in range(20)]
    for stream in streams:
        await anext(stream)
    process = engine.processes[0]
    await asyncio.wait_for(engine.supervisor.stop(), 30)
    assert await process.wait() == 0
    for stream in streams:
        last = await next_finished(stream)
        assert last.finish_reason in (FinishReason.CANCELLED, FinishReason.ERROR)
    await asyncio.wait_for(engine.watching, 30)
    assert len(engine.processes) == 1


async def test_a_core_that_refuses_its_configuration_is_not_restarted() -> None:
    """The first start decides: run() raises instead of trying for ever."""
    async with harness("--refuse") as engine:
        with pytest.raises(EngineUnavailable, match="exit status 78"):
            await asyncio.wait_for(engine.watching, 30)
        assert len(engine.processes) == 1


async def test_foreign_and_garbled_frames_reach_nobody(engine: Harness) -> None:
    """Whatever another program writes to the socket, the client and its streams go on."""
    stream = engine.client.submit(request("a", tokens=ENDLESS))
    await anext(stream)
    context = zmq.asyncio.Context()
    foreign = context.socket(zmq.DEALER)
    foreign.connect(engine.client.address)
    for frames in ([b""], [b"\xc1"], [b"x" * 100_000], [b"a", b"b"], [encode(AskStats(1))]):
        await foreign.send_multipart(frames)
    raw = await asyncio.open_unix_connection(engine.client.address.removeprefix("ipc://"))
    raw[1].write(os.urandom(4096))
    await raw[1].drain()
    assert (await engine.client.stats()).running == 1
    await anext(stream)
    raw[1].close()
    context.destroy(linger=0)
    await stream.aclose()


async def core_settles(engine: Harness, *, cancelled: int) -> None:
    """Asks until nothing runs; each answer comes after all that was sent before."""
    async with asyncio.timeout(30):
        while (stats := await engine.client.stats()).running:
            pass
    assert stats.cancelled == cancelled


async def next_finished(stream: AsyncIterator[TokenEvent]) -> TokenEvent:
    async for event in stream:
        if event.finish_reason is not None:
            return event
    raise AssertionError("the stream ended without a reason")


async def test_quotas_and_pins_cross_the_border(engine: Harness) -> None:
    """Policies, pins and reports arrive as they were sent; refusals keep their type and their numbers."""
    client = engine.client
    assert not (await client.commons()).loaded
    with pytest.raises(QuotaNotCoverable) as refusal:
        await client.set_quotas([QuotaPolicy(namespace="a", gpu=TierQuota(reserved=61))])
    assert (refusal.value.limit, refusal.value.need) == (60, 61)
    policy = QuotaPolicy(namespace="a", gpu=TierQuota(reserved=8, pin_limit=2))
    await client.set_quotas([policy])
    answer = await client.pin(PinOrder(namespace="a", token_ids=tuple(range(48))))
    assert (answer.status, answer.reason, answer.need, answer.have) == ("clipped", "pin_limit", 3, 2)
    assert answer.pin is not None
    renewed = await client.renew_pin("a", answer.pin.pin_id, 60.0)
    assert renewed.ttl_s == 60.0
    assert (await client.commons()).pins == (renewed,)
    for stranger in (client.unpin("b", renewed.pin_id), client.renew_pin("b", renewed.pin_id, 1.0)):
        with pytest.raises(NotFound):
            await stranger
    await client.unpin("a", renewed.pin_id)
    order = PinOrder(namespace="a", token_ids=tuple(range(32)), ttl_s=60.0)
    record = PinRecord(pin_id=renewed.pin_id, order=order, created_at=renewed.created_at, expires_at=renewed.expires_at)
    assert [pin.pin_id for pin in await client.restore_pins([record])] == [renewed.pin_id]
    assert await client.restore_pins([record]) == ()


async def test_the_inspector_is_asked_across_the_border(engine: Harness) -> None:
    """At once or some looks later, also while there is nothing else to do; failures end one call and no more."""
    client = engine.client
    assert (await client.prefixes()).tenants == ()
    order = PrefixOrder(namespace="a", token_ids=tuple(range(40)))
    at_once, later, broken = await asyncio.gather(
        client.explain_prefix(order),
        client.explain_prefix(replace(order, adapter="slow")),
        client.explain_prefix(replace(order, adapter="broken")),
        return_exceptions=True,
    )
    assert at_once == later
    assert isinstance(at_once, PrefixExplanation)
    assert (at_once.blocks, at_once.runs[0].reason) == (2, "never_stored")
    assert isinstance(broken, EngineInternal)
    report = await client.verify(VerifyOrder(tier="gpu"))
    assert (report.checked, report.violations) == (64, ())
    with pytest.raises(InvalidRequest, match="attic"):
        await client.verify(VerifyOrder(tier="attic"))


async def test_a_new_core_has_another_generation_and_no_policy() -> None:
    """Whoever sets quotas notices a restart."""
    async with harness() as engine:
        await asyncio.wait_for(engine.client.wait_ready(), 30)
        before = engine.client.generation
        await engine.client.set_quotas([])
        assert (await engine.client.commons()).loaded
        os.kill(engine.supervisor.pid, signal.SIGKILL)
        await asyncio.wait_for(engine.client.wait_lost(), 30)
        await asyncio.wait_for(engine.client.wait_ready(), 30)
        assert engine.client.generation == before + 1
        assert not (await engine.client.commons()).loaded
