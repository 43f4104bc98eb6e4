"""Deltas as OpenAI's text completion chunks, or as one completion."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from lamina.engine.choice_text import ChoiceDelta
from lamina.gateway.codec import TextCodec
from lamina.gateway.generation import Generation, Job
from lamina.gateway.logprobs import LogprobBuffer, TextOffsets, completion_logprobs
from lamina.gateway.prompts import Prompt
from lamina.gateway.schemas.completions import (
    Completion,
    CompletionChoice,
    CompletionChunk,
    CompletionChunkChoice,
    CompletionLogprobs,
    CompletionRequest,
)
from lamina.gateway.stream_writer import StreamWriter
from lamina.gateway.transcript import FINISH, Transcript, gather
from lamina.types import TokenLogprob

__all__ = ["CompletionWriter"]


class CompletionWriter(StreamWriter):
    """Writes the answer to one completion request. Keeps state per choice: use it once."""

    def __init__(self, body: CompletionRequest, codec: TextCodec, job: Job, prompts: Sequence[Prompt]) -> None:
        super().__init__(body, job, CompletionChunk, "text_completion")
        self._codec = codec
        self._wants_logprobs = body.logprobs is not None
        self._buffers = [LogprobBuffer(codec) for _ in range(job.num_choices)]
        self._offsets = [TextOffsets(codec) for _ in range(job.num_choices)]
        self._echo = [prompts[index // job.n].text if body.echo else "" for index in range(job.num_choices)]

    async def whole(self, generation: Generation) -> Completion:
        choices = await gather(generation, self._buffers if self._wants_logprobs else None)
        return Completion(
            **self._head("text_completion"),
            choices=[self._choice(index, choice) for index, choice in enumerate(choices)],
            usage=generation.usage(),
        )

    def _opening(self) -> list[CompletionChunkChoice]:
        return [_chunk_choice(index, prompt) for index, prompt in enumerate(self._echo) if prompt]

    def _choices(self, delta: ChoiceDelta) -> list[CompletionChunkChoice]:
        found: list[CompletionChunkChoice] = []
        tokens = self._buffers[delta.index].push(delta) if self._wants_logprobs else []
        if delta.text or tokens:
            found.append(_chunk_choice(delta.index, delta.text, logprobs=self._logprobs(delta.index, tokens)))
        if delta.finish_reason is not None:
            found.append(_chunk_choice(delta.index, "", finish=FINISH[delta.finish_reason]))
        return found

    def _choice(self, index: int, choice: Transcript) -> CompletionChoice:
        return CompletionChoice(
            index=index,
            text=self._echo[index] + choice.text,
            logprobs=self._logprobs(index, choice.tokens),
            finish_reason=choice.finish,
        )

    def _logprobs(self, index: int, tokens: list[TokenLogprob]) -> CompletionLogprobs | None:
        if not self._wants_logprobs:
            return None
        return completion_logprobs(tokens, self._codec, self._offsets[index])


def _chunk_choice(
    index: int,
    text: str,
    *,
    logprobs: CompletionLogprobs | None = None,
    finish: Literal["stop", "length"] | None = None,
) -> CompletionChunkChoice:
    return CompletionChunkChoice(index=index, text=text, logprobs=logprobs, finish_reason=finish)
