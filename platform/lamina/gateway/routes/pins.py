"""/v1/pins: prefixes that stay in memory."""

from __future__ import annotations

from fastapi import APIRouter

from lamina.errors import InvalidRequest
from lamina.gateway import leases
from lamina.gateway.auth import Caller
from lamina.gateway.deps import Deps, GatewayDeps
from lamina.gateway.generation import resolve_model
from lamina.gateway.prompts import chat_prompt, completion_prompts
from lamina.gateway.routes.documented import ERRORS, PIN_ERRORS
from lamina.gateway.schemas.pins import PinBody, PinDeleted, PinList, PinPatch, PinRequest
from lamina.tenancy.records import PinEntry
from lamina.types import EngineInfo, PinState

__all__ = ["router"]

router = APIRouter(tags=["pins"])


@router.post("/v1/pins", status_code=201, responses=PIN_ERRORS)
async def create_pin(body: PinRequest, deps: Deps, caller: Caller) -> PinBody:
    """Keeps the full blocks of a prompt's beginning in memory, out of what is reserved for this tenant."""
    ttl_s = leases.check_ttl(body.ttl, deps)
    target = await resolve_model(deps, caller, body.model)
    token_ids = await _token_ids(body, deps)
    entry, pin = await leases.grant(
        deps, caller, target, token_ids, floor=leases.floor(body.floor, deps), ttl_s=ttl_s, compute=body.compute
    )
    return shown(entry, pin, deps.engine.info)


@router.get("/v1/pins", responses=ERRORS)
async def list_pins(deps: Deps, caller: Caller) -> PinList:
    """This tenant's pins, oldest first."""
    entries, held = await deps.pins.list(caller.tenant_id), await leases.held(deps)
    return PinList(data=[shown(entry, held.get(entry.id), deps.engine.info) for entry in entries])


@router.get("/v1/pins/{pin_id}", responses=ERRORS)
async def show_pin(pin_id: str, deps: Deps, caller: Caller) -> PinBody:
    entry, held = await deps.pins.get(caller.tenant_id, pin_id), await leases.held(deps)
    return shown(entry, held.get(entry.id), deps.engine.info)


@router.patch("/v1/pins/{pin_id}", responses=ERRORS)
async def change_pin(pin_id: str, body: PinPatch, deps: Deps, caller: Caller) -> PinBody:
    """Another time to live, counted from now, within the hard maximum since it was granted."""
    entry, pin = await leases.renew(deps, caller, pin_id, leases.check_ttl(body.ttl, deps))
    return shown(entry, pin, deps.engine.info)


@router.delete("/v1/pins/{pin_id}", responses=ERRORS)
async def delete_pin(pin_id: str, deps: Deps, caller: Caller) -> PinDeleted:
    """Its blocks are ordinary cached ones again."""
    await leases.release(deps, caller, pin_id)
    return PinDeleted(id=pin_id)


async def _token_ids(body: PinRequest, deps: GatewayDeps) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("Send either 'prompt' or 'messages'.", param="prompt")
    if body.messages is not None:
        return await chat_prompt(
            body.messages, deps.tokenizer, add_generation_prompt=False, continue_final_message=False
        )
    assert body.prompt is not None
    (prompt,) = await completion_prompts(body.prompt, deps.tokenizer, config=deps.config, info=deps.engine.info)
    return prompt.token_ids


def shown(entry: PinEntry, pin: PinState | None, info: EngineInfo) -> PinBody:
    """`pin`: what the engine holds of it."""
    blocks = entry.blocks if pin is None else pin.blocks
    clipped = entry.clipped_blocks if pin is None else pin.clipped_blocks
    last_hit_at = pin.last_hit_at if pin else None
    return PinBody(
        id=entry.id,
        model=entry.model,
        floor=entry.floor,
        status="waiting" if pin is None else "clipped" if clipped else "granted",
        reason="pin_limit" if clipped else None,
        blocks=blocks,
        tokens=blocks * info.block_size,
        bytes=blocks * info.block_bytes,
        resident_blocks=0 if pin is None else pin.resident_blocks,
        clipped_blocks=clipped,
        ttl=entry.ttl_s if pin is None else pin.ttl_s,
        hits=entry.hits if pin is None else pin.hits,
        last_hit_at=None if last_hit_at is None else int(last_hit_at),
        created_at=int(entry.created_at.timestamp()),
        expires_at=int(entry.expires_at.timestamp() if pin is None else pin.expires_at),
    )
