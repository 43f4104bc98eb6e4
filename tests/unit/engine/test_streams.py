"""How one request's events reach its consumer."""

from __future__ import annotations

import pytest

from lamina.engine.streams import RequestStream
from lamina.errors import EngineUnavailable, ModelNotFound
from lamina.types import EngineFailure, FinishReason, TokenEvent

FAILURE = EngineFailure("engine_unavailable", "gone", retry_after_s=2)


def event(index: int = 0, reason: FinishReason | None = None) -> TokenEvent:
    return TokenEvent(request_id="a", index=index, token_ids=(1,), finish_reason=reason)


async def drain(stream: RequestStream) -> list[TokenEvent]:
    events = []
    while (item := await stream.next()) is not None:
        events.append(item)
    return events


async def test_it_ends_after_the_last_choice() -> None:
    """`open` follows the core; the consumer still gets what is queued, then None."""
    stream = RequestStream("a", 2)
    sent = [event(0), event(1, FinishReason.STOP), event(0, FinishReason.LENGTH)]
    for item in sent:
        assert stream.open
        stream.put(item)
    assert not stream.open
    assert await drain(stream) == sent
    assert await stream.next() is None


async def test_events_of_finished_or_unknown_choices_are_dropped() -> None:
    """Nothing follows a choice's last event."""
    stream = RequestStream("a", 1)
    for item in (event(5), event(0, FinishReason.STOP), event(0), event(0, FinishReason.STOP)):
        stream.put(item)
    assert await drain(stream) == [event(0, FinishReason.STOP)]


async def test_a_failure_ends_only_open_choices() -> None:
    """What was produced is delivered first; a finished choice keeps its reason."""
    stream = RequestStream("a", 3)
    stream.put(event(1, FinishReason.STOP))
    stream.fail(FAILURE)
    stream.fail(FAILURE)
    first, *failed = await drain(stream)
    assert first.finish_reason is FinishReason.STOP
    assert [(item.index, item.finish_reason, item.error) for item in failed] == [
        (0, FinishReason.ERROR, FAILURE),
        (2, FinishReason.ERROR, FAILURE),
    ]


async def test_a_failure_before_the_first_event_is_raised() -> None:
    """So that it can be answered by a status instead of a broken stream."""
    stream = RequestStream("a", 2)
    stream.fail(FAILURE)
    with pytest.raises(EngineUnavailable) as caught:
        await stream.next()
    assert caught.value.retry_after_s == 2
    assert await stream.next() is None


async def test_a_refusal_is_raised_once() -> None:
    """After it the stream is over, and a failure of the core adds nothing."""
    stream = RequestStream("a", 1)
    stream.refuse(ModelNotFound("x"))
    stream.fail(FAILURE)
    with pytest.raises(ModelNotFound):
        await stream.next()
    assert await stream.next() is None
