"""/v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, model_validator

from lamina.errors import UnsupportedParameter
from lamina.gateway.schemas.common import MAX_LOGPROBS, Body, GenerationBody, Text, Usage

__all__ = [
    "ChatChoice",
    "ChatChunk",
    "ChatChunkChoice",
    "ChatCompletion",
    "ChatDelta",
    "ChatLogprobs",
    "ChatMessage",
    "ChatRequest",
    "Message",
    "TextPart",
    "TokenLogprobBody",
    "TopLogprobBody",
]


class TextPart(Body):
    """The one kind of content part that this model understands."""

    type: Literal["text"]
    text: Text
    prompt_cache_breakpoint: dict[str, Any] | None = None  # a hint; ignored

    @model_validator(mode="before")
    @classmethod
    def _refuse_other_kinds(cls, data: Any) -> Any:
        if isinstance(data, dict) and isinstance(data.get("type"), str) and data["type"] != "text":
            raise UnsupportedParameter(
                f"Content parts of type {data['type'][:40]!r} are not supported, only 'text'.",
                param="messages",
            )
        return data


class Message(Body):
    """One turn. The fields below `name` are what clients echo from our answers; they must ask for nothing."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Text | Annotated[list[TextPart], Field(fail_fast=True)]
    name: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    tool_calls: Annotated[list[Any], Field(max_length=0)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_tools(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        if data.get("role") in ("tool", "function"):
            raise UnsupportedParameter(f"Messages of role {data['role']!r} are not supported.", param="messages")
        for name in ("tool_calls", "function_call", "audio"):
            if data.get(name):
                raise UnsupportedParameter(f"Messages with {name!r} are not supported.", param="messages")
        return data

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)

    def for_template(self) -> dict[str, Any]:
        """Role and text, as chat templates expect them; `developer` is OpenAI's newer word for `system`."""
        return {"role": "system" if self.role == "developer" else self.role, "content": self.text}


class ChatRequest(GenerationBody):
    messages: Annotated[list[Message], Field(min_length=1, max_length=4096, fail_fast=True)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class TopLogprobBody(BaseModel):
    token: str
    bytes: list[int]
    logprob: float


class TokenLogprobBody(BaseModel):
    token: str
    bytes: list[int]
    logprob: float
    top_logprobs: list[TopLogprobBody]


class ChatLogprobs(BaseModel):
    content: list[TokenLogprobBody]
    refusal: None


class ChatMessage(BaseModel):
    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(BaseModel):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length"]


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage


class ChatDelta(BaseModel):
    """Unset fields are left out."""

    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatChunkChoice(BaseModel):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length"] | None


class ChatChunk(BaseModel):
    """One server-sent event; `usage` is left out unless `stream_options.include_usage` asked for it."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
