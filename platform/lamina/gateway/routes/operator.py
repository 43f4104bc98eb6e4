"""/operator/kv: what `lamina kv` asks of a running server. For tickets of `OperatorDoor`, never for tenants' keys."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fastapi import APIRouter
from starlette.responses import JSONResponse

from lamina.errors import InvalidRequest
from lamina.gateway.auth import OPERATOR_PATHS
from lamina.gateway.deps import Deps, GatewayDeps
from lamina.gateway.prompts import chat_prompt, completion_prompts
from lamina.gateway.schemas.operator import ExplainBody, VerifyBody
from lamina.gateway.shares import tenants_shares
from lamina.types import PrefixOrder, VerifyOrder

__all__ = ["router"]

router = APIRouter(prefix=OPERATOR_PATHS.removesuffix("/"), tags=["operations"], include_in_schema=False)


@router.get("/kv")
async def overview(deps: Deps) -> JSONResponse:
    """Who has what in which tier, and how prompts fare; tenants by id."""
    info, stats, shares = deps.engine.info, await deps.engine.stats(), await tenants_shares(deps.engine, deps.quotas)
    report = asdict(shares.report)
    for private in ("tenants", "pins"):
        del report[private]
    return JSONResponse(
        {
            "block_bytes": info.block_bytes,
            "block_tokens": info.block_size,
            "pool": {state: getattr(stats, f"blocks_{state}") for state in ("total", "free", "active", "cached")},
            "commons": report,
            "tenants": [_named(share) for share in shares.blocks],
            "prefixes": [_named(found) for found in shares.prefixes],
        }
    )


@router.post("/kv/explain")
async def explain(body: ExplainBody, deps: Deps) -> JSONResponse:
    """Where a prompt's blocks are, and why the others are nowhere."""
    adapter = None
    if body.model != deps.base_model:
        adapter = (await deps.adapters.resolve(body.tenant_id, body.model)).digest
    token_ids = await _token_ids(body, deps)
    order = PrefixOrder(namespace=body.namespace, token_ids=tuple(token_ids), adapter=adapter)
    explanation = asdict(await deps.engine.explain_prefix(order))
    del explanation["prefixes"]["namespace"]
    return JSONResponse({"tokens": len(token_ids)} | explanation)


@router.post("/kv/verify")
async def verify(body: VerifyBody, deps: Deps) -> JSONResponse:
    """Checks a batch of one tier's blocks."""
    order = VerifyOrder(tier=body.tier, start=body.start, count=body.count, seed=body.seed)
    return JSONResponse(asdict(await deps.engine.verify(order)))


async def _token_ids(body: ExplainBody, deps: GatewayDeps) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("Send either 'prompt' or 'messages'.", param="prompt")
    if body.messages is not None:
        return await chat_prompt(
            body.messages, deps.tokenizer, add_generation_prompt=True, continue_final_message=False
        )
    assert body.prompt is not None
    (prompt,) = await completion_prompts(body.prompt, deps.tokenizer, config=deps.config, info=deps.engine.info)
    return prompt.token_ids


def _named(record: Any) -> dict[str, Any]:
    fields = asdict(record)
    return {"tenant": fields.pop("namespace")} | fields
