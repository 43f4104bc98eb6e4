"""Sampling on the device: greedy, draws, and every filter, against two reads of the logits."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from chips import Chip
from costs import sampling_work
from gpu_case import noise
from gpu_clock import measure
from gpu_report import Figure, Item
from gpu_scale import Scale
from gpu_setup import DEVICE

__all__ = ["items"]


def items(scale: Scale, chip: Chip) -> Iterator[Item]:
    for rows in scale.rows[:3]:
        yield f"sampling {rows} rows", partial(_sampling, scale, chip, rows)


def _sampling(scale: Scale, chip: Chip, rows: int) -> list[Figure]:
    from lamina_kernels.gpu.sampling import sample
    from lamina_kernels.gpu.sampling_seats import SeatParams, SeatState

    vocab = scale.shape.vocab
    logits = noise(rows, vocab, dtype=torch.float32, scale=3)
    seats = torch.arange(rows, dtype=torch.int32, device=DEVICE)
    ways = {
        "greedy": SeatParams(temperature=0.0),
        "temperature": SeatParams(temperature=0.8),
        "top_k 40 + top_p 0.9": SeatParams(temperature=0.8, top_k=40, top_p=0.9),
        "top_p 0.9": SeatParams(temperature=0.8, top_p=0.9),
        "temperature + 5 logprobs": SeatParams(temperature=0.8, logprobs=5),
    }
    floor, figures = sampling_work(scale.shape, rows).seconds(chip), []
    for name, params in ways.items():
        state = SeatState.create(rows, vocab, DEVICE)
        for seat in range(rows):
            state.fill(seat, params)
        taken = measure(partial(sample, logits, seats, state, params.needs), cold=True)
        figures.append(Figure.of_time(f"sampling, {name}, {rows} x {vocab}", taken, floor))
    return figures
