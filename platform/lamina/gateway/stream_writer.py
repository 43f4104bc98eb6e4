"""The frame that all streamed answers share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from pydantic import BaseModel

from lamina.engine.choice_text import ChoiceDelta
from lamina.gateway.generation import Generation, Job
from lamina.gateway.schemas.common import GenerationBody, Usage
from lamina.gateway.sse import encode

__all__ = ["StreamWriter"]


class StreamWriter(ABC):
    """An opening, the deltas, and the usage if it was asked for. One request's: use it once.

    `chunk` is the schema of one event, `kind` what it says in `object`.
    """

    def __init__(self, body: GenerationBody, job: Job, chunk: type[BaseModel], kind: str) -> None:
        self._job = job
        self._chunk = chunk
        self._kind = kind
        self._include_usage = body.stream_options is not None and body.stream_options.include_usage

    async def events(self, generation: Generation) -> AsyncGenerator[bytes, None]:
        for choice in self._opening():
            yield self._event([choice])
        async with aclosing(generation.deltas()) as deltas:
            async for delta in deltas:
                for choice in self._choices(delta):
                    yield self._event([choice])
        if self._include_usage:
            yield self._event([], generation.usage())

    @abstractmethod
    def _opening(self) -> Sequence[BaseModel]:
        """What is said of choices before their first delta, an event each."""

    @abstractmethod
    def _choices(self, delta: ChoiceDelta) -> Sequence[BaseModel]:
        """A delta as chunk choices, an event each."""

    def _head(self, kind: str) -> dict[str, Any]:
        """The fields that chunks and whole answers begin with."""
        return {
            "id": self._job.id,
            "object": kind,
            "created": self._job.created,
            "model": self._job.target.name,
            "system_fingerprint": self._job.fingerprint,
        }

    def _event(self, choices: Sequence[BaseModel], usage: Usage | None = None) -> bytes:
        fields = self._head(self._kind) | {"choices": choices}
        if self._include_usage:
            fields["usage"] = usage  # set, so that it is written as null before the end
        return encode(self._chunk(**fields))
