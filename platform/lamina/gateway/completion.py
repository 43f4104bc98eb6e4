"""From the engine's token events to text: one `ChoiceDelta` per event, stop strings applied."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import cast

from lamina.engine.choice_text import ChoiceDelta, ChoiceText
from lamina.engine.protocol import EngineClient
from lamina.errors import EngineInternal
from lamina.gateway.codec import TextCodec
from lamina.types import GenerationRequest, TokenEvent

__all__ = ["stream_choices"]


async def stream_choices(
    engine: EngineClient, tokenizer: TextCodec, request: GenerationRequest
) -> AsyncGenerator[ChoiceDelta, None]:
    """Runs `request` and yields its deltas until every choice has finished.

    Raises the LaminaError of a refusal at the first iteration, and that of a failure later on; either ends
    all choices. Closing the generator cancels the request in the engine. A choice that meets a stop string
    is cancelled there while the others go on.
    """
    sampling = request.sampling
    choices = [ChoiceText(index, tokenizer, sampling) for index in range(sampling.n)]
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
