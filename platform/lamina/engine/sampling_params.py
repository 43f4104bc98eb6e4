"""Checks that sampling parameters mean something. The one list of their ranges."""

from __future__ import annotations

from collections.abc import Iterable
from reprlib import repr as short_repr
from typing import NoReturn, TypeGuard

from lamina.errors import InvalidRequest
from lamina.types import SamplingParams

__all__ = ["MAX_LOGIT_BIASES", "MAX_STOP_TOKENS", "MAX_TEMPERATURE", "validate"]

MAX_LOGIT_BIASES = 1024
MAX_STOP_TOKENS = 256
MAX_TEMPERATURE = 100.0
_SEEDS = (-(2**63), 2**64 - 1)  # signed or unsigned 64 bits; -1 and 2**64 - 1 are the same seed


def validate(params: SamplingParams, *, vocab_size: int, max_logprobs: int, max_choices: int) -> None:
    """Raises InvalidRequest, with the parameter's name and its range, for the first value out of range.

    How many tokens fit the context window is not known here; admission checks that.
    """
    _lengths(params)
    _integer("n", params.n, 1, max_choices)
    _filters(params)
    _penalties(params)
    if params.seed is not None:
        _integer("seed", params.seed, *_SEEDS)
    if params.logprobs is not None:
        _integer("logprobs", params.logprobs, 0, max_logprobs)
    _biases(params, vocab_size)
    _stops(params, vocab_size)


def _lengths(params: SamplingParams) -> None:
    _integer("max_tokens", params.max_tokens, 1, None)
    _integer("min_tokens", params.min_tokens, 0, None)
    if params.min_tokens > params.max_tokens:
        _refuse("min_tokens", f"must not exceed max_tokens ({params.max_tokens})", params.min_tokens)


def _filters(params: SamplingParams) -> None:
    _number("temperature", params.temperature, 0, MAX_TEMPERATURE)
    _integer("top_k", params.top_k, 0, None, hint="; 0 switches it off")
    _number("top_p", params.top_p, 0, 1)
    if params.top_p == 0:
        _refuse("top_p", "must be above 0 and at most 1; use temperature 0 for greedy decoding", params.top_p)
    _number("min_p", params.min_p, 0, 1)


def _penalties(params: SamplingParams) -> None:
    _number("repetition_penalty", params.repetition_penalty, 0.01, 100)
    _number("presence_penalty", params.presence_penalty, -2, 2)
    _number("frequency_penalty", params.frequency_penalty, -2, 2)


def _biases(params: SamplingParams, vocab_size: int) -> None:
    if len(params.logit_bias) > MAX_LOGIT_BIASES:
        _refuse("logit_bias", f"must have at most {MAX_LOGIT_BIASES} entries", len(params.logit_bias))
    _tokens("logit_bias", (token for token, _ in params.logit_bias), vocab_size)
    for _, bias in params.logit_bias:
        _number("logit_bias", bias, -100, 100)
    if len({token for token, _ in params.logit_bias}) != len(params.logit_bias):
        raise InvalidRequest("logit_bias must name each token at most once.", param="logit_bias")


def _stops(params: SamplingParams, vocab_size: int) -> None:
    if isinstance(params.stop, str) or any(not isinstance(stop, str) or not stop for stop in params.stop):
        raise InvalidRequest("stop must be a list of strings of at least 1 character.", param="stop")
    if len(params.stop_token_ids) > MAX_STOP_TOKENS:
        _refuse("stop_token_ids", f"must have at most {MAX_STOP_TOKENS} entries", len(params.stop_token_ids))
    _tokens("stop_token_ids", params.stop_token_ids, vocab_size)


def _tokens(name: str, tokens: Iterable[int], vocab_size: int) -> None:
    for token in tokens:
        _integer(name, token, 0, vocab_size - 1, what="token ids ", hint=" (the vocabulary)")


def _integer(name: str, value: object, low: int, high: int | None, *, what: str = "", hint: str = "") -> None:
    span = f"at least {low}" if high is None else f"from {low} to {high}"
    if not _is_integer(value) or value < low or (high is not None and value > high):
        _refuse(name, f"{what}must be {'an integer ' if not what else ''}{span}{hint}", value)


def _number(name: str, value: object, low: float, high: float) -> None:
    if not _is_number(value) or not low <= value <= high:  # NaN compares false
        _refuse(name, f"must be a number from {low:g} to {high:g}", value)


def _is_integer(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> TypeGuard[float]:
    return _is_integer(value) or isinstance(value, float)


def _refuse(name: str, rule: str, value: object) -> NoReturn:
    raise InvalidRequest(f"{name} {rule}, but is {short_repr(value)}.", param=name)
