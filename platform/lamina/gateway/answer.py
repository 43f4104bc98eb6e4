"""How every generation route answers: decide before the first byte, then stream or collect."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Protocol

from fastapi import Request
from pydantic import BaseModel
from starlette.responses import Response

from lamina.gateway.deps import GatewayDeps
from lamina.gateway.disconnect import unless_disconnected
from lamina.gateway.errors import Problem, describe
from lamina.gateway.generation import Generation, Job
from lamina.gateway.sse import EventStream, ending_well

__all__ = ["Writer", "answer"]

_GRACE_S = 1.0  # for a refusal to get here


class Writer(Protocol):
    """Deltas in the words of one API."""

    def events(self, generation: Generation) -> AsyncGenerator[bytes, None]:
        """As server-sent events, without the closing `[DONE]`."""
        ...

    async def whole(self, generation: Generation) -> BaseModel:
        """As one body."""
        ...


async def answer(request: Request, deps: GatewayDeps, job: Job, writer: Writer, *, stream: bool) -> Response:
    """Raises whatever the engine refuses with, and ClientGone. If the client goes, the engine stops."""
    generation = Generation(deps, job, request.state.arrived)
    if not stream:
        body = await unless_disconnected(request.receive, _whole(generation, writer))
        return Response(body.model_dump_json(), media_type="application/json", headers=job.target.headers)

    def failed(exc: Exception) -> Problem:
        problem = describe(exc, request.state.request_id)
        deps.metrics.stream_errors.labels(problem.error["code"]).inc()
        return problem

    ping_s, queue_s = deps.config.ping_interval_s, deps.config.max_queue_s
    patience_s = max(ping_s, queue_s + _GRACE_S) if queue_s else ping_s
    try:  # a refusal that comes in time gets its status; a later one will be an event
        await unless_disconnected(request.receive, generation.start(patience_s=patience_s))
    except BaseException:
        await generation.aclose()
        raise
    events = ending_well(writer.events(generation), failed)
    return EventStream(events, generation, job.target.headers, ping_s=ping_s)


async def _whole(generation: Generation, writer: Writer) -> BaseModel:
    async with aclosing(generation):
        await generation.start()
        return await writer.whole(generation)
