"""What a choice remembers between steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from lamina.engine.sampling_state import SamplingState, TokenHistory
from lamina.errors import InvalidRequest
from lamina.types import SamplingParams


def make(prompt: Sequence[int] = (1, 2), eos: Sequence[int] = (2,), **fields: Any) -> SamplingState:
    return SamplingState(
        SamplingParams(**fields),
        seed=1,
        index=0,
        prompt_token_ids=prompt,
        eos_token_ids=frozenset(eos),
        vocab_size=1000,
    )


def test_history_counts_output_and_only_knows_of_the_prompt() -> None:
    """Prompt tokens are listed with count 0 until they are generated; growth keeps what was there."""
    history = TokenHistory([7, 3, 7, 500], vocab_size=1000)
    for token in [*range(200), 3, 3, 199, 7]:
        history.append(token)
    counts = dict(zip(history.ids.tolist(), history.counts.tolist(), strict=True))
    assert counts == {**dict.fromkeys(range(200), 1), 3: 3, 7: 2, 199: 2, 500: 0}


def test_an_unseen_history_is_empty() -> None:
    """Without prompt and output there is nothing to penalize."""
    history = TokenHistory([], vocab_size=10)
    assert history.ids.size == history.counts.size == 0


@pytest.mark.parametrize("wrong", [-1, 1000])
def test_a_prompt_token_outside_of_the_vocabulary_is_refused(wrong: int) -> None:
    """It would otherwise penalize some other token."""
    with pytest.raises(InvalidRequest, match=f"{wrong} .*0 to 999") as refused:
        make(prompt=[3, wrong], repetition_penalty=1.5)
    assert refused.value.param == "prompt"


@pytest.mark.parametrize("wrong", [-1, 1000])
def test_a_sampled_token_outside_of_the_vocabulary_is_a_mistake(wrong: int) -> None:
    """The failed row's -1 must never be appended."""
    state = make()
    with pytest.raises(ValueError, match="outside of the vocabulary"):
        state.append(wrong)
    assert state.position == 0


def test_end_tokens_are_forbidden_until_min_tokens_are_out() -> None:
    """Every end-of-sequence and stop token, also with ignore_eos; ids without a logit are left out."""
    state = make(eos=(2, 5000), stop_token_ids=(9, 2), min_tokens=2, ignore_eos=True, temperature=0)
    assert state.forbidden is not None
    assert state.forbidden.tolist() == [2, 9]
    assert not state.plain
    state.append(4)
    assert state.forbidden is not None
    state.append(4)
    assert state.forbidden is None
    assert state.plain


def test_min_tokens_without_any_end_token_changes_nothing() -> None:
    """Then there is nothing to forbid and the fast path stays open."""
    assert make(eos=(), min_tokens=5, temperature=0).plain


@pytest.mark.parametrize(
    ("fields", "plain", "edits"),
    [
        ({"temperature": 0}, True, False),
        ({"temperature": 0, "top_k": 5, "top_p": 0.5, "min_p": 0.5}, True, False),
        ({"temperature": 0, "logprobs": 0}, False, False),
        ({"temperature": 0.5}, False, False),
        ({"temperature": 0, "logit_bias": ((1, 1.0),)}, False, True),
        ({"temperature": 0, "repetition_penalty": 1.1}, False, True),
        ({"temperature": 0, "presence_penalty": 0.1}, False, True),
        ({"temperature": 0, "frequency_penalty": -0.1}, False, True),
    ],
)
def test_which_choices_take_the_fast_path(fields: dict[str, Any], plain: bool, edits: bool) -> None:
    """Greedy without logprobs and without a rule that changes logits."""
    state = make(**fields)
    assert (state.plain, state.edits) == (plain, edits)
