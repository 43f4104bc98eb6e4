"""/v1/completions."""

from __future__ import annotations

from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, Field

from lamina.gateway.schemas.common import MAX_LOGPROBS, GenerationBody, Text, Usage

__all__ = [
    "Completion",
    "CompletionChoice",
    "CompletionChunk",
    "CompletionChunkChoice",
    "CompletionLogprobs",
    "CompletionRequest",
]


_T = TypeVar("_T")
_List = Annotated[list[_T], Field(fail_fast=True)]  # one error, not one for each of a million elements


class CompletionRequest(GenerationBody):
    prompt: Annotated[
        Text | _List[Text] | _List[int] | _List[_List[int]],
        Field(description="Text, several texts, token ids, or several lists of token ids."),
    ]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None
    best_of: Annotated[int, Field(ge=1)] | None = None


class CompletionLogprobs(BaseModel):
    """Parallel lists; `text_offset` counts characters from the start of the choice's text."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"]


class Completion(BaseModel):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage


class CompletionChunkChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None


class CompletionChunk(BaseModel):
    """One server-sent event; `usage` is left out unless `stream_options.include_usage` asked for it."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChunkChoice]
    usage: Usage | None = None
