"""What a client hears of a choice after a step."""

from __future__ import annotations

from collections.abc import Iterator

from lamina.engine.request import Choice
from lamina.engine.sampler import Sampled
from lamina.types import EngineFailure, FinishReason, TokenEvent

__all__ = ["endings_of_unborn", "token_event"]


def token_event(
    choice: Choice,
    sampled: Sampled | None,
    reason: FinishReason | None = None,
    failure: EngineFailure | None = None,
) -> TokenEvent:
    """A drawn token, an ending, or both. How long the request waited is told once, in its first event after that."""
    stopped = reason is FinishReason.STOP and sampled is not None
    queued_s = None if choice.request.is_wait_told else choice.request.queued_s
    choice.request.is_wait_told = queued_s is not None or choice.request.is_wait_told
    return TokenEvent(
        request_id=choice.request.request.request_id,
        index=choice.index,
        token_ids=(sampled.token_id,) if sampled is not None else (),
        logprobs=(sampled.logprob,) if sampled is not None and sampled.logprob is not None else (),
        finish_reason=reason,
        stop_token_id=sampled.token_id if stopped and sampled is not None else None,
        cached_by_tier=choice.request.cached_by_tier,
        queued_s=queued_s,
        error=failure,
    )


def endings_of_unborn(choice: Choice, reason: FinishReason, failure: EngineFailure | None) -> Iterator[TokenEvent]:
    """The client waits for n endings: those of siblings that will never exist."""
    request = choice.request
    for index in range(1, request.params.n):
        if index not in request.choices:
            yield TokenEvent(request_id=request.request.request_id, index=index, finish_reason=reason, error=failure)
