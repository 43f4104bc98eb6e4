"""Server-sent events: the wire format, the response that carries them, and how a stream ends.

The order a client relies on: for chat a chunk with the role, then deltas, an empty delta with `finish_reason`
per choice, with `include_usage` a chunk without choices, then `[DONE]`. After a failure: an event with
`error`, then the end, without `[DONE]`. In between, where there is silence, comments.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Protocol

from pydantic import BaseModel
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from lamina.gateway.disconnect import ClientGone, unless_disconnected
from lamina.gateway.errors import Problem

__all__ = ["DONE", "PING", "EventStream", "encode", "ending_well"]

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"  # a comment: clients skip it, proxies see that the connection lives


def encode(chunk: BaseModel) -> bytes:
    """One event. ASCII only: some clients split lines at Unicode's line separators too."""
    return b"data: " + chunk.model_dump_json(exclude_unset=True, ensure_ascii=True).encode() + b"\n\n"


async def ending_well(
    events: AsyncGenerator[bytes, None], describe: Callable[[Exception], Problem]
) -> AsyncGenerator[bytes, None]:
    """`events`, then `[DONE]`; if they fail, an error event instead. Never just stops."""
    try:
        async with aclosing(events):
            async for event in events:
                yield event
        yield DONE
    except Exception as exc:  # noqa: BLE001 - whatever it was, the client must hear of it; `describe` logs it
        yield b"data: " + json.dumps(describe(exc).body).encode() + b"\n\n"


class Closable(Protocol):
    async def aclose(self) -> None: ...


class EventStream(Response):
    """Sends events until they end or the client goes; then closes them and `source`, which cancels the work.

    After `ping_s` seconds without an event it sends a comment.

    Starlette's StreamingResponse, in some ASGI versions, notices a vanished client only at the next write.
    """

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncGenerator[bytes, None], source: Closable, headers: Mapping[str, str], *, ping_s: float
    ) -> None:
        self._events = events
        self._ping_s = ping_s
        self._source = source  # closing events that were never started would not reach it
        self.status_code = 200
        self.background = None
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no", **headers})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._source), aclosing(self._events):
            await unless_disconnected(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async with _pinging(send, self._ping_s) as say:
                async for event in self._events:
                    await say(event)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except OSError as exc:
            raise ClientGone from exc


@asynccontextmanager
async def _pinging(send: Send, interval_s: float) -> AsyncIterator[Callable[[bytes], Awaitable[None]]]:
    """A function that sends an event. While it isn't called for `interval_s` seconds, comments are sent."""
    now = asyncio.get_running_loop().time
    last = now()

    async def say(event: bytes) -> None:
        nonlocal last
        last = now()
        await send({"type": "http.response.body", "body": event, "more_body": True})

    async def ping() -> None:
        with suppress(OSError):  # the client has gone; whoever waits for it notices
            while True:
                await asyncio.sleep(last + interval_s - now())
                if now() >= last + interval_s:
                    await say(PING)

    pinging = asyncio.create_task(ping())
    try:
        yield say
    finally:
        pinging.cancel()
        await asyncio.gather(pinging, return_exceptions=True)
