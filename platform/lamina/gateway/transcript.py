"""All deltas of a call gathered by choice."""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Literal

from lamina.gateway.generation import Generation
from lamina.gateway.logprobs import LogprobBuffer
from lamina.types import FinishReason, TokenLogprob

__all__ = ["FINISH", "Transcript", "gather"]

FINISH: dict[FinishReason, Literal["stop", "length"]] = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
}


@dataclass(slots=True)
class Transcript:
    """One choice, complete."""

    pieces: list[str] = field(default_factory=list)
    tokens: list[TokenLogprob] = field(default_factory=list)
    finish: Literal["stop", "length"] = "stop"

    @property
    def text(self) -> str:
        return "".join(self.pieces)


async def gather(generation: Generation, buffers: list[LogprobBuffer] | None) -> list[Transcript]:
    """Reads `generation` to its end. `buffers`: one per choice, if log-probabilities were asked for."""
    choices = [Transcript() for _ in range(generation.job.num_choices)]
    async with aclosing(generation.deltas()) as deltas:
        async for delta in deltas:
            choice = choices[delta.index]
            choice.pieces.append(delta.text)
            if buffers is not None:
                choice.tokens += buffers[delta.index].push(delta)
            if delta.finish_reason is not None:
                choice.finish = FINISH[delta.finish_reason]
    return choices
