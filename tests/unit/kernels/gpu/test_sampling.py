"""Sampling on the device against the oracle: every rule, every path, rows that must not feel their neighbours."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from operator import or_
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lamina_kernels.gpu import sampling_rows
from lamina_kernels.gpu.sampling import SampledRows, sample
from lamina_kernels.gpu.sampling_seats import HEAD, MAX_TOP, MAX_VOCAB, SamplingNeeds, SeatParams, SeatState
from lamina_kernels.gpu.tuned import SAMPLING, SamplingShape
from lamina_kernels.oracles import sampling as oracle

INF = math.inf
SMALL = SamplingShape(chunk=256, num_warps=4, listed=8, small_warps=4)  # several chunks from a small vocabulary
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def make(vocab: int, params: Sequence[SeatParams], **fill: Any) -> tuple[SeatState, SamplingNeeds]:
    state = SeatState.create(len(params), vocab, DEVICE, max_listed=32)
    for seat, each in enumerate(params):
        state.fill(seat, each, **fill)
    return state, reduce(or_, (each.needs for each in params), SamplingNeeds())


def copied(state: SeatState) -> SeatState:
    tensors = (state.fields, state.listed, state.history, state.position, state.last_token)
    return SeatState(*(tensor.cpu().clone() for tensor in tensors))


def seats(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=DEVICE)


def normal(rows: int, vocab: int, seed: int, spread: float = 3.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocab, generator=generator) * spread
    return logits.to(torch.bfloat16).float().to(DEVICE)  # 8 bits: many ties


def run_both(
    logits: Tensor, numbers: Tensor, state: SeatState, needs: SamplingNeeds, shape: SamplingShape
) -> tuple[SampledRows, SampledRows]:
    """Kernels and oracle, each on its own copy of the seats, which must be the same afterwards."""
    other = copied(state)
    wanted = oracle.sample(logits.cpu(), numbers.cpu(), other, needs)
    got = sample(logits, numbers, state, needs, shape=shape)
    assert got.tokens.tolist() == wanted.tokens.tolist()
    assert got.statuses.tolist() == wanted.statuses.tolist()
    for name in ("history", "position", "last_token"):
        assert torch.equal(getattr(state, name).cpu(), getattr(other, name)), name
    return got, wanted


class TestDraws:
    def test_every_rule_alone_and_together(self) -> None:
        """Rows of every path in one batch: greedy, plain, head, both searches; a row without a choice among them."""
        params = [
            SeatParams(temperature=0),
            SeatParams(seed=1),
            SeatParams(seed=2, top_k=5, temperature=2.0),
            SeatParams(seed=3, top_p=0.8),
            SeatParams(seed=4, min_p=0.2),
            SeatParams(seed=5, top_k=HEAD, top_p=0.9, min_p=0.05),
            SeatParams(seed=6, top_k=200, top_p=0.97, temperature=4.0),
            SeatParams(seed=-7, index=3, top_p=0.95, min_p=0.001, temperature=5.0),
            SeatParams(seed=9, min_p=0.01, temperature=10.0),
        ]
        state, needs = make(300, params, position=2**32 + 1)
        run_both(normal(10, 300, 0), seats(3, 1, 2, 0, -1, 4, 5, 7, 8, 6), state, needs, SMALL)

    def test_a_row_feels_neither_its_batch_nor_how_it_is_cut(self) -> None:
        """Bit for bit: alone in one chunk of 4096, and in a batch, at another place, in chunks of 256."""
        params = [
            SeatParams(seed=1, top_p=0.9, temperature=9.0, logprobs=3),
            SeatParams(seed=2, top_k=90, temperature=9.0, logprobs=0),
            SeatParams(seed=3, top_k=20, top_p=0.95, repetition_penalty=1.5),
        ]
        logits = normal(3, 257, 1)
        together, needs = make(257, params, prompt=range(50))
        batch = sample(logits.flip(0).contiguous(), seats(2, 1, 0), together, needs, shape=SMALL)
        for row, each in enumerate(params):
            alone, own = make(257, [each], prompt=range(50))
            one = sample(logits[row : row + 1], seats(0), alone, replace(own, top=needs.top), shape=SAMPLING)
            assert one.tokens.tolist() == batch.tokens[2 - row : 3 - row].tolist()
            assert one.ranks.tolist() == batch.ranks[2 - row : 3 - row].tolist()
            assert one.top_ids.tolist() == batch.top_ids[2 - row : 3 - row].tolist()

    def test_logprobs_do_not_feel_the_batch_to_the_last_bit(self) -> None:
        """The cut is the same here, so even sums of floats are."""
        params = [SeatParams(temperature=0, logprobs=2)] * 3
        logits = normal(3, 270, 2)
        state, needs = make(270, params)
        batch = sample(logits, seats(0, 1, 2), state, needs, shape=SMALL)
        state, _ = make(270, params)
        alone = sample(logits[2:], seats(0), state, needs, shape=SMALL)
        assert alone.logprobs.tolist() == batch.logprobs[2:].tolist()
        assert alone.top_logprobs.tolist() == batch.top_logprobs[2:].tolist()

    @pytest.mark.parametrize("vocab", [1, 3, 63, 64, 65])
    def test_small_vocabularies(self, vocab: int) -> None:
        """Around the size of the head, and with a top_k that filters nothing."""
        params = [SeatParams(seed=5, top_p=0.7, temperature=3.0), SeatParams(seed=6, top_k=vocab), SeatParams(seed=7)]
        state, needs = make(vocab, params)
        run_both(normal(3, vocab, vocab), seats(0, 1, 2), state, needs, SMALL)

    def test_ties_at_the_border_go_to_the_lowest_ids(self) -> None:
        """All logits equal: top_k and top_p keep the first ids, exactly, over chunk borders."""
        params = [SeatParams(seed=1, top_k=130), SeatParams(seed=3, top_p=0.5)]
        state, needs = make(300, params)
        got, _ = run_both(torch.zeros(2, 300, device=DEVICE), seats(0, 1), state, needs, SMALL)
        assert got.tokens[0] < 130
        assert got.tokens[1] < 150

    @pytest.mark.parametrize("fields", [{}, {"top_k": 2}, {"top_p": 0.999999}, {"min_p": 1e-12}])
    def test_extremes_stay_finite(self, fields: dict[str, Any]) -> None:
        """Temperature near 0, and logits whose difference overflows; -inf never comes."""
        rows = torch.tensor([[0.0, 1e-3, 1e-3, -INF], [3e38, -3e38, -INF, 3e38], [-INF, -0.0, -INF, 0.0]])
        params = [SeatParams(seed=seed, temperature=t, **fields) for seed, t in ((3, 1e-30), (4, 1e-9), (5, 1.0))]
        state, needs = make(4, params)
        with np.errstate(over="ignore"):
            got = sample(rows.to(DEVICE), seats(0, 1, 2), state, needs)
        assert got.statuses.tolist() == [0, 0, 0]
        for token, possible in zip(got.tokens.tolist(), ({1, 2}, {0, 3}, {1, 3}), strict=True):
            assert token in possible

    def test_frequencies_follow_the_distribution(self) -> None:
        """Chi-square over 50 seeds below its 1e-4 quantile for 3 degrees of freedom."""
        count, weights = 50, torch.tensor([0.4, 0.1, 0.3, 0.2])
        state, needs = make(4, [SeatParams(seed=seed) for seed in range(count)])
        logits = weights.log().repeat(count, 1).to(DEVICE)
        got = sample(logits, torch.arange(count, dtype=torch.int32, device=DEVICE), state, needs)
        observed = torch.bincount(got.tokens.cpu(), minlength=4)
        assert float(((observed - weights * count) ** 2 / (weights * count)).sum()) < 21.1


class TestEdits:
    PARAMS = (
        SeatParams(temperature=0, repetition_penalty=1.7, bias=((3, 4.5), (140, -2.0))),
        SeatParams(temperature=0, frequency_penalty=0.7, presence_penalty=-0.3),
        SeatParams(temperature=0, forbidden=(0, 9), min_tokens=2, bias=tuple((i, 6.0) for i in range(0, 200, 10))),
        SeatParams(seed=5, presence_penalty=1.3, repetition_penalty=0.6, frequency_penalty=-1.1),
        SeatParams(temperature=0),
    )

    def test_three_steps_on_seats_that_the_device_moves(self) -> None:
        """Counts, positions and the end of min_tokens follow from what was drawn; nothing comes from the host."""
        state, needs = make(200, self.PARAMS, prompt=[3, 5, 150], output_counts=[(5, 2), (9, 1)])
        logits = normal(5, 200, 3, spread=1.0)
        for _ in range(3):
            run_both(logits, seats(0, 1, 2, 3, 4), state, needs, SMALL)
        assert state.position.tolist() == [3] * 5

    def test_edits_are_the_oracles_bits(self) -> None:
        """Each operation rounded to float32, so that ties come out alike."""
        from lamina_kernels.gpu.sampling_edits import edit_logits

        state, _ = make(200, self.PARAMS, prompt=[3, 5, 150], output_counts=[(5, 2), (9, 1), (170, 3)])
        logits = normal(5, 200, 4)
        got = edit_logits(logits, seats(0, 1, 2, 3, 4), state, shape=SMALL).cpu()
        host = copied(state)
        for row in range(5):
            assert torch.equal(got[row], oracle.edited(logits[row].cpu(), row, host))

    def test_a_filled_seat_knows_nothing_of_who_sat_there(self) -> None:
        """History, list and last token are the new choice's."""
        state, _ = make(20, [SeatParams(presence_penalty=1, bias=((1, 1.0),))], output_counts=[(4, 2)], last_token=4)
        state.fill(0, SeatParams(frequency_penalty=1), output_counts=[(6, 1)])
        assert state.history[0].nonzero().flatten().tolist() == [6]
        assert (int(state.position[0]), int(state.last_token[0])) == (0, -1)


