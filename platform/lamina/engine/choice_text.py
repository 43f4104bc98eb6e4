"""One choice's token events as text: what clients of the engine see, stop strings applied. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field

from lamina.engine.detokenize import Speller, TextStream
from lamina.engine.failures import error_of
from lamina.errors import EngineInternal, EngineUnavailable
from lamina.types import CachedTokens, EngineFailure, FinishReason, SamplingParams, TokenEvent, TokenLogprob

__all__ = ["ChoiceDelta", "ChoiceText"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceDelta:
    """Progress of one choice, as the client may see it.

    `token_ids` are the tokens to count as usage: up to the one that completed a stop string. `logprobs` has
    no entry for a stop token. `finish_reason` is STOP or LENGTH, in the last delta of the choice.
    """

    index: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    stop_string: str | None = None
    queued_s: float | None = None  # seconds that the request waited for its start; once per request
    cached_by_tier: CachedTokens = field(default_factory=CachedTokens)

    @property
    def cached_tokens(self) -> int:
        return self.cached_by_tier.total


class ChoiceText:
    """Turns the events of choice `index` into deltas, in order, until `done`. Later events must be left out."""

    def __init__(self, index: int, tokenizer: Speller, sampling: SamplingParams) -> None:
        self.index = index
        self.done = False
        self._text = TextStream(tokenizer, stop=sampling.stop, include_stop_str=sampling.include_stop_str)

    def advance(self, event: TokenEvent) -> ChoiceDelta:
        """Raises what the event's error or cancellation means."""
        _raise_failure(event)
        visible = event.token_ids if event.stop_token_id is None else event.token_ids[:-1]
        pushed = self._text.push(visible)
        if pushed.stopped:
            self.done = True
            return ChoiceDelta(
                index=self.index,
                text=pushed.text,
                token_ids=event.token_ids[: pushed.tokens_used],
                logprobs=event.logprobs[: pushed.tokens_used],
                finish_reason=FinishReason.STOP,
                stop_string=pushed.stop_string,
                queued_s=event.queued_s,
                cached_by_tier=event.cached_by_tier,
            )
        self.done = event.finish_reason is not None
        return ChoiceDelta(
            index=self.index,
            text=pushed.text + (self._text.finish() if self.done else ""),
            token_ids=event.token_ids,
            logprobs=event.logprobs[: len(visible)],
            finish_reason=event.finish_reason,
            queued_s=event.queued_s,
            cached_by_tier=event.cached_by_tier,
        )


def _raise_failure(event: TokenEvent) -> None:
    if event.finish_reason is FinishReason.ERROR or event.error is not None:
        raise error_of(event.error or EngineFailure(EngineInternal.code, "The engine failed on this request."))
    if event.finish_reason is FinishReason.CANCELLED:
        raise EngineUnavailable("The server cancelled this request, because it is shutting down or restarting.")
