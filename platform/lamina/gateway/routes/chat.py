"""POST /v1/chat/completions."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from lamina.errors import InvalidRequest
from lamina.gateway.answer import answer
from lamina.gateway.auth import Caller
from lamina.gateway.chat_writer import ChatWriter
from lamina.gateway.deps import Deps, GatewayDeps
from lamina.gateway.generation import Job, resolve_model
from lamina.gateway.prompts import chat_prompt
from lamina.gateway.routes.documented import GENERATION
from lamina.gateway.sampling import completion_budget, sampling_params
from lamina.gateway.schemas.chat import ChatCompletion, ChatRequest
from lamina.tenancy.principal import Principal

__all__ = ["router"]

router = APIRouter(tags=["generation"])


@router.post("/v1/chat/completions", response_model=ChatCompletion, responses=GENERATION)
async def create_chat_completion(body: ChatRequest, request: Request, deps: Deps, caller: Caller) -> Response:
    """Answers a conversation; with `stream`, as server-sent events."""
    job = await _job(body, deps, caller)
    return await answer(request, deps, job, ChatWriter(body, deps.tokenizer, job), stream=bool(body.stream))


async def _job(body: ChatRequest, deps: GatewayDeps, caller: Principal) -> Job:
    target = await resolve_model(deps, caller, body.model)
    info = deps.engine.info
    wanted, logprobs = _max_tokens(body), _logprobs(body)
    token_ids = await chat_prompt(
        body.messages,
        deps.tokenizer,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
    )
    budget = completion_budget(wanted, prompt=len(token_ids), info=info, config=deps.config, param="messages")
    sampling = sampling_params(body, deps.config, info, max_tokens=budget, logprobs=logprobs)
    return Job.build(deps, caller, target, "chatcmpl", [(token_ids, sampling)])


def _max_tokens(body: ChatRequest) -> int | None:
    old, new = body.max_tokens, body.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise InvalidRequest(
            f"max_tokens ({old}) and max_completion_tokens ({new}) differ. Set only max_completion_tokens.",
            param="max_tokens",
        )
    return old if new is None else new


def _logprobs(body: ChatRequest) -> int | None:
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs to be true.", param="top_logprobs")
    return (body.top_logprobs or 0) if body.logprobs else None