class TestBadRows:
    @pytest.mark.parametrize("fields", [{"temperature": 0}, {"top_k": 2, "logprobs": 1}])
    def test_a_row_that_is_not_finite_fails_alone(self, fields: dict[str, Any]) -> None:
        """Its seat stays where it was; its neighbours get what they get without it."""
        bad = [[1.0, math.nan, 0.0], [1.0, INF, 0.0], [-INF] * 3, [-math.nan] * 3]
        logits = torch.tensor([[0.5, 1.5, 1.0], *bad, [2.0, 1.9, 1.8]], device=DEVICE)
        state, needs = make(3, [SeatParams(seed=seed, **fields) for seed in range(6)])
        got, _ = run_both(logits, seats(*range(6)), state, needs, SMALL)
        assert got.statuses.tolist() == [0, *[sampling_rows.NOT_FINITE] * 4, 0]
        assert state.position.tolist() == [1, 0, 0, 0, 0, 1]
        if needs.top >= 0:
            assert got.ranks.tolist()[1:5] == [0] * 4

    def test_a_row_without_an_allowed_token_says_so(self) -> None:
        """The model's own mask and min_tokens leave nothing."""
        params = [SeatParams(temperature=t, forbidden=(1,), min_tokens=1) for t in (0.0, 1.0)]
        state, needs = make(2, params)
        got, _ = run_both(torch.tensor([[-INF, 1.0]] * 2, device=DEVICE), seats(0, 1), state, needs, SMALL)
        assert got.statuses.tolist() == [sampling_rows.ALL_MASKED] * 2

    def test_no_rows_are_fine(self) -> None:
        state, needs = make(7, [SeatParams(logprobs=2)])
        got = sample(torch.zeros(0, 7, device=DEVICE), seats(), state, needs)
        assert (got.tokens.shape, got.top_ids.shape) == ((0,), (0, 2))


