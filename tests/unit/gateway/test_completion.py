"""Token events become text; stop strings end single choices."""

from __future__ import annotations

import pytest

from lamina.engine.choice_text import ChoiceDelta
from lamina.engine.testing import InMemoryEngine, saying
from lamina.errors import EngineInternal, EngineOverloaded, EngineUnavailable
from lamina.gateway.completion import stream_choices
from lamina.gateway.testing import ByteCodec
from lamina.types import EngineFailure, FinishReason, GenerationRequest, SamplingParams

CODEC = ByteCodec()
EOS = CODEC.eos_id


def request(prompt: str = "p", **sampling: object) -> GenerationRequest:
    params = SamplingParams(**{"max_tokens": 100, **sampling})  # type: ignore[arg-type]
    return GenerationRequest(request_id="r", prompt_token_ids=tuple(prompt.encode()), sampling=params)


async def run(engine: InMemoryEngine, wanted: GenerationRequest) -> list[ChoiceDelta]:
    return [delta async for delta in stream_choices(engine, CODEC, wanted)]


def text(deltas: list[ChoiceDelta], index: int = 0) -> str:
    return "".join(delta.text for delta in deltas if delta.index == index)


def engine_saying(said: str, **options: object) -> InMemoryEngine:
    return InMemoryEngine(script=saying(*said.encode()), eos_ids=[EOS], **options)  # type: ignore[arg-type]


async def test_a_stop_string_across_tokens_ends_the_choice() -> None:
    """The stop string is not in the text, and the engine is told to stop."""
    engine = engine_saying("one END two")
    deltas = await run(engine, request(stop=("END",)))
    assert text(deltas) == "one "
    assert deltas[-1].finish_reason is FinishReason.STOP
    assert deltas[-1].stop_string == "END"
    assert sum(len(delta.token_ids) for delta in deltas) == len("one END")
    assert engine.cancelled == [("r", None)]
    assert engine.running == ()


async def test_one_choice_stops_while_the_others_go_on() -> None:
    """The stopped choice is cancelled by its index."""
    scripts = ["a.b", "cdefgh"]
    engine = InMemoryEngine(script=lambda _, index: list(scripts[index].encode()))
    deltas = await run(engine, request(n=2, stop=(".",)))
    assert (text(deltas, 0), text(deltas, 1)) == ("a", "cdefgh")
    assert engine.cancelled == [("r", 0)]
    finishes = {delta.index: delta.finish_reason for delta in deltas if delta.finish_reason}
    assert finishes == {0: FinishReason.STOP, 1: FinishReason.STOP}


async def test_text_that_might_be_a_stop_string_is_released_at_the_end() -> None:
    deltas = await run(engine_saying("one EN"), request(stop=("END",)))
    assert text(deltas) == "one EN"


async def test_a_stop_token_is_counted_but_not_spelled() -> None:
    engine = InMemoryEngine(script=saying(104, 105, EOS), eos_ids=[EOS])
    deltas = await run(engine, request(logprobs=0))
    assert text(deltas) == "hi"
    assert [len(delta.token_ids) for delta in deltas] == [1, 1, 1]
    assert [len(delta.logprobs) for delta in deltas] == [1, 1, 0]


async def test_characters_are_never_torn() -> None:
    deltas = await run(engine_saying("é€🙂"), request())
    assert [delta.text for delta in deltas if delta.text] == ["é", "€", "🙂"]


async def test_a_refusal_is_raised_at_the_first_iteration() -> None:
    engine = engine_saying("x")
    engine.refusal = EngineOverloaded(retry_after_s=3)
    with pytest.raises(EngineOverloaded):
        await run(engine, request())


@pytest.mark.parametrize("after", [0, 3])
async def test_a_failure_is_raised_as_what_it_was(after: int) -> None:
    engine = engine_saying("abcdef")
    engine.failure, engine.fail_after = EngineFailure("engine_unavailable", "lost", None, 2.0), after
    with pytest.raises(EngineUnavailable) as info:
        await run(engine, request())
    assert info.value.retry_after_s == 2.0


async def test_a_cancellation_by_the_server_is_an_error() -> None:
    """Nobody here asked for it, so it must not look like a complete answer."""
    engine = engine_saying("abcdef")
    stream = stream_choices(engine, CODEC, request())
    await anext(stream)
    await engine.cancel("r")
    with pytest.raises(EngineUnavailable, match="shutting down"):
        await anext(stream)


async def test_closing_cancels_in_the_engine() -> None:
    engine = engine_saying("abcdef")
    stream = stream_choices(engine, CODEC, request())
    await anext(stream)
    await stream.aclose()
    assert engine.cancelled == [("r", None)]
    assert engine.running == ()


async def test_an_engine_that_ends_too_early_is_an_error() -> None:
    class Broken(InMemoryEngine):
        async def submit(self, request):  # type: ignore[no-untyped-def,override]
            return
            yield

    with pytest.raises(EngineInternal, match="before all"):
        await run(Broken(), request())


async def test_cached_tokens_are_reported_per_namespace() -> None:
    """The twin shares prefixes as the engine does: whole blocks, within a namespace and adapter."""
    engine = engine_saying("x")
    wanted = request("p" * 40)
    await run(engine, wanted)
    again = await run(engine, wanted)
    assert max(delta.cached_tokens for delta in again) == 32
