"""/v1/models: the base model and this tenant's adapters."""

from __future__ import annotations

from fastapi import APIRouter

from lamina.gateway.auth import AnyKey
from lamina.gateway.catalogue import every
from lamina.gateway.deps import Deps, GatewayDeps
from lamina.gateway.routes.documented import ERRORS
from lamina.gateway.schemas.resources import ModelBody, ModelList
from lamina.tenancy.principal import Principal
from lamina.tenancy.records import AdapterRecord

__all__ = ["router"]

router = APIRouter(tags=["models"])


@router.get("/v1/models", responses=ERRORS)
async def list_models(deps: Deps, caller: AnyKey) -> ModelList:
    """What this key may use as `model`. `name@version` works too."""
    records = await every(deps, caller.tenant_id)
    return ModelList(data=[_base(deps), *(_adapter(record, record.name, caller) for record in records)])


@router.get("/v1/models/{model:path}", responses=ERRORS)
async def show_model(model: str, deps: Deps, caller: AnyKey) -> ModelBody:
    """The name may have slashes, encoded or not."""
    if model == deps.base_model:
        return _base(deps)
    return _adapter(await deps.adapters.resolve(caller.tenant_id, model), model, caller)


def _base(deps: GatewayDeps) -> ModelBody:
    return ModelBody(id=deps.base_model, created=deps.created, owned_by="lamina")


def _adapter(record: AdapterRecord, name: str, caller: Principal) -> ModelBody:
    return ModelBody(
        id=name,
        created=int(record.created_at.timestamp()),
        owned_by=caller.tenant_name,
        parent=record.base_model,
        digest=record.digest,
    )
