"""The sampler's rules, one by one, and its handling of bad rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lamina.engine.sampler import Sampled, Sampler
from lamina.engine.sampling_state import SamplingState
from lamina.types import SamplingParams

INF = math.inf


def state(
    vocab: int,
    *,
    seed: int = 0,
    index: int = 0,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    eos: Sequence[int] = (),
    **fields: Any,
) -> SamplingState:
    made = SamplingState(
        SamplingParams(**fields),
        seed=seed,
        index=index,
        prompt_token_ids=prompt,
        eos_token_ids=frozenset(eos),
        vocab_size=vocab,
    )
    for token in output:
        made.append(token)
    return made


def one(row: Sequence[float], **fields: Any) -> Sampled:
    (sampled,) = Sampler().sample(torch.tensor([row]), [state(len(row), **fields)])
    return sampled


def tokens(row: Sequence[float], count: int = 400, **fields: Any) -> set[int]:
    """What `count` seeds yield on the same logits."""
    logits = torch.tensor([row]).repeat(count, 1)
    states = [state(len(row), seed=seed, **fields) for seed in range(count)]
    return {sampled.token_id for sampled in Sampler().sample(logits, states)}


class TestGreedy:
    def test_takes_the_best_token_and_the_lowest_of_equals(self) -> None:
        """Temperature 0, whatever the filters say."""
        assert one([0.0, 3.0, 3.0, 1.0], temperature=0).token_id == 1
        assert one([0.0, 3.0, 3.0, 1.0], temperature=0, top_k=1, top_p=0.1, min_p=1.0).token_id == 1

    def test_sees_bias_penalties_and_masks(self) -> None:
        """Rules that change logits come before the choice."""
        row = [1.0, 2.0, 3.0]
        assert one(row, temperature=0, logit_bias=((0, 5.0),)).token_id == 0
        assert one(row, temperature=0, output=[2], presence_penalty=1.5).token_id == 1
        assert one(row, temperature=0, eos=[2], min_tokens=1).token_id == 1
        assert one(row, temperature=0, eos=[2], min_tokens=1, output=[0]).token_id == 2


class TestEdits:
    def test_repetition_counts_prompt_and_output_and_always_lowers(self) -> None:
        """Positive logits are divided, negative ones multiplied."""
        assert one([2.0, 1.9], temperature=0, prompt=[0], repetition_penalty=1.2).token_id == 1
        assert one([2.0, 1.9], temperature=0, output=[0], repetition_penalty=1.2).token_id == 1
        assert one([-1.0, -1.1], temperature=0, prompt=[0], repetition_penalty=1.2).token_id == 1
        assert one([2.0, 1.9], temperature=0, prompt=[1], repetition_penalty=0.5).token_id == 1

    def test_presence_and_frequency_look_at_output_only(self) -> None:
        """Presence once per token, frequency once per occurrence."""
        row = [2.0, 1.0, 0.0]
        assert one(row, temperature=0, prompt=[0, 0, 0], presence_penalty=2.0).token_id == 0
        assert one(row, temperature=0, prompt=[0, 0, 0], frequency_penalty=2.0).token_id == 0
        assert one(row, temperature=0, output=[0, 0, 0], presence_penalty=0.9).token_id == 0
        assert one(row, temperature=0, output=[0, 0, 0], frequency_penalty=0.4).token_id == 1
        assert one(row, temperature=0, output=[2, 2, 2], frequency_penalty=-1.0).token_id == 2

    def test_repetition_sees_the_biased_logit(self) -> None:
        """Bias first: 1 + 1 = 2, halved to 1, which loses to 1.2; the other order would give 1.5."""
        fields: dict[str, Any] = {"logit_bias": ((0, 1.0),), "repetition_penalty": 2.0, "prompt": [0]}
        assert one([1.0, 1.2], temperature=0, **fields).token_id == 1

    def test_no_bias_beats_the_mask(self) -> None:
        """A forbidden token stays forbidden."""
        row = [0.0, 0.0, 0.0]
        assert one(row, temperature=0, eos=[1], min_tokens=3, logit_bias=((1, 100.0),)).token_id == 0
        assert tokens(row, eos=[1], min_tokens=3, ignore_eos=True, logit_bias=((1, 100.0),)) == {0, 2}

    def test_rows_do_not_leak_into_each_other(self) -> None:
        """Editing one row leaves its neighbours as they were."""
        logits = torch.tensor([[1.0, 2.0]] * 3)
        states = [
            state(2, temperature=0),
            state(2, temperature=0, logit_bias=((0, 9.0),)),
            state(2, temperature=0),
        ]
        assert [s.token_id for s in Sampler().sample(logits, states)] == [1, 0, 1]


class TestFilters:
    ROW = (math.log(0.4), math.log(0.1), math.log(0.3), math.log(0.2))

    def test_plain_temperature_reaches_every_token(self) -> None:
        """No filter, no loss."""
        assert tokens(self.ROW) == {0, 1, 2, 3}

    def test_top_k(self) -> None:
        """The k most likely; of ties at the border the lowest ids; k beyond the vocabulary is no filter."""
        assert tokens(self.ROW, top_k=2) == {0, 2}
        assert tokens([1.0, 1.0, 1.0, 1.0], top_k=2) == {0, 1}
        assert tokens(self.ROW, top_k=1) == {0}
        assert tokens(self.ROW, top_k=99) == {0, 1, 2, 3}

    def test_top_p_is_the_smallest_set_that_reaches_it(self) -> None:
        """0.4 + 0.3 do not reach 0.75, with 0.2 they do; the most likely token always stays."""
        assert tokens(self.ROW, top_p=0.75) == {0, 2, 3}
        assert tokens(self.ROW, top_p=0.69) == {0, 2}
        assert tokens(self.ROW, top_p=1e-9) == {0}
        assert tokens([0.0] * 10, top_p=0.5) == {0, 1, 2, 3, 4}

    def test_top_p_counts_what_top_k_has_left(self) -> None:
        """After top_k = 2 the shares are 4/7 and 3/7, so 0.5 is reached by the first alone."""
        assert tokens(self.ROW, top_k=2, top_p=0.5) == {0}
        assert tokens(self.ROW, top_p=0.5) == {0, 2}

    def test_min_p_is_relative_to_the_best(self) -> None:
        """0.5 x 0.4 keeps what has at least 0.2 (compared just beside the border)."""
        assert tokens(self.ROW, min_p=0.49) == {0, 2, 3}
        assert tokens(self.ROW, min_p=0.51) == {0, 2}
        assert tokens(self.ROW, min_p=1.0) == {0}
        assert tokens([5.0, 5.0, 4.0], min_p=1.0) == {0, 1}
        assert tokens(self.ROW, top_p=0.95, min_p=0.51) == {0, 2}

    def test_filters_act_on_the_heated_distribution(self) -> None:
        """Temperature 2 flattens 0.4 : 0.1 to 2 : 1, so min_p 0.45 keeps all; temperature 1 does not."""
        assert tokens(self.ROW, temperature=2.0, min_p=0.45) == {0, 1, 2, 3}
        assert tokens(self.ROW, temperature=1.0, min_p=0.45) == {0, 2, 3}

    @pytest.mark.parametrize("fields", [{}, {"top_k": 2}, {"top_p": 0.999999}, {"min_p": 1e-12}])
    def test_extreme_temperatures_stay_finite(self, fields: dict[str, Any]) -> None:
        """Near 0 it is greedy, ties shared; at 100 nearly uniform; huge logits do not overflow."""
        assert tokens([0.0, 1e-3, 1e-3], temperature=1e-30, **fields) == {1, 2}
        assert tokens([3e38, -3e38, 3e38], temperature=1e-9, **fields) == {0, 2}
        if "top_k" not in fields:
            assert tokens([0.0, 1.0, 2.0], temperature=100.0, **fields) == {0, 1, 2}

    @pytest.mark.parametrize("fields", [{}, {"top_k": 3}, {"top_p": 0.999}, {"min_p": 1e-9}])
    def test_a_masked_token_never_comes(self, fields: dict[str, Any]) -> None:
        """-inf means never, even if the filters have room for it."""
        assert tokens([-INF, 0.0, -INF, 0.0], **fields) == {1, 3}


class TestRandomness:
    def test_the_same_place_gives_the_same_token(self) -> None:
        """Sampling does not advance anything: only `append` does."""
        logits, sampler, choice = torch.zeros(1, 5000), Sampler(), state(5000, seed=3)
        first = [sampler.sample(logits.clone(), [choice])[0].token_id for _ in range(3)]
        assert len(set(first)) == 1
        choice.append(first[0])
        assert sampler.sample(logits.clone(), [choice])[0].token_id != first[0]

    def test_seed_choice_and_position_each_matter(self) -> None:
        """On a flat distribution over 50 000 tokens, 8 places all differ."""
        vocab = 50_000
        states = [
            *(state(vocab, seed=seed) for seed in (0, 1, -1, 2**63, 2**32)),
            state(vocab, index=1),
            state(vocab, output=[0]),
            state(vocab, output=[0, 0]),
        ]
        sampled = Sampler().sample(torch.zeros(len(states), vocab), states)
        assert len({s.token_id for s in sampled}) == len(states)

    @pytest.mark.parametrize(
        ("fields", "expected"),
        [
            ({}, [0.4, 0.1, 0.3, 0.2]),
            ({"temperature": 0.5}, [16 / 30, 1 / 30, 9 / 30, 4 / 30]),
            ({"top_k": 3}, [4 / 9, 0, 3 / 9, 2 / 9]),
            ({"top_p": 0.6}, [4 / 7, 0, 3 / 7, 0]),
            ({"min_p": 0.4}, [4 / 9, 0, 3 / 9, 2 / 9]),
        ],
    )
    def test_frequencies_follow_the_distribution(self, fields: dict[str, Any], expected: list[float]) -> None:
        """Chi-square over 4 000 fixed seeds, below the 1e-4 quantile for 3 degrees of freedom."""
        count = 4_000
        logits = torch.tensor([TestFilters.ROW]).repeat(count, 1)
        sampled = Sampler().sample(logits, [state(4, seed=seed, **fields) for seed in range(count)])
        observed = np.bincount([s.token_id for s in sampled], minlength=4)
        wanted = np.array(expected) * count
        assert (observed[wanted == 0] == 0).all()
        keep = wanted > 0
        assert ((observed[keep] - wanted[keep]) ** 2 / wanted[keep]).sum() < 21.1

    def test_a_large_vocabulary_is_drawn_from_evenly(self) -> None:
        """The two-level search favours no block: 5 000 draws over 1 001 tokens, then in tenths."""
        count, vocab = 5_000, 1_001
        sampled = Sampler().sample(torch.zeros(count, vocab), [state(vocab, seed=s) for s in range(count)])
        observed = np.bincount([s.token_id * 10 // vocab for s in sampled], minlength=10)
        assert ((observed - count / 10) ** 2 / (count / 10)).sum() < 33.7  # 9 degrees of freedom, 1e-4


class TestLogprobs:
    def test_come_from_the_unmodified_distribution(self) -> None:
        """Bias, temperature and filters choose the token; they do not change what is reported."""
        row = [1.0, 2.0, 3.0, -INF]
        expected = torch.tensor(row).log_softmax(-1).tolist()
        sampled = one(row, temperature=0.3, logit_bias=((0, 100.0),), top_k=1, logprobs=20)
        assert sampled.token_id == 0
        assert sampled.logprob is not None
        assert sampled.logprob.token_id == 0
        assert sampled.logprob.rank == 3
        assert sampled.logprob.logprob == pytest.approx(expected[0], abs=1e-6)
        assert [token for token, _ in sampled.logprob.top] == [2, 1, 0]  # never what cannot come
        assert [value for _, value in sampled.logprob.top] == pytest.approx([expected[i] for i in (2, 1, 0)])

    def test_zero_asks_for_the_chosen_token_only(self) -> None:
        """None asks for nothing, 0 for the chosen token without alternatives."""
        assert one([1.0, 2.0], temperature=0).logprob is None
        logprob = one([1.0, 2.0], temperature=0, logprobs=0).logprob
        assert logprob is not None
        assert logprob.top == ()
        assert logprob.rank == 1

    def test_rank_and_list_share_one_order(self) -> None:
        """Ties are listed and ranked by id, so a token of rank r is the r-th of the list."""
        for seed in range(20):
            logprob = one([1.0, 1.0, 1.0, 1.0], seed=seed, logprobs=4).logprob
            assert logprob is not None
            assert logprob.top[logprob.rank - 1] == (logprob.token_id, logprob.logprob)


class TestBadRows:
    @pytest.mark.parametrize("fields", [{"temperature": 0}, {}, {"top_k": 2}, {"top_p": 0.5}, {"logprobs": 2}])
    @pytest.mark.parametrize("bad", [[1.0, math.nan, 0.0], [1.0, INF, 0.0], [-INF] * 3, [math.nan] * 3])
    def test_a_row_that_is_not_finite_fails_alone(self, bad: list[float], fields: dict[str, Any]) -> None:
        """The neighbours get the tokens that they get without it."""
        good = [[0.5, 1.5, 1.0], [2.0, 1.9, 1.8]]
        alone = Sampler().sample(torch.tensor(good), [state(3, seed=s, **fields) for s in (1, 2)])
        mixed = Sampler().sample(torch.tensor([good[0], bad, good[1]]), [state(3, seed=s, **fields) for s in (1, 9, 2)])
        assert [mixed[0], mixed[2]] == alone
        assert mixed[1].token_id == -1
        assert mixed[1].logprob is None
        assert mixed[1].failed is not None
        assert "not finite" in mixed[1].failed

    def test_nan_under_a_mask_is_still_a_failure(self) -> None:
        """A model that returns NaN is broken, even where the NaN would be hidden."""
        assert one([1.0, math.nan, 0.0], temperature=0, eos=[1], min_tokens=1).failed is not None

    def test_a_row_without_an_allowed_token_fails_with_its_reason(self) -> None:
        """The model's own mask and min_tokens may leave nothing."""
        for temperature in (0.0, 1.0):
            sampled = one([-INF, 1.0], temperature=temperature, eos=[1], min_tokens=1)
            assert sampled.token_id == -1
            assert sampled.failed is not None
            assert "min_tokens" in sampled.failed

    def test_shapes_that_do_not_match_are_a_mistake(self) -> None:
        """Rows against states, and columns against the states' vocabulary."""
        with pytest.raises(ValueError, match="2 states"):
            Sampler().sample(torch.zeros(1, 3), [state(3), state(3)])
        with pytest.raises(ValueError, match="4 tokens"):
            Sampler().sample(torch.zeros(1, 3), [state(4)])

    def test_no_rows_are_fine(self) -> None:
        """A step may finish no token."""
        assert Sampler().sample(torch.zeros(0, 7), []) == []


