"""Deltas as OpenAI's text completion chunks, or as one completion."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
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
from lamina.gateway.sse import encode
from lamina.gateway.transcript import FINISH, Transcript, gather
from lamina.types import TokenLogprob

__all__ = ["CompletionWriter"]


class CompletionWriter:
    """Writes the answer to one completion request. Keeps state per choice: use it once."""

    def __init__(self, body: CompletionRequest, codec: TextCodec, job: Job, prompts: Sequence[Prompt]) -> None:
        self._codec = codec
        self._job = job
        self._include_usage = body.stream_options is not None and body.stream_options.include_usage
        self._wants_logprobs = body.logprobs is not None
        self._buffers = [LogprobBuffer(codec) for _ in range(job.num_choices)]
        self._offsets = [TextOffsets(codec) for _ in range(job.num_choices)]
        self._echo = [prompts[index // job.n].text if body.echo else "" for index in range(job.num_choices)]

    async def events(self, generation: Generation) -> AsyncGenerator[bytes, None]:
        for index, prompt in enumerate(self._echo):
            if prompt:
                yield self._chunk(index, prompt)
        async with aclosing(generation.deltas()) as deltas:
            async for delta in deltas:
                for chunk in self._chunks(delta):
                    yield chunk
        if self._include_usage:
            last = self._bare_chunk()
            last.usage = generation.usage()
            yield encode(last)

    async def whole(self, generation: Generation) -> Completion:
        choices = await gather(generation, self._buffers if self._wants_logprobs else None)
        return Completion(
            id=self._job.id,
            object="text_completion",
            created=self._job.created,
            model=self._job.target.name,
            system_fingerprint=self._job.fingerprint,
            choices=[self._choice(index, choice) for index, choice in enumerate(choices)],
            usage=generation.usage(),
        )

    def _chunks(self, delta: ChoiceDelta) -> list[bytes]:
        found: list[bytes] = []
        tokens = self._buffers[delta.index].push(delta) if self._wants_logprobs else []
        if delta.text or tokens:
            found.append(self._chunk(delta.index, delta.text, logprobs=self._logprobs(delta.index, tokens)))
        if delta.finish_reason is not None:
            found.append(self._chunk(delta.index, "", finish=FINISH[delta.finish_reason]))
        return found

    def _chunk(
        self,
        index: int,
        text: str,
        *,
        logprobs: CompletionLogprobs | None = None,
        finish: Literal["stop", "length"] | None = None,
    ) -> bytes:
        chunk = self._bare_chunk()
        chunk.choices = [CompletionChunkChoice(index=index, text=text, logprobs=logprobs, finish_reason=finish)]
        return encode(chunk)

    def _bare_chunk(self) -> CompletionChunk:
        chunk = CompletionChunk(
            id=self._job.id,
            object="text_completion",
            created=self._job.created,
            model=self._job.target.name,
            system_fingerprint=self._job.fingerprint,
            choices=[],
        )
        if self._include_usage:
            chunk.usage = None  # set, so that it is written as null
        return chunk

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
