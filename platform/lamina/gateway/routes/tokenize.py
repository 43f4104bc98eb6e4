"""POST /tokenize and /detokenize: what the model sees."""

from __future__ import annotations

from fastapi import APIRouter

from lamina.errors import InvalidRequest
from lamina.gateway.auth import Caller
from lamina.gateway.codec import off_loop_if_long
from lamina.gateway.deps import Deps, GatewayDeps
from lamina.gateway.generation import resolve_model
from lamina.gateway.prompts import chat_prompt
from lamina.gateway.routes.documented import ERRORS
from lamina.gateway.sampling import check_token_id, context_limit
from lamina.gateway.schemas.resources import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)

__all__ = ["router"]

router = APIRouter(tags=["tokens"])


@router.post("/tokenize", responses=ERRORS)
async def tokenize(body: TokenizeRequest, deps: Deps, caller: Caller) -> TokenizeResponse:
    """The token ids of a prompt, or of a conversation in the model's template."""
    if body.model is not None:
        await resolve_model(deps, caller, body.model)
    token_ids = await _token_ids(body, deps)
    strings = [deps.tokenizer.token_text(token_id) for token_id in token_ids] if body.return_token_strs else None
    return TokenizeResponse(
        count=len(token_ids), max_model_len=context_limit(deps.engine.info), tokens=token_ids, token_strs=strings
    )


@router.post("/detokenize", responses=ERRORS)
async def detokenize(body: DetokenizeRequest, deps: Deps, caller: Caller) -> DetokenizeResponse:
    """The text of token ids, special tokens included."""
    if body.model is not None:
        await resolve_model(deps, caller, body.model)
    for token_id in body.tokens:
        check_token_id(token_id, deps.engine.info, "tokens")
    text = await off_loop_if_long(
        len(body.tokens), lambda: deps.tokenizer.decode(body.tokens, skip_special_tokens=False)
    )
    return DetokenizeResponse(prompt=text)


async def _token_ids(body: TokenizeRequest, deps: GatewayDeps) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("Send either 'prompt' or 'messages'.", param="prompt")
    if body.messages is not None:
        return await chat_prompt(
            body.messages,
            deps.tokenizer,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=False,
        )
    text, special = body.prompt or "", body.add_special_tokens
    return await off_loop_if_long(len(text), lambda: deps.tokenizer.encode(text, add_special_tokens=special))
