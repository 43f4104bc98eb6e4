"""POST /v1/completions."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from lamina.errors import UnsupportedParameter
from lamina.gateway.answer import answer
from lamina.gateway.auth import Caller
from lamina.gateway.completion_writer import CompletionWriter
from lamina.gateway.deps import Deps, GatewayDeps
from lamina.gateway.generation import Job, Target, resolve_model
from lamina.gateway.prompts import Prompt, completion_prompts
from lamina.gateway.routes.documented import GENERATION
from lamina.gateway.sampling import completion_budget, sampling_params
from lamina.gateway.schemas.completions import Completion, CompletionRequest
from lamina.tenancy.principal import Principal

__all__ = ["router"]

router = APIRouter(tags=["generation"])


@router.post("/v1/completions", response_model=Completion, responses=GENERATION)
async def create_completion(body: CompletionRequest, request: Request, deps: Deps, caller: Caller) -> Response:
    """Continues one prompt or several; with `stream`, as server-sent events."""
    _refuse_unsupported(body)
    target = await resolve_model(deps, caller, body.model)
    prompts = await completion_prompts(body.prompt, deps.tokenizer, config=deps.config, info=deps.engine.info)
    job = _job(body, deps, caller, target, prompts)
    writer = CompletionWriter(body, deps.tokenizer, job, prompts)
    return await answer(request, deps, job, writer, stream=bool(body.stream))


def _refuse_unsupported(body: CompletionRequest) -> None:
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise UnsupportedParameter("best_of other than n is not supported. Leave it out.", param="best_of")
    if body.echo and body.logprobs is not None:
        raise UnsupportedParameter(
            "echo together with logprobs is not supported: there are no log-probabilities of prompt tokens.",
            param="echo",
        )


def _job(body: CompletionRequest, deps: GatewayDeps, caller: Principal, target: Target, prompts: list[Prompt]) -> Job:
    info, config = deps.engine.info, deps.config
    sized = [
        (
            prompt.token_ids,
            completion_budget(body.max_tokens, prompt=len(prompt.token_ids), info=info, config=config, param="prompt"),
        )
        for prompt in prompts
    ]
    work = [
        (ids, sampling_params(body, config, info, max_tokens=budget, logprobs=body.logprobs)) for ids, budget in sized
    ]
    return Job.build(deps, caller, target, "cmpl", work)
