"""/v1/uploads: OpenAI's Uploads API, for adapters that are better sent in parts."""

from __future__ import annotations

import asyncio
import time

from fastapi import APIRouter, Request

from lamina.errors import InvalidRequest
from lamina.gateway.auth import AdapterWriter
from lamina.gateway.deps import Deps, GatewayDeps
from lamina.gateway.multipart import receive_form
from lamina.gateway.pending import MAX_PART_BYTES, PendingUpload
from lamina.gateway.routes.documented import ERRORS, UPLOAD_ERRORS, multipart_body
from lamina.gateway.routes.files import shown_as_file
from lamina.gateway.schemas.uploads import UploadBody, UploadComplete, UploadCreate, UploadPartBody, UploadStatus
from lamina.gateway.staging import staged
from lamina.gateway.uploads import adapter_name_of, declared_size, take_in_archive
from lamina.tenancy.records import AdapterRecord

__all__ = ["router"]

router = APIRouter(tags=["files"])

_FORM = multipart_body(
    required=["data"],
    data={"type": "string", "format": "binary", "description": f"At most {MAX_PART_BYTES} bytes."},
)


@router.post("/v1/uploads", responses=UPLOAD_ERRORS)
async def create_upload(body: UploadCreate, deps: Deps, caller: AdapterWriter) -> UploadBody:
    """Announces an archive of a PEFT folder, to be sent in parts within the hour."""
    pending = deps.pending
    upload = await asyncio.to_thread(pending.create, caller.tenant_id, filename=body.filename, size=body.bytes)
    return _shown(upload, "pending")


@router.post("/v1/uploads/{upload_id}/parts", responses=UPLOAD_ERRORS, openapi_extra=_FORM)
async def add_part(upload_id: str, request: Request, deps: Deps, caller: AdapterWriter) -> UploadPartBody:
    """Adds a part; several may be sent at once."""
    upload = await _open(deps, caller.tenant_id, upload_id)
    async with staged(deps.uploads) as folder:
        form = await receive_form(
            request.stream(),
            request.headers.get("content-type", ""),
            folder,
            max_bytes=min(MAX_PART_BYTES, upload.size),
            declared=declared_size(request),
        )
        if form.fields or form.files.keys() != {"data"}:
            raise InvalidRequest("Send exactly one file, 'data'.", param="data")
        part_id = await asyncio.to_thread(deps.pending.add, upload, form.files["data"].path)
    return UploadPartBody(id=part_id, created_at=int(time.time()), upload_id=upload.id)


@router.post("/v1/uploads/{upload_id}/complete", responses=UPLOAD_ERRORS)
async def complete_upload(upload_id: str, body: UploadComplete, deps: Deps, caller: AdapterWriter) -> UploadBody:
    """Puts the parts together and takes the adapter in. After a refused adapter the upload is over."""
    upload = await _open(deps, caller.tenant_id, upload_id)
    name = adapter_name_of(upload.filename)
    async with staged(deps.uploads) as folder:
        whole = await asyncio.to_thread(deps.pending.assemble, upload, body.part_ids, folder, md5=body.md5)
        record = await take_in_archive(deps, caller.tenant_id, name, whole, folder)
    return _shown(upload, "completed", record)


@router.post("/v1/uploads/{upload_id}/cancel", responses=ERRORS)
async def cancel_upload(upload_id: str, deps: Deps, caller: AdapterWriter) -> UploadBody:
    """Forgets the upload and its parts."""
    upload = await _open(deps, caller.tenant_id, upload_id)
    async with staged(deps.uploads) as folder:
        await asyncio.to_thread(deps.pending.cancel, upload, folder)
    return _shown(upload, "cancelled")


async def _open(deps: GatewayDeps, tenant_id: str, upload_id: str) -> PendingUpload:
    return await asyncio.to_thread(deps.pending.get, tenant_id, upload_id)


def _shown(upload: PendingUpload, status: UploadStatus, record: AdapterRecord | None = None) -> UploadBody:
    return UploadBody(
        id=upload.id,
        bytes=upload.size,
        created_at=upload.created_at,
        expires_at=upload.expires_at,
        filename=upload.filename,
        status=status,
        file=None if record is None else shown_as_file(record),
    )
