"""/v1/adapters: upload, list, show, delete."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request

from lamina.gateway.auth import AdapterReader, AdapterWriter
from lamina.gateway.catalogue import find, remove
from lamina.gateway.deps import Deps
from lamina.gateway.routes.documented import ERRORS, UPLOAD_ERRORS, multipart_body
from lamina.gateway.schemas.resources import AdapterBody, AdapterDeleted, AdapterList
from lamina.gateway.uploads import adapter_name_of_form, take_in
from lamina.tenancy.records import AdapterRecord

__all__ = ["router"]

router = APIRouter(tags=["adapters"])

Limit = Annotated[int, Query(ge=1, le=100)]
After = Annotated[str | None, Query(max_length=128, description="The last id of the page before.")]

_FORM = multipart_body(
    required=["name"],
    name={"type": "string", "description": "What to call the adapter; a known name gets a new version."},
    file={"type": "string", "format": "binary", "description": "A zip, tar or tar.gz of the PEFT folder."},
    adapter_config={"type": "string", "format": "binary", "description": "Instead: adapter_config.json ..."},
    adapter_model={"type": "string", "format": "binary", "description": "... and adapter_model.safetensors."},
)


@router.post("/v1/adapters", status_code=201, responses=UPLOAD_ERRORS, openapi_extra=_FORM)
async def create_adapter(request: Request, deps: Deps, caller: AdapterWriter) -> AdapterBody:
    """Takes in a PEFT adapter. The same content under the same name answers with the version that exists."""
    return shown(await take_in(request, deps, caller.tenant_id, adapter_name_of_form))


@router.get("/v1/adapters", responses=ERRORS)
async def list_adapters(deps: Deps, caller: AdapterReader, after: After = None, limit: Limit = 20) -> AdapterList:
    """This tenant's adapters, newest first."""
    page = await deps.adapters.list(caller.tenant_id, after=after, limit=limit)
    return AdapterList(
        data=[shown(record) for record in page.data],
        has_more=page.has_more,
        first_id=page.first_id,
        last_id=page.last_id,
    )


@router.get("/v1/adapters/{adapter}", responses=ERRORS)
async def show_adapter(adapter: str, deps: Deps, caller: AdapterReader) -> AdapterBody:
    """By id, by name (the latest version) or by name@version."""
    return shown(await find(deps, caller.tenant_id, adapter))


@router.delete("/v1/adapters/{adapter}", responses=ERRORS)
async def delete_adapter(adapter: str, deps: Deps, caller: AdapterWriter) -> AdapterDeleted:
    """By id or name@version one version, by name all of them. Running requests finish first."""
    await remove(deps, caller.tenant_id, adapter)
    return AdapterDeleted(id=adapter)


def shown(record: AdapterRecord) -> AdapterBody:
    return AdapterBody(
        id=record.id,
        name=record.name,
        version=record.version,
        digest=record.digest,
        base_model=record.base_model,
        rank=record.rank,
        size_bytes=record.size_bytes,
        status=record.status.value,
        created_at=int(record.created_at.timestamp()),
    )