class TestLogprobs:
    def test_come_from_the_logits_as_given(self) -> None:
        """Over chunks, with ties, a bias that does not show, more wanted than possible, and a row that does not ask."""
        logits = normal(4, 300, 5)
        logits[2, 7:] = -INF
        params = [
            SeatParams(temperature=0, logprobs=20, bias=((0, 50.0),)),
            SeatParams(seed=3, temperature=30.0, logprobs=5),
            SeatParams(temperature=0, logprobs=20),
            SeatParams(temperature=0),
        ]
        state, needs = make(300, params)
        got, wanted = run_both(logits, seats(0, 1, 2, 3), state, needs, SMALL)
        assert got.ranks.tolist() == wanted.ranks.tolist()
        assert got.top_ids.tolist() == wanted.top_ids.tolist()
        torch.testing.assert_close(got.logprobs.cpu(), wanted.logprobs, atol=1e-4, rtol=0, equal_nan=True)
        torch.testing.assert_close(got.top_logprobs[:3].cpu(), wanted.top_logprobs[:3], atol=1e-4, rtol=0)
        assert got.ranks[3] == 0


class TestArguments:
    def test_what_kernels_cannot_take_is_refused(self) -> None:
        """Types, shapes and layout; nothing is read from the device to find out."""
        state, needs = make(4, [SeatParams()])
        with pytest.raises(TypeError, match="float16"):
            sample(torch.zeros(1, 4, dtype=torch.float16, device=DEVICE), seats(0), state, needs)
        with pytest.raises(TypeError, match="int64"):
            sample(torch.zeros(1, 4, device=DEVICE), torch.zeros(1, dtype=torch.int64, device=DEVICE), state, needs)
        for logits, numbers in (
            (torch.zeros(1, 5), seats(0)),
            (torch.zeros(4), seats(0)),
            (torch.zeros(2, 4), seats(0)),
        ):
            with pytest.raises(ValueError, match="are not"):
                sample(logits.to(DEVICE), numbers, state, needs)
        with pytest.raises(ValueError, match="contiguous"):
            sample(torch.zeros(4, 2, device=DEVICE).T, seats(0, -1), state, needs)
        with pytest.raises(ValueError, match="log-probabilities"):
            sample(torch.zeros(1, 4, device=DEVICE), seats(0), state, SamplingNeeds(top=MAX_TOP + 1))

    @pytest.mark.parametrize(
        ("seat", "params", "complaint"),
        [
            (1, SeatParams(), "seat 1 of 1"),
            (0, SeatParams(bias=tuple((i, 1.0) for i in range(40))), "40 biased"),
            (0, SeatParams(bias=((100, 1.0),)), "outside"),
            (0, SeatParams(forbidden=(-1,)), "outside"),
            (0, SeatParams(logprobs=MAX_TOP + 1), "log-probabilities"),
        ],
    )
    def test_what_a_seat_cannot_hold_is_refused(self, seat: int, params: SeatParams, complaint: str) -> None:
        """Before anything is written."""
        state, _ = make(100, [SeatParams(seed=3)])
        before = copied(state)
        with pytest.raises(ValueError, match=complaint):
            state.fill(seat, params)
        assert torch.equal(before.fields, state.fields.cpu())

    def test_a_history_outside_of_the_vocabulary_is_refused(self) -> None:
        state, _ = make(100, [SeatParams()])
        with pytest.raises(ValueError, match="outside"):
            state.fill(0, SeatParams(presence_penalty=1), output_counts=[(100, 1)])

    def test_a_vocabulary_whose_weights_overflow_is_refused(self) -> None:
        with pytest.raises(ValueError, match="at most"):
            SeatState.create(1, MAX_VOCAB + 1, DEVICE)
