"""The device's sampler against the host's: seats, launches, and what a step leaves behind."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from lamina.engine.device_sampler import DeviceSampler
from lamina.engine.sampler import Sampled, Sampler
from lamina.engine.sampling_state import SamplingState
from lamina.types import SamplingParams

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
VOCAB = 90

MIX: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.95, "logprobs": 3, "prompt": [3, 4]},
    {"temperature": 3.0, "top_p": 0.9, "repetition_penalty": 1.4, "prompt": [1, 2, 3]},
    {"min_p": 0.1, "presence_penalty": 1.0, "frequency_penalty": 0.5, "output": [5, 5, 7]},
    {"temperature": 0, "min_tokens": 2, "eos": [1, 80], "logit_bias": ((80, 20.0), (9, 5.0)), "logprobs": 0},
    {"temperature": 1.3},
)


def make(
    *, seed: int = 0, prompt: Sequence[int] = (), output: Sequence[int] = (), eos: Sequence[int] = (), **fields: Any
) -> SamplingState:
    state = SamplingState(
        SamplingParams(**fields),
        seed=seed,
        index=1,
        prompt_token_ids=prompt,
        eos_token_ids=frozenset(eos),
        vocab_size=VOCAB,
    )
    for token in output:
        state.append(token)
    return state


def normal(rows: int, seed: int) -> torch.Tensor:
    logits = torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2
    return logits.to(torch.bfloat16).float()


def check_same(got: Sequence[Sampled], wanted: Sequence[Sampled]) -> None:
    assert [(s.token_id, s.failed) for s in got] == [(s.token_id, s.failed) for s in wanted]
    for one, other in zip(got, wanted, strict=True):
        if other.logprob is None or one.logprob is None:
            assert one.logprob is other.logprob
            continue
        assert (one.logprob.token_id, one.logprob.rank) == (other.logprob.token_id, other.logprob.rank)
        assert [token for token, _ in one.logprob.top] == [token for token, _ in other.logprob.top]
        values = [one.logprob.logprob, *(value for _, value in one.logprob.top)]
        assert values == pytest.approx([other.logprob.logprob, *(v for _, v in other.logprob.top)], abs=1e-4)


def step(device: DeviceSampler, logits: torch.Tensor, states: Sequence[SamplingState]) -> list[Sampled]:
    """Draws on the device; moves the states by what came, as the engine does."""
    sampled = device.launch(logits.to(DEVICE), states).collect()
    for state, outcome in zip(states, sampled, strict=True):
        if outcome.failed is None:
            state.append(outcome.token_id)
    return sampled


def twins(fields: Sequence[dict[str, Any]]) -> tuple[list[SamplingState], list[SamplingState]]:
    one, other = ([make(seed=seed, **rules) for seed, rules in enumerate(fields)] for _ in range(2))
    return one, other


def host_step(logits: torch.Tensor, states: Sequence[SamplingState]) -> list[Sampled]:
    sampled = Sampler().sample(logits.clone(), states)
    for state, outcome in zip(states, sampled, strict=True):
        if outcome.failed is None:
            state.append(outcome.token_id)
    return sampled


def test_gives_what_the_host_gives_step_after_step() -> None:
    """All rules, three steps, the batch changing its order and its members."""
    device, (ours, theirs) = DeviceSampler(8, VOCAB, DEVICE), twins(MIX)
    for number, order in enumerate([(0, 1, 2, 3, 4, 5), (4, 1, 3), (1, 3, 4)]):
        logits = normal(len(order), number)
        wanted = host_step(logits, [theirs[i] for i in order])
        check_same(step(device, logits, [ours[i] for i in order]), wanted)


def test_two_steps_run_before_anybody_looks() -> None:
    """The second step's inputs are read on the device; both are what the host would have drawn."""
    device, (ours, theirs) = DeviceSampler(4, VOCAB, DEVICE), twins(MIX[:4])
    steps = [normal(4, number) for number in range(2)]
    pending = [device.launch(logits.to(DEVICE), ours) for logits in steps]
    placeholders = torch.tensor([device.placeholder(state) for state in ours], device=DEVICE)
    inputs = device.feed(placeholders)
    for launched, logits in zip(pending, steps, strict=True):
        wanted = host_step(logits, theirs)
        check_same(launched.collect(), wanted)
    assert inputs.tolist() == [sampled.token_id for sampled in wanted]


