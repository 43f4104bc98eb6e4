"""The sampler against a naive float64 oracle, and its independence of the batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from lamina.engine.sampler import Sampler
from lamina.engine.sampling_draw import RowBuffers, draw
from lamina.engine.sampling_filters import nucleus, top_ids, upper_set
from lamina.engine.sampling_random import uniforms
from lamina.engine.sampling_state import SamplingState
from lamina.types import SamplingParams

# ---------------------------------------------------------------------------------------------- the oracle


@dataclass(frozen=True)
class Case:
    """One row: its logits, its parameters and what came before."""

    logits: list[float]
    params: SamplingParams
    seed: int
    index: int
    prompt: tuple[int, ...]
    output: tuple[int, ...]
    eos: frozenset[int]

    def state(self) -> SamplingState:
        made = SamplingState(
            self.params,
            seed=self.seed,
            index=self.index,
            prompt_token_ids=self.prompt,
            eos_token_ids=self.eos,
            vocab_size=len(self.logits),
        )
        for token in self.output:
            made.append(token)
        return made


def edited(case: Case) -> list[float]:
    """Token by token, each operation rounded to float32, so that it also agrees about ties."""
    params, bias = case.params, dict(case.params.logit_bias)
    repetition = rounded(params.repetition_penalty)
    result = []
    for token, raw in enumerate(case.logits):
        logit = rounded(raw + rounded(bias.get(token, 0.0)))
        if token in case.prompt or token in case.output:
            logit = rounded(logit / repetition if logit > 0 else logit * repetition)
        seen = case.output.count(token)
        logit = rounded(logit - rounded(seen * rounded(params.frequency_penalty)))
        logit = rounded(logit - (rounded(params.presence_penalty) if seen else 0.0))
        if len(case.output) < params.min_tokens and token in case.eos.union(params.stop_token_ids):
            logit = -math.inf
        result.append(logit)
    return result


def rounded(value: float) -> float:
    return float(np.float32(value))


def distribution(logits: Sequence[float], params: SamplingParams) -> dict[int, float]:
    """Kept tokens and their unnormalized probabilities."""
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    best = logits[order[0]]
    weights = {token: math.exp((logits[token] - best) / params.temperature) for token in order}
    kept = order[: params.top_k] if params.top_k else order
    if params.top_p < 1:
        total, covered, nuclear = math.fsum(weights[token] for token in kept), 0.0, []
        for token in kept:
            nuclear.append(token)
            covered += weights[token]
            if covered >= params.top_p * total:
                break
        kept = nuclear
    return {token: weights[token] for token in kept if weights[token] >= params.min_p}


def allowed(case: Case, uniform: float) -> set[int]:
    """The tokens that may come at `uniform`.

    It is one, unless float32 rounding may decide: near a border between tokens, or of a filter.
    """
    logits, found = edited(case), set()
    for p_shift in (-2e-6, 0.0, 2e-6):
        for m_shift in (1 - 1e-5, 1.0, 1 + 1e-5):
            params = replace(
                case.params,
                top_p=case.params.top_p + p_shift if case.params.top_p < 1 else 1.0,
                min_p=min(1.0, case.params.min_p * m_shift),
            )
            found |= at(distribution(logits, params), uniform)
    return found


def at(kept: dict[int, float], uniform: float) -> set[int]:
    total, before, found = math.fsum(kept.values()), 0.0, set()
    for token in sorted(kept):
        after = before + kept[token] / total
        if kept[token] > 0 and before - 1e-5 <= uniform < after + 1e-5:
            found.add(token)
        before = after
    return found


# ------------------------------------------------------------------------------------------------- inputs

NUMBERS = st.one_of(
    st.integers(-8, 8).map(float),  # many ties
    st.floats(-30, 30, width=32),
    st.just(-math.inf),
)


@st.composite
def cases(choose: st.DrawFn, sizes: st.SearchStrategy[int], *, greedy: bool) -> Case:
    vocab = choose(sizes)
    ids = st.integers(0, vocab - 1)
    ends = choose(st.sets(ids, max_size=2))
    sometimes = st.booleans()
    params = SamplingParams(
        temperature=0.0 if greedy else choose(st.floats(0.05, 5)),
        top_k=choose(st.integers(0, vocab + 2)) if choose(sometimes) else 0,
        top_p=choose(st.floats(0.001, 0.999)) if choose(sometimes) else 1.0,
        min_p=choose(st.floats(0.001, 1)) if choose(sometimes) else 0.0,
        repetition_penalty=choose(st.floats(0.5, 2)) if choose(sometimes) else 1.0,
        presence_penalty=choose(st.floats(-2, 2)) if choose(sometimes) else 0.0,
        frequency_penalty=choose(st.floats(-2, 2)) if choose(sometimes) else 0.0,
        logit_bias=tuple(choose(st.dictionaries(ids, st.floats(-100, 100), max_size=3)).items()),
        min_tokens=choose(st.integers(0, 4)),
        stop_token_ids=tuple(choose(st.sets(ids, max_size=1))),
        logprobs=choose(st.none() | st.integers(0, 20)),
    )
    return Case(
        logits=choose(rows(vocab)),
        params=params,
        seed=choose(st.integers(-(2**63), 2**64 - 1)),
        index=choose(st.integers(0, 15)),
        prompt=tuple(choose(st.lists(ids, max_size=6))),
        output=tuple(choose(st.lists(ids, max_size=6))),
        eos=frozenset(ends),
    )


@st.composite
def rows(choose: st.DrawFn, vocab: int) -> list[float]:
    """Small rows entry by entry, large ones from a drawn generator, with or without many ties."""
    if vocab <= 12:
        return choose(st.lists(NUMBERS, min_size=vocab, max_size=vocab))
    generator = np.random.default_rng(choose(st.integers(0, 2**32)))
    values = generator.normal(0, choose(st.sampled_from([0.01, 1.0, 4.0])), vocab)
    if choose(st.booleans()):
        values = np.round(values * 4) / 4
    values[generator.integers(0, vocab, choose(st.integers(0, 8)))] += 10
    return [float(value) for value in values.astype(np.float32)]


SMALL = st.integers(1, 12)
MEDIUM = st.integers(13, 700)

# ----------------------------------------------------------------------------------------------- properties


@settings(max_examples=150, deadline=None)
@given(cases(SMALL | MEDIUM, greedy=False))
def test_a_draw_is_the_oracles(case: Case) -> None:
    """Edits, temperature and filters in their order; then the inverse distribution at the uniform."""
    (sampled,) = Sampler().sample(torch.tensor([case.logits]), [case.state()])
    if max(case.logits) == -math.inf or max(edited(case)) == -math.inf:
        assert sampled.failed is not None
        return
    uniform = float(uniforms([case.seed], [case.index], [len(case.output)])[0])
    assert sampled.token_id in allowed(case, uniform)


@settings(max_examples=100, deadline=None)
@given(cases(SMALL | MEDIUM, greedy=True))
def test_greedy_is_the_oracles(case: Case) -> None:
    """The best edited logit, the lowest id among equals."""
    (sampled,) = Sampler().sample(torch.tensor([case.logits]), [case.state()])
    logits = edited(case)
    best = max(logits)
    if max(case.logits) == -math.inf or best == -math.inf:
        assert sampled.failed is not None
    else:
        assert sampled.token_id == logits.index(best)


@settings(max_examples=100, deadline=None)
@given(cases(SMALL | MEDIUM, greedy=False))
def test_logprobs_are_the_oracles(case: Case) -> None:
    """Values, order and rank, from the logits as the model gave them."""
    (sampled,) = Sampler().sample(torch.tensor([case.logits]), [case.state()])
    logprob, count = sampled.logprob, case.params.logprobs
    if count is None or sampled.failed:
        assert logprob is None
        return
    assert logprob is not None
    best = max(case.logits)
    norm = best + math.log(math.fsum(math.exp(logit - best) for logit in case.logits))
    order = sorted(range(len(case.logits)), key=lambda token: (-case.logits[token], token))
    possible = [token for token in order if case.logits[token] > -math.inf]
    assert logprob.token_id == sampled.token_id
    assert logprob.rank == order.index(sampled.token_id) + 1
    assert [token for token, _ in logprob.top] == possible[:count]
    for token, value in [*logprob.top, (sampled.token_id, logprob.logprob)]:
        assert abs(value - (case.logits[token] - norm)) < 1e-4


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_a_row_does_not_feel_its_batch(data: st.DataObject) -> None:
    """Token and logprobs are the same, bit for bit, alone and in any batch, in any order, by any sampler."""
    vocab = data.draw(SMALL | MEDIUM | st.just(9001))
    batch = [
        data.draw(cases(st.just(vocab), greedy=greedy))
        for greedy in data.draw(st.lists(st.booleans(), min_size=1, max_size=6))
    ]
    order = data.draw(st.permutations(range(len(batch))))
    alone = [Sampler().sample(torch.tensor([case.logits]), [case.state()])[0] for case in batch]
    shuffled = Sampler().sample(
        torch.tensor([batch[row].logits for row in order]), [batch[row].state() for row in order]
    )
    assert shuffled == [alone[row] for row in order]


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32), st.integers(257, 3000))
def test_no_rounding_at_a_border_finds_an_impossible_token(generator_seed: int, vocab: int) -> None:
    """Uniforms at and beside each end of a block of the two-level search, with -inf on both sides of it."""
    generator, buffers = np.random.default_rng(generator_seed), RowBuffers(vocab)
    row = generator.normal(0, 4, vocab).astype(np.float32)
    row[0::256] = row[255::256] = row[-1] = -np.inf
    weights = buffers.softmax(row, float(row.max()), 1.0).astype(np.float64)
    ends = np.cumsum(weights)[255::256] / weights.sum()
    for end in [*ends.tolist(), 0.0, 1.0]:
        for uniform in (np.nextafter(end, 0), end, end + 1e-15):
            place = min(float(uniform), 1 - 2.0**-53)
            token = draw(row, float(row.max()), SamplingParams(), place, buffers)
            assert 0 <= token < vocab
            assert row[token] > -np.inf


@st.composite
def ragged(choose: st.DrawFn) -> NDArray[np.float32]:
    """Rows wide enough that every path of the filters is taken, from all-equal to all-distinct."""
    vocab = choose(st.sampled_from([1, 7, 63, 640, 8192, 16_384, 20_011]))
    generator = np.random.default_rng(choose(st.integers(0, 2**32)))
    levels = choose(st.sampled_from([1, 2, 30, 10**6]))
    return generator.integers(-levels, levels + 1, vocab).astype(np.float32) * np.float32(8 / levels)


@settings(max_examples=100, deadline=None)
@given(ragged(), st.integers(1, 2000))
def test_top_ids_are_the_head_of_the_sorted_row(row: NDArray[np.float32], count: int) -> None:
    """Exactly, ties by id, in ascending order of ids; and the upper set contains them."""
    expected = np.sort(np.argsort(-row, kind="stable")[:count])
    assert np.array_equal(top_ids(row, count), expected)
    assert np.isin(expected, upper_set(row, count)).all()


@settings(max_examples=100, deadline=None)
@given(ragged(), st.integers(0, 4), st.floats(0.001, 0.999))
def test_the_nucleus_is_the_shortest_head_that_holds_its_share(
    row: NDArray[np.float32], fall: int, top_p: float
) -> None:
    """Exactly: weights are powers of two, so that sums do not round. From peaked to all-equal."""
    weights = np.exp2(np.floor(row) * fall).astype(np.float32)
    logits = np.floor(row)
    order = np.argsort(-logits, kind="stable")
    covered = np.cumsum(weights[order].astype(np.float64))
    length = int(np.argmax(covered >= top_p * covered[-1])) + 1
    assert np.array_equal(nucleus(logits, weights, top_p), np.sort(order[:length]))
