"""Calls of sampling: every rule at once and alone, seats out of order, unused rows, rows that cannot be sampled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from gpu_case import Call, noise
from gpu_setup import DEVICE, ON_GPU
from lamina_kernels.gpu.sampling_seats import SamplingNeeds, SeatParams, SeatState

__all__ = ["calls"]

VOCAB = 5003 if ON_GPU else 131  # the oracle sorts lists
MANY = min(VOCAB // 2, 1000)
RULES = {
    "greedy": SeatParams(temperature=0.0),
    "temperature": SeatParams(temperature=0.7, seed=3),
    "top_k": SeatParams(top_k=5, seed=4),
    "wide top_k": SeatParams(top_k=MANY, seed=5),
    "top_p": SeatParams(top_p=0.9, seed=6),
    "all filters": SeatParams(temperature=1.3, top_k=MANY, top_p=0.8, min_p=0.01, seed=7, index=2),
    "penalties": SeatParams(repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.2, seed=8),
    "bias, forbidden": SeatParams(temperature=0.0, bias=((7, 9.0), (9, -5.0)), forbidden=(7,), min_tokens=3),
    "logprobs": SeatParams(temperature=0.9, seed=10, logprobs=4),
}


def calls(dtype: torch.dtype) -> Iterator[Call]:
    """Logits are float32 whatever the model computes in, so the other types have no calls."""
    if dtype is not torch.float32:
        return
    for name, params in RULES.items() if ON_GPU else ():
        yield _call(name, [params])
    together = RULES if ON_GPU else {name: RULES[name] for name in ("greedy", "all filters", "penalties", "logprobs")}
    yield _call("all in one launch", list(together.values()))


def _call(name: str, rules: Sequence[SeatParams]) -> Call:
    from lamina_kernels.gpu.sampling import sample
    from lamina_kernels.oracles import sampling as oracle

    count = len(rules)
    state = SeatState.create(count + 2, VOCAB, DEVICE)
    needs = SamplingNeeds()
    for seat, params in enumerate(rules):
        state.fill(seat, params, position=seat % 3, last_token=seat, prompt=(1, 2, 5), output_counts=((2, 1), (8, 3)))
        needs |= params.needs
    for seat in (count, count + 1):
        state.fill(seat, SeatParams(seed=seat))
        needs |= SeatParams().needs
    logits = noise(count + 3, VOCAB, dtype=torch.float32, scale=4, seed=count)
    logits[count, 5] = float("nan")
    logits[count + 1] = float("-inf")
    seats = torch.tensor([*reversed(range(count)), count, count + 1, -1], dtype=torch.int32, device=DEVICE)
    return Call(
        name=f"sample/{name}",
        launch=sample,
        oracle=oracle.sample,
        arguments=(logits, seats, state, needs),
        written=(2,),
    )
