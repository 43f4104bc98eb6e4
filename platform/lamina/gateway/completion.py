"""From the engine's token events to text: one `ChoiceDelta` per event, stop strings applied."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import cast

from lamina.engine.detokenize import TextStream
from lamina.engine.failures import error_of
from lamina.engine.protocol import EngineClient
from lamina.errors import EngineInternal, EngineUnavailable
from lamina.gateway.codec import TextCodec
from lamina.types import EngineFailure, FinishReason, GenerationRequest, TokenEvent, TokenLogprob

__all__ = ["ChoiceDelta", "stream_choices"]


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
    cached_tokens: int = 0


async def stream_choices(
    engine: EngineClient, tokenizer: TextCodec, request: GenerationRequest
) -> AsyncGenerator[ChoiceDelta, None]:
    """Runs `request` and yields its deltas until every choice has finished.

    Raises the LaminaError of a refusal at the first iteration, and that of a failure later on; either ends
    all choices. Closing the generator cancels the request in the engine. A choice that meets a stop string
    is cancelled there while the others go on.
    """
    sampling = request.sampling
    choices = [
        _Choice(index, TextStream(tokenizer, stop=sampling.stop, include_stop_str=sampling.include_stop_str))
        for index in range(sampling.n)
    ]
    # The protocol promises aclose(); AsyncIterator can't say so.
    events = cast(AsyncGenerator[TokenEvent, None], engine.submit(request))
    async with aclosing(events):
        async for event in events:
            choice = choices[event.index]
            if choice.done:
                continue  # what the core did before it saw our cancel
            delta = choice.advance(event)
            finished = all(each.done for each in choices)
            if delta.stop_string is not None and event.finish_reason is None and not finished:
                await engine.cancel(request.request_id, event.index)
            yield delta
            if finished:
                return
    raise EngineInternal("The engine ended the request before all of its choices had finished.")


class _Choice:
    def __init__(self, index: int, text: TextStream) -> None:
        self.index = index
        self.done = False
        self._text = text

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
                cached_tokens=event.cached_tokens,
            )
        self.done = event.finish_reason is not None
        return ChoiceDelta(
            index=self.index,
            text=pushed.text + (self._text.finish() if self.done else ""),
            token_ids=event.token_ids,
            logprobs=event.logprobs[: len(visible)],
            finish_reason=event.finish_reason,
            cached_tokens=event.cached_tokens,
        )


def _raise_failure(event: TokenEvent) -> None:
    if event.finish_reason is FinishReason.ERROR or event.error is not None:
        raise error_of(event.error or EngineFailure(EngineInternal.code, "The engine failed on this request."))
    if event.finish_reason is FinishReason.CANCELLED:
        raise EngineUnavailable("The server cancelled this request, because it is shutting down or restarting.")
