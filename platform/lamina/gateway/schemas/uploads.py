"""/v1/uploads."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from lamina.gateway.schemas.common import Body, Text
from lamina.gateway.schemas.resources import FileBody

__all__ = ["UploadBody", "UploadComplete", "UploadCreate", "UploadPartBody", "UploadStatus"]

UploadStatus = Literal["pending", "completed", "cancelled"]


class UploadCreate(Body):
    """`mime_type` is not looked at: what kind of archive it is, its content says."""

    filename: Annotated[Text, Field(min_length=1, max_length=256)]
    purpose: Literal["adapter"]
    bytes: Annotated[int, Field(ge=1)]
    mime_type: str | None = None


class UploadComplete(Body):
    part_ids: Annotated[list[str], Field(min_length=1, max_length=1024, fail_fast=True)]
    md5: Annotated[str, Field(pattern="^[0-9a-fA-F]{32}$")] | None = None


class UploadBody(BaseModel):
    id: str
    object: Literal["upload"] = "upload"
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: Literal["adapter"] = "adapter"
    status: UploadStatus
    file: FileBody | None


class UploadPartBody(BaseModel):
    id: str
    object: Literal["upload.part"] = "upload.part"
    created_at: int
    upload_id: str
