"""/v1/pins."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from lamina.gateway.schemas.chat import Message
from lamina.gateway.schemas.common import Body, RefusingBody, Text

__all__ = ["PinBody", "PinDeleted", "PinList", "PinPatch", "PinRequest"]

_TokenIds = Annotated[list[int], Field(min_length=1, max_length=1_000_000, fail_fast=True)]
Ttl = Annotated[float, Field(ge=1, description="Seconds without a hit after which it ends.")]


class PinRequest(RefusingBody):
    """The beginning of later prompts: either `messages` (without the assistant's opening) or `prompt`."""

    model: Annotated[str, Field(min_length=1, max_length=256, description="Base model or adapter.")]
    messages: Annotated[list[Message], Field(min_length=1, max_length=4096, fail_fast=True)] | None = None
    prompt: Text | _TokenIds | None = None
    floor: Annotated[
        Literal["gpu", "host"] | None,
        Field(
            description="The lowest tier that it may sink to, and the one whose pin limit it is out of: `gpu`, never "
            "leaves the device; `host`, may leave it for host memory. Default: `host` if this server keeps blocks in "
            "host memory, else `gpu`."
        ),
    ] = None
    ttl: Ttl | None = None
    compute: Annotated[bool, Field(description="Compute what is missing before the answer.")] = True


class PinPatch(Body):
    ttl: Ttl


class PinBody(BaseModel):
    """`waiting`: the engine does not hold it (yet), for example just after a restart."""

    id: str
    object: Literal["pin"] = "pin"
    model: str
    floor: str
    status: Literal["granted", "clipped", "waiting"]
    reason: str | None
    blocks: int
    tokens: int
    bytes: int
    resident_blocks: Annotated[
        int,
        Field(description="Computed and kept, on the device or, with floor `host`, there or in host memory."),
    ]
    clipped_blocks: Annotated[int, Field(description="Asked for, but beyond the pin limit.")]
    ttl: float
    hits: int
    last_hit_at: int | None
    created_at: int
    expires_at: int


class PinList(BaseModel):
    object: Literal["list"] = "list"
    data: list[PinBody]


class PinDeleted(BaseModel):
    id: str
    object: Literal["pin.deleted"] = "pin.deleted"
    deleted: Literal[True] = True
