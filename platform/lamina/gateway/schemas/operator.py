"""/operator/kv: for `lamina kv` beside the server."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from lamina.gateway.schemas.chat import Message
from lamina.gateway.schemas.common import Body, Text

__all__ = ["ExplainBody", "VerifyBody"]


class ExplainBody(Body):
    """Whose prompt, for which model: either `messages` or `prompt`."""

    tenant_id: Annotated[str, Field(max_length=256)]
    namespace: Annotated[str, Field(max_length=256)]
    model: Annotated[str, Field(min_length=1, max_length=256)]
    messages: Annotated[list[Message], Field(min_length=1, max_length=4096, fail_fast=True)] | None = None
    prompt: Text | None = None


class VerifyBody(Body):
    tier: Literal["gpu", "host", "store"]
    start: Annotated[int, Field(ge=0)] = 0
    count: Annotated[int, Field(ge=1, le=65536)] = 64
    seed: int | None = None
