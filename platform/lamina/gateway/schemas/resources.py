"""Models, adapters, files, tokens and errors."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from lamina.gateway.schemas.chat import Message
from lamina.gateway.schemas.common import Body, Text

__all__ = [
    "AdapterBody",
    "AdapterDeleted",
    "AdapterList",
    "DetokenizeRequest",
    "DetokenizeResponse",
    "ErrorBody",
    "ErrorInfo",
    "FileBody",
    "FileDeleted",
    "FileList",
    "ModelBody",
    "ModelList",
    "TokenizeRequest",
    "TokenizeResponse",
]


class ErrorInfo(BaseModel):
    message: str
    type: str
    param: str | None
    code: str
    details: dict[str, Any] | None = None


class ErrorBody(BaseModel):
    error: ErrorInfo


class ModelBody(BaseModel):
    """`parent` and `digest` are set for adapters."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str
    parent: str | None = None
    digest: str | None = None


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelBody]


class AdapterBody(BaseModel):
    """One immutable version. Use `name` or `name@version` as the model of a request."""

    id: str
    object: Literal["adapter"] = "adapter"
    name: str
    version: int
    digest: str
    base_model: str
    rank: int
    size_bytes: int
    status: str
    created_at: int


class AdapterList(BaseModel):
    object: Literal["list"] = "list"
    data: list[AdapterBody]
    has_more: bool
    first_id: str | None
    last_id: str | None


class AdapterDeleted(BaseModel):
    id: str
    object: Literal["adapter.deleted"] = "adapter.deleted"
    deleted: Literal[True] = True


class FileBody(BaseModel):
    """An adapter as OpenAI's Files API shows it."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    filename: str
    purpose: Literal["adapter"] = "adapter"
    status: Literal["processed"] = "processed"


class FileList(BaseModel):
    object: Literal["list"] = "list"
    data: list[FileBody]
    has_more: bool
    first_id: str | None
    last_id: str | None


class FileDeleted(BaseModel):
    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True


class TokenizeRequest(Body):
    """Either `prompt` or `messages`."""

    model: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    prompt: Text | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=4096, fail_fast=True)] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    return_token_strs: bool = False


class TokenizeResponse(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(Body):
    model: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    tokens: Annotated[list[int], Field(max_length=1_000_000, fail_fast=True)]


class DetokenizeResponse(BaseModel):
    prompt: str