class TestInputs:
    @pytest.mark.parametrize("fields", [{"temperature": 0}, {"logprobs": 3, "logit_bias": ((0, 1.0),)}])
    def test_layout_type_and_mode_of_the_tensor_do_not_matter(self, fields: dict[str, Any]) -> None:
        """Strided, half precision, requiring grad, or made in inference mode: the same tokens."""
        values = torch.tensor([[0.5, 1.5, 1.0, 4.0], [2.0, 1.0, 0.25, -1.0]])
        with torch.inference_mode():
            inference = values.clone()
        variants: list[Tensor] = [
            values.clone(),
            values.T.clone().T,
            values.to(torch.bfloat16),
            values.clone().requires_grad_(),
            inference,
        ]
        states = [state(4, seed=seed, **fields) for seed in (1, 2)]
        sampler = Sampler()
        results = [sampler.sample(variant, states) for variant in variants]
        with torch.inference_mode():
            results.append(sampler.sample(values.clone(), states))
        assert all(result == results[0] for result in results)

    def test_one_sampler_serves_vocabularies_of_different_sizes(self) -> None:
        """Its scratch memory follows."""
        sampler = Sampler()
        for vocab in (300, 5, 1, 700):
            (sampled,) = sampler.sample(torch.zeros(1, vocab), [state(vocab, logprobs=1)])
            assert 0 <= sampled.token_id < vocab
