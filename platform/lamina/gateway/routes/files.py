"""/v1/files: OpenAI's Files API, unchanged, as another way to upload and manage adapters."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request

from lamina.errors import InvalidRequest
from lamina.gateway.auth import AdapterReader, AdapterWriter
from lamina.gateway.catalogue import find, remove
from lamina.gateway.deps import Deps
from lamina.gateway.routes.documented import ERRORS, UPLOAD_ERRORS, multipart_body
from lamina.gateway.schemas.resources import FileBody, FileDeleted, FileList
from lamina.gateway.uploads import adapter_name_of_file, take_in
from lamina.tenancy.records import AdapterRecord

__all__ = ["router", "shown_as_file"]

router = APIRouter(tags=["files"])

_FORM = multipart_body(
    required=["file", "purpose"],
    file={"type": "string", "format": "binary", "description": "A zip, tar or tar.gz of the PEFT folder."},
    purpose={"type": "string", "enum": ["adapter"]},
)


@router.post("/v1/files", responses=UPLOAD_ERRORS, openapi_extra=_FORM)
async def create_file(request: Request, deps: Deps, caller: AdapterWriter) -> FileBody:
    """Takes in a PEFT adapter; the file's name without its ending is the adapter's name."""
    return shown_as_file(await take_in(request, deps, caller.tenant_id, adapter_name_of_file))


@router.get("/v1/files", responses=ERRORS)
async def list_files(
    deps: Deps,
    caller: AdapterReader,
    after: Annotated[str | None, Query(max_length=128)] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    order: Literal["asc", "desc"] = "desc",
    purpose: Annotated[str | None, Query(max_length=64)] = None,
) -> FileList:
    """This tenant's adapters, newest first."""
    if order == "asc":
        raise InvalidRequest("Only order='desc' is supported.", param="order")
    if purpose not in (None, "adapter"):
        return FileList(data=[], has_more=False, first_id=None, last_id=None)
    page = await deps.adapters.list(caller.tenant_id, after=after, limit=limit)
    return FileList(
        data=[shown_as_file(record) for record in page.data],
        has_more=page.has_more,
        first_id=page.first_id,
        last_id=page.last_id,
    )


@router.get("/v1/files/{file_id}", responses=ERRORS)
async def show_file(file_id: str, deps: Deps, caller: AdapterReader) -> FileBody:
    """One adapter; its id is the file's id."""
    return shown_as_file(await find(deps, caller.tenant_id, file_id))


@router.delete("/v1/files/{file_id}", responses=ERRORS)
async def delete_file(file_id: str, deps: Deps, caller: AdapterWriter) -> FileDeleted:
    """Deletes this version of the adapter. Running requests finish first."""
    record = await find(deps, caller.tenant_id, file_id)
    await remove(deps, caller.tenant_id, record.id)
    return FileDeleted(id=record.id)


def shown_as_file(record: AdapterRecord) -> FileBody:
    return FileBody(
        id=record.id,
        bytes=record.size_bytes,
        created_at=int(record.created_at.timestamp()),
        filename=record.name,
    )
