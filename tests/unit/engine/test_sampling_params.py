"""`sampling_params.validate`: what is refused, under which name, and what the message says."""

from __future__ import annotations

import math
from typing import Any

import pytest

from lamina.engine.sampling_params import MAX_LOGIT_BIASES, MAX_STOP_TOKENS, validate
from lamina.errors import InvalidRequest
from lamina.types import SamplingParams

VOCAB = 100


def check(**fields: Any) -> None:
    validate(SamplingParams(**fields), vocab_size=VOCAB, max_logprobs=20, max_choices=16)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0},
        {"temperature": 100.0},
        {"temperature": 1e-30},
        {"top_k": 10**9},
        {"top_p": 1e-12},
        {"top_p": 1},
        {"min_p": 0},
        {"min_p": 1.0},
        {"presence_penalty": -2, "frequency_penalty": 2.0},
        {"repetition_penalty": 0.01},
        {"logit_bias": ((0, -100.0), (99, 100))},
        {"logit_bias": tuple((token, 0.0) for token in range(VOCAB))},
        {"seed": -(2**63)},
        {"seed": 2**64 - 1},
        {"logprobs": 0},
        {"logprobs": 20},
        {"n": 16},
        {"max_tokens": 5, "min_tokens": 5},
        {"stop": ("\n",), "stop_token_ids": (0, 99)},
    ],
)
def test_the_ends_of_every_range_are_accepted(fields: dict[str, Any]) -> None:
    """Ranges include their ends, and integers may stand for numbers."""
    check(**fields)


@pytest.mark.parametrize(
    ("param", "value", "said"),
    [
        ("temperature", -0.1, "0 to 100"),
        ("temperature", 100.1, "0 to 100"),
        ("temperature", math.nan, "nan"),
        ("temperature", math.inf, "inf"),
        ("temperature", 10**400, "0 to 100"),
        ("temperature", "hot", "'hot'"),
        ("temperature", True, "True"),
        ("temperature", None, "None"),
        ("top_k", -1, "0 switches it off"),
        ("top_k", 1.5, "integer"),
        ("top_p", 0, "above 0"),
        ("top_p", 1.0001, "0 to 1"),
        ("top_p", math.nan, "nan"),
        ("min_p", -0.1, "0 to 1"),
        ("min_p", math.inf, "0 to 1"),
        ("repetition_penalty", 0, "0.01 to 100"),
        ("repetition_penalty", math.nan, "0.01 to 100"),
        ("presence_penalty", 2.1, "-2 to 2"),
        ("frequency_penalty", -2.1, "-2 to 2"),
        ("seed", 2**64, str(2**64 - 1)),
        ("seed", -(2**63) - 1, str(-(2**63))),
        ("seed", 1.0, "integer"),
        ("n", 0, "1 to 16"),
        ("n", 17, "1 to 16"),
        ("logprobs", 21, "0 to 20"),
        ("logprobs", -1, "0 to 20"),
        ("logprobs", True, "0 to 20"),
        ("max_tokens", 0, "at least 1"),
        ("max_tokens", -5, "at least 1"),
        ("max_tokens", "9", "at least 1"),
        ("min_tokens", -1, "at least 0"),
        ("min_tokens", 17, "max_tokens (16)"),
        ("logit_bias", ((VOCAB, 1.0),), "0 to 99"),
        ("logit_bias", ((-1, 1.0),), "0 to 99"),
        ("logit_bias", ((1, 100.5),), "-100 to 100"),
        ("logit_bias", ((1, -math.inf),), "-100 to 100"),
        ("logit_bias", ((1, math.nan),), "-100 to 100"),
        ("logit_bias", ((1, 1.0), (1, 2.0)), "at most once"),
        ("logit_bias", ((1, 1.0),) * (MAX_LOGIT_BIASES + 1), "at most 1024"),
        ("stop", ("a", ""), "at least 1 character"),
        ("stop", "abc", "list of strings"),
        ("stop", (7,), "list of strings"),
        ("stop_token_ids", (VOCAB,), "0 to 99"),
        ("stop_token_ids", (-1,), "0 to 99"),
        ("stop_token_ids", (1,) * (MAX_STOP_TOKENS + 1), "at most 256"),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(param: str, value: object, said: str) -> None:
    """The error names the parameter and states the limit (or the value that is no number)."""
    with pytest.raises(InvalidRequest) as refused:
        check(**{param: value})
    assert refused.value.param == param
    assert refused.value.message.startswith(param)
    assert said in refused.value.message


def test_a_huge_value_does_not_make_a_huge_message() -> None:
    """What the client sent is quoted, but shortened."""
    with pytest.raises(InvalidRequest) as refused:
        check(temperature="x" * 100_000)
    assert len(refused.value.message) < 200
