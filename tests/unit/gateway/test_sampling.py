"""Bodies become sampling parameters, within limits that the error names."""

from __future__ import annotations

from typing import Any

import pytest

from lamina.config import GatewayConfig
from lamina.engine.testing import InMemoryEngine
from lamina.errors import ContextLengthExceeded, InvalidRequest
from lamina.gateway.sampling import completion_budget, sampling_params
from lamina.gateway.schemas.completions import CompletionRequest
from lamina.types import SamplingParams

INFO = InMemoryEngine(max_context=100, vocab_size=257).info
CONFIG = GatewayConfig(default_max_tokens=32, max_choices=4, max_stop_strings=2)


def params(max_tokens: int = 16, **body: Any) -> SamplingParams:
    request = CompletionRequest.model_validate({"model": "m", "prompt": "p", **body})
    return sampling_params(request, CONFIG, INFO, max_tokens=max_tokens, logprobs=None)


def test_an_empty_body_gives_the_defaults() -> None:
    """OpenAI's defaults are the vocabulary's."""
    assert params() == SamplingParams()


def test_nulls_mean_the_defaults() -> None:
    names = ("temperature", "top_p", "n", "stop", "seed", "logit_bias", "top_k", "min_p", "stop_token_ids")
    assert params(**dict.fromkeys(names)) == SamplingParams()


def test_everything_arrives() -> None:
    wanted = {
        "min_tokens": 2, "temperature": 0.5, "top_k": 40, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.1,
        "presence_penalty": 0.5, "frequency_penalty": -0.5, "seed": 7, "n": 3, "ignore_eos": True,
    }  # fmt: skip
    got = params(stop=["a", "b"], stop_token_ids=[5], logit_bias={"9": -100, "2": 1.5}, **wanted)
    assert got == SamplingParams(
        max_tokens=16, stop=("a", "b"), stop_token_ids=(5,), logit_bias=((2, 1.5), (9, -100.0)), **wanted
    )  # type: ignore[arg-type]


def test_spellings_that_clients_use() -> None:
    """A single stop string; -1 for "no top_k"; negative seeds."""
    assert params(stop="x").stop == ("x",)
    assert params(top_k=-1).top_k == 0
    seed = params(seed=-1).seed
    assert seed is not None
    assert seed >= 0
    assert seed != params(seed=1).seed


@pytest.mark.parametrize(
    ("body", "param", "text"),
    [
        ({"n": 5}, "n", "at most 4"),
        ({"stop": ["a", "b", "c"]}, "stop", "at most 2"),
        ({"stop": ["a", ""]}, "stop", "empty string"),
        ({"stop": "x" * 1025}, "stop", "at most 1024"),
        ({"stop_token_ids": [257]}, "stop_token_ids", "ends at 256"),
        ({"stop_token_ids": [-1]}, "stop_token_ids", "ends at 256"),
        ({"logit_bias": {"257": 1}}, "logit_bias", "ends at 256"),
        ({"logit_bias": {"hello": 1}}, "logit_bias", "token ids in decimal"),
        ({"logit_bias": {"²": 1}}, "logit_bias", "token ids in decimal"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias", "token ids in decimal"),
        ({"logit_bias": {"1": 101}}, "logit_bias", "from -100 to 100"),
        ({"min_tokens": 17}, "min_tokens", "exceeds max_tokens (16)"),
    ],
)
def test_limits_are_named(body: dict[str, Any], param: str, text: str) -> None:
    with pytest.raises(InvalidRequest) as info:
        params(**body)
    assert info.value.param == param
    assert text in info.value.message


def budget(wanted: int | None, prompt: int) -> int:
    return completion_budget(wanted, prompt=prompt, info=INFO, config=CONFIG, param="messages")


def test_the_default_is_clipped_to_the_context() -> None:
    assert budget(None, 10) == 32
    assert budget(None, 90) == 10


def test_an_explicit_wish_must_fit() -> None:
    assert budget(90, 10) == 90
    with pytest.raises(ContextLengthExceeded) as info:
        budget(91, 10)
    assert (info.value.limit, info.value.prompt, info.value.completion) == (100, 10, 91)
    assert info.value.param == "max_tokens"


def test_a_prompt_that_fills_the_context_is_refused() -> None:
    """There must be room for one token."""
    assert budget(None, 99) == 1
    with pytest.raises(ContextLengthExceeded) as info:
        budget(None, 100)
    assert info.value.param == "messages"


def test_a_small_block_pool_is_the_context() -> None:
    """What the pool can never hold is refused here, and the default is clipped to it."""
    small = InMemoryEngine(max_context=10_000, block_size=4).info  # 64 blocks
    assert completion_budget(None, prompt=250, info=small, config=CONFIG, param="messages") == 6
    with pytest.raises(ContextLengthExceeded) as info:
        completion_budget(7, prompt=250, info=small, config=CONFIG, param="messages")
    assert info.value.limit == 256
