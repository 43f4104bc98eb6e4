"""The engine as its clients see it: torch-free, implemented by `client.ZmqEngineClient` and by in-memory twins."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from lamina.types import (
    CommonsReport,
    EngineInfo,
    EngineStats,
    GenerationRequest,
    PinAnswer,
    PinOrder,
    PinRecord,
    PinState,
    PrefixExplanation,
    PrefixOrder,
    PrefixReport,
    QuotaPolicy,
    TokenEvent,
    VerifyOrder,
    VerifyReport,
)

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

    @property
    def generation(self) -> int:
        """How many cores have reported ready so far. A new one knows neither quotas nor pins."""
        ...

    def submit(self, request: GenerationRequest) -> AsyncIterator[TokenEvent]: ...

    async def cancel(self, request_id: str, index: int | None = None) -> None:
        """Ends one choice (or all) with CANCELLED; unknown or finished ids are ignored."""
        ...

    async def stats(self) -> EngineStats:
        """Raises EngineUnavailable while there is no core."""
        ...

    async def unload_adapter(self, digest: str) -> None:
        """For a deleted one: drops it once no running request uses it, and the blocks that it computed."""
        ...

    async def erase_namespace(self, namespace: str) -> None:
        """For a deleted tenant: ends its pins and drops its blocks in every tier; what requests of it still hold, when
        they end. Its quota stays until `set_quotas` is called without it. Raises EngineUnavailable."""
        ...

    async def set_quotas(self, policies: Sequence[QuotaPolicy]) -> None:
        """Replaces all quotas, or none. Raises QuotaNotCoverable, InvalidRequest, EngineUnavailable."""
        ...

    async def commons(self) -> CommonsReport:
        """Who has what of the pool. Raises EngineUnavailable."""
        ...

    async def pin(self, order: PinOrder) -> PinAnswer:
        """Keeps a prefix's blocks, those that are computed later too. Raises InvalidRequest, EngineUnavailable."""
        ...

    async def renew_pin(self, namespace: str, pin_id: str, ttl_s: float) -> PinState:
        """Raises NotFound, InvalidRequest, EngineUnavailable."""
        ...

    async def unpin(self, namespace: str, pin_id: str) -> None:
        """Raises NotFound, EngineUnavailable."""
        ...

    async def restore_pins(self, records: Sequence[PinRecord]) -> tuple[PinState, ...]:
        """Brings pins back after a restart; returns those that are alive and were not there. Raises as `pin` does."""
        ...

    async def prefixes(self) -> PrefixReport:
        """How each namespace's prompts fared in the prefix cache. Raises EngineUnavailable."""
        ...

    async def explain_prefix(self, order: PrefixOrder) -> PrefixExplanation:
        """Where a prompt's blocks are, and why the others are nowhere. Raises EngineUnavailable."""
        ...

    async def verify(self, order: VerifyOrder) -> VerifyReport:
        """Checks a batch of what a tier holds, between steps. Raises InvalidRequest, EngineUnavailable."""
        ...

    async def close(self) -> None: ...
