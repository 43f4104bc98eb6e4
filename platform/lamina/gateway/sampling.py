"""From a validated body to `SamplingParams`: defaults, and limits that depend on configuration and model."""

from __future__ import annotations

from typing import TypeVar

from lamina.config import GatewayConfig
from lamina.errors import ContextLengthExceeded, InvalidRequest
from lamina.gateway.schemas.common import GenerationBody
from lamina.types import EngineInfo, SamplingParams

__all__ = ["check_token_id", "completion_budget", "context_limit", "sampling_params"]

T = TypeVar("T")

MAX_STOP_CHARS = 1024
MAX_BIAS = 100.0


def sampling_params(
    body: GenerationBody, config: GatewayConfig, info: EngineInfo, *, max_tokens: int, logprobs: int | None
) -> SamplingParams:
    """Raises InvalidRequest naming the parameter and its limit."""
    min_tokens = _or(body.min_tokens, 0)
    if min_tokens > max_tokens:
        raise InvalidRequest(
            f"min_tokens ({min_tokens}) exceeds max_tokens ({max_tokens}). Lower it.", param="min_tokens"
        )
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=float(_or(body.temperature, 1.0)),
        top_k=max(_or(body.top_k, 0), 0),
        top_p=float(_or(body.top_p, 1.0)),
        min_p=float(_or(body.min_p, 0.0)),
        repetition_penalty=float(_or(body.repetition_penalty, 1.0)),
        presence_penalty=float(_or(body.presence_penalty, 0.0)),
        frequency_penalty=float(_or(body.frequency_penalty, 0.0)),
        logit_bias=_logit_bias(body.logit_bias or {}, info),
        seed=None if body.seed is None else body.seed % 2**63,  # clients may send negative ones
        n=_choices(body.n, config),
        stop=_stop_strings(body.stop, config),
        stop_token_ids=_stop_token_ids(body.stop_token_ids or [], info),
        ignore_eos=bool(body.ignore_eos),
        logprobs=logprobs,
    )


def completion_budget(wanted: int | None, *, prompt: int, info: EngineInfo, config: GatewayConfig, param: str) -> int:
    """How many tokens may be generated after a prompt of `prompt` tokens.

    An explicit wish must fit the context window (else ContextLengthExceeded); the default is clipped to it.
    """
    limit = context_limit(info)
    left = limit - prompt
    if left < 1:
        raise ContextLengthExceeded(limit=limit, prompt=prompt, completion=1, param=param)
    if wanted is None:
        return min(config.default_max_tokens, left)
    if wanted > left:
        raise ContextLengthExceeded(limit=limit, prompt=prompt, completion=wanted, param="max_tokens")
    return wanted


def context_limit(info: EngineInfo) -> int:
    """Tokens that one choice can have: the model's context, or all of a smaller block pool."""
    return min(info.max_context, info.num_blocks * info.block_size)


def _or(value: T | None, default: T) -> T:
    return default if value is None else value


def _choices(n: int | None, config: GatewayConfig) -> int:
    if n is not None and n > config.max_choices:
        raise InvalidRequest(f"n is {n}, but at most {config.max_choices} choices are allowed.", param="n")
    return _or(n, 1)


def _stop_strings(stop: str | list[str] | None, config: GatewayConfig) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(strings) > config.max_stop_strings:
        raise InvalidRequest(
            f"stop has {len(strings)} strings, but at most {config.max_stop_strings} are allowed.",
            param="stop",
        )
    for text in strings:
        if not text:
            raise InvalidRequest("stop has an empty string, which would match at once. Remove it.", param="stop")
        if len(text) > MAX_STOP_CHARS:
            raise InvalidRequest(
                f"A stop string has {len(text)} characters, but at most {MAX_STOP_CHARS} are allowed.",
                param="stop",
            )
    return strings


def _stop_token_ids(ids: list[int], info: EngineInfo) -> tuple[int, ...]:
    for token_id in ids:
        check_token_id(token_id, info, "stop_token_ids")
    return tuple(ids)


def _logit_bias(bias: dict[str, float], info: EngineInfo) -> tuple[tuple[int, float], ...]:
    found: dict[int, float] = {}
    for key, value in bias.items():
        token_id = _token_id(key)
        check_token_id(token_id, info, "logit_bias")
        if not -MAX_BIAS <= value <= MAX_BIAS:
            raise InvalidRequest(
                f"logit_bias[{key!r}] is {value}, but it must be from {-MAX_BIAS:g} to {MAX_BIAS:g}.",
                param="logit_bias",
            )
        found[token_id] = float(value)
    return tuple(sorted(found.items()))


def _token_id(key: str) -> int:
    if not (key.isascii() and key.isdigit() and len(key) <= 10):
        raise InvalidRequest(
            f"logit_bias has the key {key[:40]!r}, but keys must be token ids in decimal.", param="logit_bias"
        )
    return int(key)


def check_token_id(token_id: int, info: EngineInfo, param: str) -> None:
    """Raises InvalidRequest if the vocabulary has no such token."""
    if not 0 <= token_id < info.vocab_size:
        raise InvalidRequest(
            f"{param} has the token id {token_id}, but the vocabulary ends at {info.vocab_size - 1}.",
            param=param,
        )
