"""Pins: the engine grants them, the database remembers them, and this makes the two agree for one call."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from contextlib import suppress

import structlog

from lamina.errors import (
    ContextLengthExceeded,
    EngineUnavailable,
    InvalidRequest,
    LaminaError,
    NotFound,
    PinDenied,
)
from lamina.gateway.deps import GatewayDeps
from lamina.gateway.generation import Target
from lamina.gateway.sampling import context_limit
from lamina.tenancy.principal import Principal
from lamina.tenancy.records import PinEntry
from lamina.types import EngineInfo, FinishReason, GenerationRequest, PinAnswer, PinOrder, PinState, SamplingParams

__all__ = ["check_ttl", "floor", "grant", "held", "release", "renew"]

log = structlog.get_logger(__name__)


async def grant(
    deps: GatewayDeps,
    caller: Principal,
    target: Target,
    token_ids: Sequence[int],
    *,
    floor: str,
    ttl_s: float,
    compute: bool,
) -> tuple[PinEntry, PinState]:
    """Leases the full blocks of a prompt, or of its head; with `compute` they are computed before this returns.

    A pin that could not be computed stays: its blocks are kept once a request has computed them. Raises InvalidRequest,
    PinDenied, LimitExceeded, EngineUnavailable.
    """
    info = deps.engine.info
    if len(token_ids) >= context_limit(info):
        raise ContextLengthExceeded(limit=context_limit(info), prompt=len(token_ids))
    order = PinOrder(
        namespace=caller.namespace,
        token_ids=tuple(token_ids),
        adapter=target.digest,
        floor=floor,
        ttl_s=ttl_s,
        hard_max_s=deps.config.pin_hard_max_s,
    )
    answer = await deps.engine.pin(order)
    if answer.pin is None:
        raise _denied(answer, floor, info)
    try:
        entry = await deps.pins.add(
            caller.tenant_id,
            model=target.name,
            model_digest=info.model_digest,
            order=order,
            pin=answer.pin,
            block_tokens=info.block_size,
        )
    except BaseException:
        await _let_go(deps, caller.namespace, answer.pin.pin_id)
        raise
    if compute:
        await _compute(deps, caller, order, answer.pin.blocks * info.block_size)
    return entry, (await held(deps)).get(entry.id, answer.pin)


async def held(deps: GatewayDeps) -> dict[str, PinState]:
    """The pins that the engine has now, by id. Raises EngineUnavailable."""
    return {pin.pin_id: pin for pin in (await deps.engine.commons()).pins}


async def renew(deps: GatewayDeps, caller: Principal, pin_id: str, ttl_s: float) -> tuple[PinEntry, PinState]:
    """Another time to live, from now. Raises NotFound, InvalidRequest, EngineUnavailable."""
    await deps.pins.get(caller.tenant_id, pin_id)
    try:
        pin = await deps.engine.renew_pin(caller.namespace, pin_id, ttl_s)
    except NotFound as error:
        raise EngineUnavailable(
            "The engine does not hold this pin right now; retry shortly.", retry_after_s=2
        ) from error
    return await deps.pins.update(caller.tenant_id, pin), pin


async def release(deps: GatewayDeps, caller: Principal, pin_id: str) -> None:
    """Ends a pin, also while there is no engine. Raises NotFound."""
    await deps.pins.remove(caller.tenant_id, pin_id)
    await _let_go(deps, caller.namespace, pin_id)


def floor(wanted: str | None, deps: GatewayDeps) -> str:
    """Where blocks are kept if the client does not say: host memory if that is a tier here, else the device."""
    return wanted or ("host" if deps.engine.info.host_blocks else "gpu")


def check_ttl(ttl_s: float | None, deps: GatewayDeps) -> float:
    """The default without one. Raises InvalidRequest beyond the hard maximum."""
    if ttl_s is None:
        return min(deps.config.pin_ttl_s, deps.config.pin_hard_max_s)
    if ttl_s > deps.config.pin_hard_max_s:
        raise InvalidRequest(
            f"ttl may be at most {deps.config.pin_hard_max_s:g} s here; that is as long as any pin lives.", param="ttl"
        )
    return ttl_s


async def _let_go(deps: GatewayDeps, namespace: str, pin_id: str) -> None:
    with suppress(NotFound):
        try:
            await deps.engine.unpin(namespace, pin_id)
        except EngineUnavailable as error:
            log.info("an engine that is down was not told of an ended pin", pin=pin_id, code=error.code)


async def _compute(deps: GatewayDeps, caller: Principal, order: PinOrder, tokens: int) -> None:
    """Runs the prefix as a request of one token, which stands in line and is charged like any other."""
    request = GenerationRequest(
        request_id=f"pin-{uuid.uuid4().hex}",
        prompt_token_ids=order.token_ids[:tokens],
        sampling=SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True),
        tenant=caller.tenant_id,
        namespace=caller.namespace,
        adapter=order.adapter,
        weight=caller.weight,
    )
    try:
        async with asyncio.timeout(deps.config.first_event_timeout_s):
            async for event in deps.engine.submit(request):
                if event.finish_reason is FinishReason.ERROR:
                    log.warning("a pinned prefix was not computed", error=event.error)
    except (LaminaError, TimeoutError) as error:
        log.warning("a pinned prefix was not computed", reason=str(error))


def _denied(answer: PinAnswer, floor: str, info: EngineInfo) -> LaminaError:
    match answer.reason:
        case "no_full_block":
            return InvalidRequest(
                f"The prefix is shorter than one block of {info.block_size} tokens; there is nothing to keep.",
                param="prompt",
            )
        case "no_such_tier":
            return InvalidRequest(
                "This server keeps no blocks in host memory (LAMINA_HOST_KV_BYTES is 0); use floor 'gpu'.",
                param="floor",
            )
        case "policy_not_loaded":
            return EngineUnavailable("Quotas are being loaded; retry shortly.", retry_after_s=answer.retry_after_s)
    return PinDenied(
        f"Nothing can be pinned with floor '{floor}': {_amount(answer.need, info)} more are needed, and your pin limit "
        f"there, {_amount(answer.limit, info)}, leaves {_amount(answer.have, info)}. "
        "End another pin, or ask the operator for a higher limit.",
        reason=answer.reason or "pin_limit",
        limit=answer.limit,
        need=answer.need,
        have=answer.have,
        decision=answer.decision,
        retry_after_s=answer.retry_after_s,
    )


def _amount(blocks: int, info: EngineInfo) -> str:
    return f"{blocks} blocks ({blocks * info.block_bytes} bytes)"
