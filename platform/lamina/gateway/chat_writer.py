"""Deltas as OpenAI's chat chunks, or as one chat completion."""

from __future__ import annotations

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
from lamina.gateway.stream_writer import StreamWriter
from lamina.gateway.transcript import FINISH, Transcript, gather

__all__ = ["ChatWriter"]


class ChatWriter(StreamWriter):
    """Writes the answer to one chat request. Keeps state per choice: use it once."""

    def __init__(self, body: ChatRequest, codec: TextCodec, job: Job) -> None:
        super().__init__(body, job, ChatChunk, "chat.completion.chunk")
        self._codec = codec
        self._buffers = [LogprobBuffer(codec) for _ in range(job.num_choices)] if body.logprobs else None

    async def whole(self, generation: Generation) -> ChatCompletion:
        choices = await gather(generation, self._buffers)
        return ChatCompletion(
            **self._head("chat.completion"),
            choices=[self._choice(index, choice) for index, choice in enumerate(choices)],
            usage=generation.usage(),
        )

    def _opening(self) -> list[ChatChunkChoice]:
        role = ChatDelta(role="assistant", content="")
        return [_chunk_choice(index, role) for index in range(self._job.num_choices)]

    def _choices(self, delta: ChoiceDelta) -> list[ChatChunkChoice]:
        found: list[ChatChunkChoice] = []
        tokens = self._buffers[delta.index].push(delta) if self._buffers else []
        if delta.text or tokens:
            logprobs = chat_logprobs(tokens, self._codec) if self._buffers else None
            found.append(_chunk_choice(delta.index, ChatDelta(content=delta.text), logprobs=logprobs))
        if delta.finish_reason is not None:
            found.append(_chunk_choice(delta.index, ChatDelta(), finish=FINISH[delta.finish_reason]))
        return found

    def _choice(self, index: int, choice: Transcript) -> ChatChoice:
        return ChatChoice(
            index=index,
            message=ChatMessage(role="assistant", content=choice.text, refusal=None),
            logprobs=chat_logprobs(choice.tokens, self._codec) if self._buffers else None,
            finish_reason=choice.finish,
        )


def _chunk_choice(
    index: int,
    delta: ChatDelta,
    *,
    logprobs: ChatLogprobs | None = None,
    finish: Literal["stop", "length"] | None = None,
) -> ChatChunkChoice:
    return ChatChunkChoice(index=index, delta=delta, logprobs=logprobs, finish_reason=finish)
