"""The device's sampler in the host sampler's place, and by itself: seats, launches, and what a step leaves behind."""

from __future__ import annotations

import gc
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


class TestInTheHostsPlace:
    def test_gives_what_the_host_gives_step_after_step(self) -> None:
        """All rules, three steps, the batch changing its order and its members."""
        device, host = DeviceSampler(8, VOCAB, DEVICE), Sampler()
        states = [make(seed=seed, **fields) for seed, fields in enumerate(MIX)]
        for step, order in enumerate([(0, 1, 2, 3, 4, 5), (4, 1, 3), (1, 3, 4)]):
            some, logits = [states[i] for i in order], normal(len(order), step)
            wanted = host.sample(logits.clone(), some)
            check_same(device.sample(logits.to(DEVICE), some), wanted)
            for state, sampled in zip(some, wanted, strict=True):
                state.append(sampled.token_id)

    def test_asking_twice_or_appending_elsewhere_seats_anew(self) -> None:
        """Sampling alone advances nothing that a caller can see."""
        device, state = DeviceSampler(1, VOCAB, DEVICE), make(seed=3, presence_penalty=2.0)
        logits = normal(1, 7).to(DEVICE)
        first = [device.sample(logits, [state])[0] for _ in range(2)]
        assert first[0] == first[1]
        for token in (first[0].token_id, 11):
            state.append(token)
        check_same(device.sample(logits, [state]), Sampler().sample(logits.clone(), [state]))

    def test_more_states_than_seats_take_turns(self) -> None:
        """In slices, and the seat that was not asked for longest goes to the next state."""
        device, host = DeviceSampler(2, VOCAB, DEVICE), Sampler()
        states = [make(seed=seed, temperature=0.0 if seed == 2 else 1.0) for seed in range(3)]
        for step in range(2):
            logits = normal(3, step)
            wanted = host.sample(logits.clone(), states)
            check_same(device.sample(logits.to(DEVICE), states), wanted)
            for state, sampled in zip(states, wanted, strict=True):
                state.append(sampled.token_id)

    def test_a_state_that_is_gone_is_not_taken_for_another(self) -> None:
        """A new object may get an old one's address only when the seat has let go of it."""
        device, logits = DeviceSampler(2, VOCAB, DEVICE), normal(1, 1).to(DEVICE)
        for seed in range(4):
            state = make(seed=seed, temperature=9.0)
            check_same(device.sample(logits, [state]), Sampler().sample(logits.clone(), [state]))
            del state
            gc.collect()

    def test_a_row_that_fails_fails_alone_with_the_hosts_words(self) -> None:
        """Not finite, or nothing allowed; the seat stays where it was."""
        device = DeviceSampler(4, VOCAB, DEVICE)
        states = [make(seed=1), make(temperature=0), make(temperature=0, min_tokens=1, eos=[0])]
        logits = normal(3, 2)
        logits[1, 5] = math.nan
        logits[2, 1:] = -math.inf
        wanted = Sampler().sample(logits.clone(), states)
        assert [sampled.failed is None for sampled in wanted] == [True, False, False]
        for _ in range(2):
            check_same(device.sample(logits.to(DEVICE), states), wanted)

    def test_layout_and_type_of_the_logits_do_not_matter(self) -> None:
        """Half precision, strided, requiring grad, made in inference mode."""
        device, states = DeviceSampler(2, VOCAB, DEVICE), [make(temperature=0), make(temperature=0)]
        values = normal(2, 3).to(DEVICE)
        with torch.inference_mode():
            inference = values.clone()
        variants = [values.bfloat16(), values.T.clone().T, values.clone().requires_grad_(), inference]
        assert all(device.sample(variant, states) == device.sample(values, states) for variant in variants)

    def test_mistakes_are_refused(self) -> None:
        """Shapes, a state twice, and no seat left for anybody."""
        device, state = DeviceSampler(1, VOCAB, DEVICE), make(temperature=0)
        with pytest.raises(ValueError, match="2 states"):
            device.sample(torch.zeros(1, VOCAB, device=DEVICE), [state, state])
        with pytest.raises(ValueError, match="90 tokens"):
            device.sample(torch.zeros(1, 5, device=DEVICE), [state])
        with pytest.raises(ValueError, match="twice"):
            device.sample(torch.zeros(2, VOCAB, device=DEVICE), [state, state])
        device.seat(state)
        with pytest.raises(ValueError, match="taken"):
            device.sample(torch.zeros(1, VOCAB, device=DEVICE), [make()])

    def test_no_rows_are_fine(self) -> None:
        assert DeviceSampler(1, VOCAB, DEVICE).sample(torch.zeros(0, VOCAB, device=DEVICE), []) == []


class TestSeats:
    def test_two_steps_run_before_anybody_looks(self) -> None:
        """The second step's inputs are read on the device; both are what the host would have drawn."""
        device, host = DeviceSampler(4, VOCAB, DEVICE), Sampler()
        states = [make(seed=seed, **fields) for seed, fields in enumerate(MIX[:4])]
        seats = [device.seat(state) for state in states]
        numbers = torch.tensor(seats, device=DEVICE)
        assert device.last_tokens(numbers).tolist() == [-1] * 4
        steps = [normal(4, step) for step in range(2)]
        pending = [device.launch(logits.to(DEVICE), seats) for logits in steps]
        inputs = device.last_tokens(numbers)
        for launched, logits in zip(pending, steps, strict=True):
            wanted = host.sample(logits.clone(), states)
            check_same(launched.collect(), wanted)
            for state, sampled in zip(states, wanted, strict=True):
                state.append(sampled.token_id)
        assert inputs.tolist() == [sampled.token_id for sampled in wanted]

    def test_rows_without_a_choice_and_seats_left(self) -> None:
        """-1 is no choice; a seat that was left is free for the next, and unknown seats are refused."""
        device = DeviceSampler(1, VOCAB, DEVICE)
        seat = device.seat(make(temperature=0))
        with pytest.raises(ValueError, match="all 1 seats"):
            device.seat(make())
        logits = normal(2, 9)
        (nobody, somebody) = device.launch(logits.to(DEVICE), [-1, seat]).collect()
        assert nobody == Sampled(-1, None)
        assert somebody.token_id == int(logits[1].argmax())
        with pytest.raises(ValueError, match="twice"):
            device.launch(logits.to(DEVICE), [seat, seat])
        device.leave(seat)
        with pytest.raises(ValueError, match="not all taken"):
            device.launch(logits[:1].to(DEVICE), [seat])
        assert device.seat(make(temperature=0)) == seat

    def test_a_seat_that_cannot_be_filled_stays_free(self) -> None:
        device = DeviceSampler(1, VOCAB, DEVICE)
        with pytest.raises(ValueError, match="log-probabilities"):
            device.seat(make(logprobs=65))
        assert device.seat(make()) == 0
