"""What one step will do: decisions only, no tensors."""

from __future__ import annotations

from dataclasses import dataclass, field

from lamina.engine.request import Choice
from lamina.types import EngineFailure
from lamina_kvtier.blocks import CopyOnWrite

__all__ = ["Chunk", "StepPlan"]


@dataclass(slots=True)
class Chunk:
    """`count` tokens of a choice from position `start`; one token while decoding."""

    choice: Choice
    start: int
    count: int
    slot: int | None  # adapter slot; None: the base model
    copy: CopyOnWrite | None = None  # to be made before the step writes
    fresh: list[int] = field(default_factory=list)  # blocks that still hold somebody else's past

    @property
    def stop(self) -> int:
        return self.start + self.count

    @property
    def decodes(self) -> bool:
        """One token behind the prompt. A prompt's last piece of one token is prefill, however it was cut."""
        return self.count == 1 and self.start >= self.choice.prompt_len

    @property
    def samples(self) -> bool:
        """Whether the step reaches the choice's last known token, so that the next one can be drawn."""
        return self.stop == len(self.choice.tokens)


@dataclass(slots=True)
class StepPlan:
    chunks: list[Chunk] = field(default_factory=list)
    failures: list[tuple[Choice, EngineFailure]] = field(default_factory=list)  # could not be admitted
    preempted: list[Choice] = field(default_factory=list)  # back in the queue, without blocks

    @property
    def tokens(self) -> int:
        return sum(chunk.count for chunk in self.chunks)

    def drop(self, choice: Choice) -> int:
        """Takes a preempted choice out again; returns the tokens given back to the budget."""
        kept = [chunk for chunk in self.chunks if chunk.choice is not choice]
        freed = sum(chunk.count for chunk in self.chunks) - sum(chunk.count for chunk in kept)
        self.chunks = kept
        return freed