def test_feeding_leaves_known_tokens_alone() -> None:
    device, state = DeviceSampler(2, VOCAB, DEVICE), make(temperature=0)
    (drawn,) = step(device, normal(1, 4), [state])
    hole = device.placeholder(state)
    assert hole < 0
    assert device.feed(torch.tensor([7, hole, 0, 89], device=DEVICE)).tolist() == [7, drawn.token_id, 0, 89]


def test_who_left_may_come_back() -> None:
    """A preempted choice takes any free seat and goes on where its state is; its old seat is another's by then."""
    device, ((ours, other), (theirs, _)) = DeviceSampler(1, VOCAB, DEVICE), twins(MIX[2:4])
    check_same(step(device, normal(1, 1), [ours]), host_step(normal(1, 1), [theirs]))
    device.leave(ours)
    step(device, normal(1, 2), [other])
    device.leave(other)
    device.leave(other)  # who has no seat leaves nothing
    check_same(step(device, normal(1, 3), [ours]), host_step(normal(1, 3), [theirs]))


def test_a_row_that_fails_fails_alone_with_the_hosts_words() -> None:
    """Not finite, or nothing allowed; and the engine can go on reading placeholders."""
    device = DeviceSampler(4, VOCAB, DEVICE)
    states = [make(seed=1), make(temperature=0), make(temperature=0, min_tokens=1, eos=[0])]
    logits = normal(3, 2)
    logits[1, 5] = math.nan
    logits[2, 1:] = -math.inf
    wanted = Sampler().sample(logits.clone(), states)
    assert [sampled.failed is None for sampled in wanted] == [True, False, False]
    check_same(device.launch(logits.to(DEVICE), states).collect(), wanted)
    holes = torch.tensor([device.placeholder(state) for state in states], device=DEVICE)
    assert device.feed(holes).tolist() == [wanted[0].token_id, 0, 0]


def test_layout_and_type_of_the_logits_do_not_matter() -> None:
    """Half precision, strided, requiring grad, made in inference mode."""
    values = normal(2, 3).to(DEVICE)
    with torch.inference_mode():
        inference = values.clone()
    variants = [values, values.bfloat16(), values.T.clone().T, values.clone().requires_grad_(), inference]
    device, states = DeviceSampler(2, VOCAB, DEVICE), [make(temperature=0), make(temperature=0)]
    drawn = [device.launch(variant, states).collect() for variant in variants]
    assert all(outcome == drawn[0] for outcome in drawn)


def test_mistakes_are_refused() -> None:
    """Shapes, a state twice, no seat left, and what no seat can hold: which leaves the seat free."""
    device, state = DeviceSampler(1, VOCAB, DEVICE), make(temperature=0)
    with pytest.raises(ValueError, match="2 states"):
        device.launch(torch.zeros(1, VOCAB, device=DEVICE), [state, state])
    with pytest.raises(ValueError, match="90 tokens"):
        device.launch(torch.zeros(1, 5, device=DEVICE), [state])
    with pytest.raises(ValueError, match="twice"):
        device.launch(torch.zeros(2, VOCAB, device=DEVICE), [state, state])
    with pytest.raises(ValueError, match="log-probabilities"):
        device.launch(torch.zeros(1, VOCAB, device=DEVICE), [make(logprobs=65)])
    device.launch(torch.zeros(1, VOCAB, device=DEVICE), [state])
    with pytest.raises(ValueError, match="taken"):
        device.launch(torch.zeros(1, VOCAB, device=DEVICE), [make()])


def test_no_rows_are_fine() -> None:
    assert DeviceSampler(1, VOCAB, DEVICE).launch(torch.zeros(0, VOCAB, device=DEVICE), []).collect() == []
