"""Merging, disconnects and the ends of streams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from fixtures.gateway import until
from lamina.gateway.disconnect import ClientGone, unless_disconnected
from lamina.gateway.errors import Problem
from lamina.gateway.merge import merge
from lamina.gateway.sse import DONE, PING, EventStream, ending_well


class Source:
    def __init__(self, *items: str, delay_s: float = 0.0, failure: Exception | None = None) -> None:
        self.items, self.delay_s, self.failure = items, delay_s, failure
        self.closed = False

    async def run(self) -> AsyncGenerator[str, None]:
        try:
            for item in self.items:
                await asyncio.sleep(self.delay_s)
                yield item
            if self.failure:
                raise self.failure
        finally:
            self.closed = True


async def test_merge_keeps_each_order_and_waits_for_none() -> None:
    slow, fast = Source("s1", "s2", delay_s=0.05), Source("f1", "f2", "f3")
    got = [item async for item in merge([slow.run(), fast.run()])]
    assert got == ["f1", "f2", "f3", "s1", "s2"]


@pytest.mark.parametrize("count", [1, 3])
async def test_merge_closes_everything_when_closed(count: int) -> None:
    sources = [Source("a", "b", "c") for _ in range(count)]
    merged = merge([source.run() for source in sources])
    await anext(merged)
    await merged.aclose()
    assert all(source.closed for source in sources)


async def test_merge_raises_the_first_failure_and_closes_the_others() -> None:
    forever, broken = Source("x", "y", delay_s=60), Source("a", failure=ValueError("broken"))
    started = forever.run()
    with pytest.raises(ValueError, match="broken"):
        async for _ in merge([started, broken.run()]):
            pass
    assert forever.closed


async def test_merge_survives_cancellation_while_waiting() -> None:
    sources = [Source("x", delay_s=60), Source("y", delay_s=60)]
    merged = merge([source.run() for source in sources])
    task = asyncio.ensure_future(anext(merged))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert all(source.closed for source in sources)


class Wire:
    """An ASGI connection: what was sent, and a client that can leave."""

    def __init__(self, leave_after: int | None = None) -> None:
        self.sent: list[bytes] = []
        self.gone = asyncio.Event()
        self._leave_after = leave_after

    async def receive(self) -> dict[str, object]:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: dict[str, object]) -> None:
        if message["type"] == "http.response.body":
            self.sent.append(bytes(message["body"]))  # type: ignore[call-overload]
            if len(self.sent) == self._leave_after:
                self.gone.set()


async def test_work_is_cancelled_when_the_client_goes() -> None:
    wire, cancelled = Wire(), asyncio.Event()

    async def work() -> None:
        try:
            wire.gone.set()
            await asyncio.sleep(60)
        finally:
            cancelled.set()

    with pytest.raises(ClientGone):
        await unless_disconnected(wire.receive, work())
    assert cancelled.is_set()


async def test_work_that_fails_fails_here() -> None:
    async def work() -> None:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        await unless_disconnected(Wire().receive, work())


async def test_cancelling_the_caller_cancels_the_work() -> None:
    """As when the server shuts down."""
    cancelled = asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            cancelled.set()

    task = asyncio.ensure_future(unless_disconnected(Wire().receive, work()))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert cancelled.is_set()


class Events:
    def __init__(self, failure: Exception | None = None, forever: bool = False) -> None:
        self.failure, self.forever = failure, forever
        self.closed = False

    async def run(self) -> AsyncGenerator[bytes, None]:
        try:
            yield b"one"
            if self.failure:
                raise self.failure
            if self.forever:
                await asyncio.sleep(60)
        finally:
            self.closed = True

    async def aclose(self) -> None:
        self.closed = True


def describe(exc: Exception) -> Problem:
    return Problem(500, {"message": str(exc), "code": "x"}, {})


async def test_a_stream_ends_with_done() -> None:
    assert [event async for event in ending_well(Events().run(), describe)] == [b"one", DONE]


async def test_a_failing_stream_ends_with_an_error_and_no_done() -> None:
    events = [event async for event in ending_well(Events(RuntimeError("broken")).run(), describe)]
    assert events == [b"one", b'data: {"error": {"message": "broken", "code": "x"}}\n\n']


async def test_leaving_mid_stream_closes_the_events_and_their_source() -> None:
    """Between two events, not only at the next write."""
    wire, events, source = Wire(leave_after=1), Events(forever=True), Events()
    response = EventStream(events.run(), source, {}, ping_s=60)
    with pytest.raises(ClientGone):
        await response({"type": "http"}, wire.receive, wire.send)  # type: ignore[arg-type]
    assert events.closed
    assert source.closed


async def test_a_write_that_fails_means_the_client_has_gone() -> None:
    async def broken(message: object) -> None:
        raise OSError("broken pipe")

    events, source = Events(), Events()
    with pytest.raises(ClientGone):
        await EventStream(events.run(), source, {}, ping_s=60)({"type": "http"}, Wire().receive, broken)
    assert source.closed


async def test_silence_is_filled_with_comments() -> None:
    """As long as no event comes; none after the end."""
    wire, speak = Wire(), asyncio.Event()

    async def slow() -> AsyncGenerator[bytes, None]:
        yield b"one"
        await speak.wait()
        yield b"two"

    answering = asyncio.create_task(
        EventStream(slow(), Events(), {}, ping_s=0.01)({"type": "http"}, wire.receive, wire.send)  # type: ignore[arg-type]
    )
    await until(lambda: wire.sent.count(PING) >= 3)
    speak.set()
    await answering
    assert wire.sent[0] == b"one"
    assert set(wire.sent[1:-2]) == {PING}
    assert wire.sent[-2:] == [b"two", b""]


async def test_comments_stop_when_the_client_has_gone() -> None:
    wire, events = Wire(leave_after=3), Events(forever=True)
    with pytest.raises(ClientGone):
        await EventStream(events.run(), Events(), {}, ping_s=0.01)(
            {"type": "http"},
            wire.receive,  # type: ignore[arg-type]
            wire.send,  # type: ignore[arg-type]
        )
    assert wire.sent == [b"one", PING, PING]
    assert len(asyncio.all_tasks()) == 1
