"""Sampling without a word from the host: from logits to tokens, to the seats' next step, to log-probabilities.

The meaning is the host sampler's (`engine.sampler`), rule by rule: logit_bias, penalties, min_tokens mask; temperature,
top_k, top_p, min_p; then the inverse of the distribution, ids ascending, at the uniform number of (seed, choice,
position). Greedy is the highest logit with the lowest id. A row with NaN, +inf or no finite logit fails alone.

    logits - edits - best, record -+- greedy: done -----------------------------------+- commit - log-probabilities
                                   +- head of 64 -+- decides: done -------------------+
                                                  +- search for the threshold - draw -+

The host knows which seats need what and leaves whole stages out (`SamplingNeeds`); within a stage, rows that do not
need it leave at once. Launches: 3 if all are greedy, +2 for edits, +2 for draws, +3 for filters, +10 for each kind of
search that some seat may need, +3 for log-probabilities (one fewer per head where a row is one chunk).

**How far from the host.** Weights are integers (`sampling_weights`), so every sum is exact and a row's token does not
depend on its batch or on how it is cut. A draw differs from the host's only if the uniform number, or a filter's
border, lies within rounding of a boundary between tokens: about (1e-7 + V * 2^-44) of the total, times the largest
|x - peak| / temperature that carries weight; tests grant 1e-5. Ties and top_k are exact.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lamina_kernels.gpu.sampling_draw import draw
from lamina_kernels.gpu.sampling_edits import edit_logits
from lamina_kernels.gpu.sampling_filters import filter_head
from lamina_kernels.gpu.sampling_logprobs import report_logprobs
from lamina_kernels.gpu.sampling_rows import begin, commit
from lamina_kernels.gpu.sampling_search import search_nucleus, search_top_k
from lamina_kernels.gpu.sampling_seats import MAX_TOP, SamplingNeeds, SeatState
from lamina_kernels.gpu.tuned import SAMPLING, SamplingShape

__all__ = ["SampledRows", "check_arguments", "sample"]


@dataclass(frozen=True, slots=True)
class SampledRows:
    """What a step's rows yielded; on the device. The last four have rows only if `needs.top` >= 0."""

    tokens: Tensor  # [R] int64; -1: none
    statuses: Tensor  # [R] int32: `sampling_rows` OK, NOT_FINITE, ALL_MASKED, or UNUSED for a seat of -1
    logprobs: Tensor  # [R] float32 of the tokens; NaN where nobody asked
    ranks: Tensor  # [R] int32, 1 = most likely; 0 where nobody asked
    top_ids: Tensor  # [R, top] int32, most likely first; -1 behind the last possible token
    top_logprobs: Tensor  # [R, top] float32


def sample(
    logits: Tensor, seats: Tensor, state: SeatState, needs: SamplingNeeds, *, shape: SamplingShape = SAMPLING
) -> SampledRows:
    """One token per row; moves each seat that got one to its next position.

    logits: float32 [R, V], contiguous, not changed. seats: int32 [R]; -1 marks a row without a choice, and no seat may
    come twice. needs: at least the union of the seats' own. Nothing waits for the device and no shape depends on data.
    Raises TypeError for dtypes, ValueError for shapes, layout and devices; what is *in* seats cannot be checked here.
    """
    check_arguments(logits, seats, state, needs)
    rows = logits.shape[0]
    if rows == 0:
        return _nothing(logits.device, max(needs.top, 0))
    edited = edit_logits(logits, seats, state, shape=shape) if needs.edits else logits
    records = begin(logits, edited, seats, state, shape=shape)
    if needs.filters:
        filter_head(edited, seats, state, records, shape=shape)
        if needs.wide_top_k:
            search_top_k(edited, seats, state, records, shape=shape)
        if needs.nucleus:
            search_nucleus(edited, seats, state, records, shape=shape)
    if needs.draws:
        draw(edited, seats, state, records, shape=shape)
    tokens, statuses = commit(records, seats, state)
    if needs.top < 0:
        return SampledRows(tokens, statuses, *_no_logprobs(logits.device, 0))
    return SampledRows(tokens, statuses, *report_logprobs(logits, seats, state, records, needs.top, shape=shape))


def check_arguments(logits: Tensor, seats: Tensor, state: SeatState, needs: SamplingNeeds) -> None:
    """Raises TypeError or ValueError, see `sample`."""
    if logits.dtype != torch.float32 or seats.dtype != torch.int32:
        raise TypeError(f"logits are float32 and seats int32, not {logits.dtype} and {seats.dtype}")
    if logits.dim() != 2 or logits.shape[1] != state.vocab_size or seats.shape != logits.shape[:1]:
        raise ValueError(
            f"logits {tuple(logits.shape)} and seats {tuple(seats.shape)} are not [R, {state.vocab_size}] and [R]"
        )
    if not (logits.is_contiguous() and seats.is_contiguous()):
        raise ValueError("logits and seats must be contiguous")
    if not logits.device == seats.device == state.fields.device:
        raise ValueError(f"logits on {logits.device}, seats on {seats.device}, state on {state.fields.device}")
    if needs.top > MAX_TOP:
        raise ValueError(f"{needs.top} log-probabilities, but at most {MAX_TOP}")


def _nothing(device: torch.device, top: int) -> SampledRows:
    return SampledRows(
        torch.empty(0, dtype=torch.int64, device=device),
        torch.empty(0, dtype=torch.int32, device=device),
        *_no_logprobs(device, top),
    )


def _no_logprobs(device: torch.device, top: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (
        torch.empty(0, dtype=torch.float32, device=device),
        torch.empty(0, dtype=torch.int32, device=device),
        torch.empty(0, top, dtype=torch.int32, device=device),
        torch.empty(0, top, dtype=torch.float32, device=device),
    )
