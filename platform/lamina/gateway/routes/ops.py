"""/health and /metrics, for operators and their machines. Open without a key."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import JSONResponse, Response

from lamina.errors import DatabaseUnavailable, EngineUnavailable
from lamina.gateway.deps import Deps, GatewayDeps
from lamina.types import EngineInfo, EngineStats, TenantBlocks

__all__ = ["router"]

router = APIRouter(tags=["operations"])

RETRY_AFTER_S = 2
_NOBODY = "unknown"  # whose tenant is deleted


@router.get("/health", responses={503: {"description": "The engine is starting or restarting."}})
async def health(deps: Deps) -> JSONResponse:
    """200 when requests are served."""
    if deps.engine.ready:
        return JSONResponse({"status": "ready"})
    return JSONResponse({"status": "starting"}, status_code=503, headers={"retry-after": str(RETRY_AFTER_S)})


@router.get("/metrics", response_class=Response)
async def metrics(deps: Deps) -> Response:
    """Prometheus' text format."""
    return Response(deps.metrics.render(*await _snapshot(deps), await _shares(deps)), media_type=CONTENT_TYPE_LATEST)


async def _snapshot(deps: GatewayDeps) -> tuple[EngineInfo | None, EngineStats | None]:
    try:
        return deps.engine.info, await deps.engine.stats()
    except EngineUnavailable:
        return None, None  # reported as lamina_engine_up 0


async def _shares(deps: GatewayDeps) -> list[TenantBlocks]:
    """Tenants by id: a namespace is a secret's child, and no label."""
    try:
        found = (await deps.engine.commons()).tenants
        names = await deps.quotas.tenants_of(frozenset(share.namespace for share in found))
    except (EngineUnavailable, DatabaseUnavailable):
        return []
    known = [replace(share, namespace=names[share.namespace]) for share in found if share.namespace in names]
    strays = [share for share in found if share.namespace not in names]
    return [*known, _together(strays)] if strays else known


def _together(shares: list[TenantBlocks]) -> TenantBlocks:
    evictions: Counter[str] = Counter()
    for share in shares:
        evictions.update(dict(share.evictions))
    return TenantBlocks(
        namespace=_NOBODY,
        active=sum(share.active for share in shares),
        cached=sum(share.cached for share in shares),
        pinned=sum(share.pinned for share in shares),
        pending=sum(share.pending for share in shares),
        pin_hits=sum(share.pin_hits for share in shares),
        evictions=tuple(sorted(evictions.items())),
    )
