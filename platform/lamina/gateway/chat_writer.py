"""Deltas as OpenAI's chat chunks, or as one chat completion."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Literal

from lamina.engine.choice_text import ChoiceDelta
from lamina.gateway.codec import TextCodec
from lamina.gateway.generation import Generation, Job
from lamina.gateway.logprobs import LogprobBuffer, chat_logprobs
from lamina.gateway.schemas.chat import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    ChatRequest,
)
from lamina.gateway.sse import encode
from lamina.gateway.transcript import FINISH, Transcript, gather

__all__ = ["ChatWriter"]


class ChatWriter:
    """Writes the answer to one chat request. Keeps state per choice: use it once."""

    def __init__(self, body: ChatRequest, codec: TextCodec, job: Job) -> None:
        self._codec = codec
        self._job = job
        self._include_usage = body.stream_options is not None and body.stream_options.include_usage
        self._buffers = [LogprobBuffer(codec) for _ in range(job.num_choices)] if body.logprobs else None

    async def events(self, generation: Generation) -> AsyncGenerator[bytes, None]:
        for index in range(self._job.num_choices):
            yield self._chunk(index, ChatDelta(role="assistant", content=""))
        async with aclosing(generation.deltas()) as deltas:
            async for delta in deltas:
                for chunk in self._chunks(delta):
                    yield chunk
        if self._include_usage:
            last = self._bare_chunk()
            last.usage = generation.usage()
            yield encode(last)

    async def whole(self, generation: Generation) -> ChatCompletion:
        choices = await gather(generation, self._buffers)
        return ChatCompletion(
            id=self._job.id,
            object="chat.completion",
            created=self._job.created,
            model=self._job.target.name,
            system_fingerprint=self._job.fingerprint,
            choices=[self._choice(index, choice) for index, choice in enumerate(choices)],
            usage=generation.usage(),
        )

    def _chunks(self, delta: ChoiceDelta) -> list[bytes]:
        found: list[bytes] = []
        tokens = self._buffers[delta.index].push(delta) if self._buffers else []
        if delta.text or tokens:
            logprobs = chat_logprobs(tokens, self._codec) if self._buffers else None
            found.append(self._chunk(delta.index, ChatDelta(content=delta.text), logprobs=logprobs))
        if delta.finish_reason is not None:
            found.append(self._chunk(delta.index, ChatDelta(), finish=FINISH[delta.finish_reason]))
        return found

    def _chunk(
        self,
        index: int,
        delta: ChatDelta,
        *,
        logprobs: ChatLogprobs | None = None,
        finish: Literal["stop", "length"] | None = None,
    ) -> bytes:
        chunk = self._bare_chunk()
        chunk.choices = [ChatChunkChoice(index=index, delta=delta, logprobs=logprobs, finish_reason=finish)]
        return encode(chunk)

    def _bare_chunk(self) -> ChatChunk:
        chunk = ChatChunk(
            id=self._job.id,
            object="chat.completion.chunk",
            created=self._job.created,
            model=self._job.target.name,
            system_fingerprint=self._job.fingerprint,
            choices=[],
        )
        if self._include_usage:
            chunk.usage = None  # set, so that it is written as null
        return chunk

    def _choice(self, index: int, choice: Transcript) -> ChatChoice:
        return ChatChoice(
            index=index,
            message=ChatMessage(role="assistant", content=choice.text, refusal=None),
            logprobs=chat_logprobs(choice.tokens, self._codec) if self._buffers else None,
            finish_reason=choice.finish,
        )
