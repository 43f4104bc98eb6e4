"""The engine as its clients see it: torch-free, implemented by `client.ZmqEngineClient` and by in-memory twins."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from lamina.types import EngineInfo, EngineStats, GenerationRequest, TokenEvent

__all__ = ["EngineClient"]


class EngineClient(Protocol):
    """A running engine core, local or remote.

    `submit` yields the events of all choices of one request, in order per choice, and ends after the last
    choice's `finish_reason`. A refusal by the core (context, overload, unknown adapter) raises the matching
    `LaminaError` at the first iteration; a failure later arrives as an event with `finish_reason=ERROR`.
    Closing the iterator early (`aclose`, cancellation) cancels the request and frees its blocks.
    """

    @property
    def info(self) -> EngineInfo:
        """Raises EngineUnavailable before the core has reported ready."""
        ...

    @property
    def ready(self) -> bool: ...

    def submit(self, request: GenerationRequest) -> AsyncIterator[TokenEvent]: ...

    async def cancel(self, request_id: str, index: int | None = None) -> None:
        """Ends one choice (or all) with CANCELLED; unknown or finished ids are ignored."""
        ...

    async def stats(self) -> EngineStats:
        """Raises EngineUnavailable while there is no core."""
        ...

    async def unload_adapter(self, digest: str) -> None:
        """Drops the adapter once no running request uses it (drain, then free)."""
        ...

    async def close(self) -> None: ...
