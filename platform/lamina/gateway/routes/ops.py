"""/health and /metrics, for operators and their machines. Open without a key."""

from __future__ import annotations

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import JSONResponse, Response

from lamina.errors import DatabaseUnavailable, EngineUnavailable
from lamina.gateway.deps import Deps, GatewayDeps
from lamina.gateway.shares import Shares, tenants_shares
from lamina.types import EngineInfo, EngineStats

__all__ = ["router"]

router = APIRouter(tags=["operations"])

RETRY_AFTER_S = 2


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


async def _shares(deps: GatewayDeps) -> Shares | None:
    try:
        return await tenants_shares(deps.engine, deps.quotas)
    except (EngineUnavailable, DatabaseUnavailable):
        return None
