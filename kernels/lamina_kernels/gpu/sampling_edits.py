"""Logits as the choice's own rules change them: logit_bias, then penalties, then the min_tokens mask.

    y = x + bias;  if seen: y = y / r if y > 0 else y * r;  y -= count * frequency;  y -= presence if count;  or -inf

in float32 and in this order, each operation rounded, so that ties come out as on the host: hence the exact division and
no fused multiply-add. The results go to a copy, because log-probabilities speak of the logits as the model gave them.

Two launches: penalties touch any token, so they stream over the whole row [R, chunks]; bias and mask name few tokens,
which are computed once more, with everything, by [R, blocks of the list]. One launch would let two threads of a program
write one place. Both cost bytes: 12 V a penalized row, 8 V any other.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lamina_kernels.gpu.compile_case import CompileCase
from lamina_kernels.gpu.sampling_seats import (
    FREQUENCY,
    LISTED,
    MIN_TOKENS,
    PENALIZED,
    PRESENCE,
    REPETITION,
    SEAT_STRIDE,
    SeatState,
    as_float,
)
from lamina_kernels.gpu.tuned import SAMPLING, SamplingShape

__all__ = ["compile_cases", "edit_logits"]


@triton.jit
def _penalize(x, seen, repetition, presence, frequency):
    """x float32 after the bias; seen int32 words of `history`, not 0."""
    count = seen >> 1
    y = tl.where(x > 0, tl.div_rn(x, repetition), x * repetition)
    y -= count.to(tl.float32) * frequency
    return y - tl.where(count > 0, presence, 0.0)


@triton.jit
def _stream_kernel(logits, edited, seats, fields, history, V, CHUNK: tl.constexpr):
    """Every token, with penalties but without bias and mask."""
    i_row = tl.program_id(0).to(tl.int64)
    i_seat = tl.load(seats + i_row)
    if i_seat < 0:
        return
    p_seat = fields + i_seat.to(tl.int64) * SEAT_STRIDE
    i_token = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    mask = i_token < V
    b_x = tl.load(logits + i_row * V + i_token, mask=mask, other=0.0)
    if tl.load(p_seat + PENALIZED) != 0:
        b_seen = tl.load(history + i_seat.to(tl.int64) * V + i_token, mask=mask, other=0)
        repetition = as_float(tl.load(p_seat + REPETITION))
        presence = as_float(tl.load(p_seat + PRESENCE))
        frequency = as_float(tl.load(p_seat + FREQUENCY))
        b_x = tl.where(b_seen != 0, _penalize(b_x, b_seen, repetition, presence, frequency), b_x)
    tl.store(edited + i_row * V + i_token, b_x, mask=mask)


@triton.jit
def _listed_kernel(
    logits, edited, seats, fields, listed, history, position, V, MAX_LISTED: tl.constexpr, BLOCK: tl.constexpr
):
    """The tokens of the seat's list, with bias, penalties and mask."""
    i_row = tl.program_id(0).to(tl.int64)
    i_seat = tl.load(seats + i_row).to(tl.int64)
    if i_seat < 0:
        return
    p_seat = fields + i_seat * SEAT_STRIDE
    count = tl.load(p_seat + LISTED)
    first = tl.program_id(1) * BLOCK
    if first >= count:
        return
    i_entry = first + tl.arange(0, BLOCK)
    mask = i_entry < count
    b_entry = tl.load(listed + i_seat * MAX_LISTED + i_entry, mask=mask, other=0)
    i_token = (b_entry & 0xFFFFFFFF) >> 1
    bias = (b_entry >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    b_x = tl.load(logits + i_row * V + i_token, mask=mask, other=0.0) + bias
    if tl.load(p_seat + PENALIZED) != 0:
        b_seen = tl.load(history + i_seat * V + i_token, mask=mask, other=0)
        repetition = as_float(tl.load(p_seat + REPETITION))
        presence = as_float(tl.load(p_seat + PRESENCE))
        frequency = as_float(tl.load(p_seat + FREQUENCY))
        b_x = tl.where(b_seen != 0, _penalize(b_x, b_seen, repetition, presence, frequency), b_x)
    early = tl.load(position + i_seat) < tl.load(p_seat + MIN_TOKENS)
    b_x = tl.where(early & ((b_entry & 1) != 0), float("-inf"), b_x)
    tl.store(edited + i_row * V + i_token, b_x, mask=mask)


def edit_logits(logits: Tensor, seats: Tensor, state: SeatState, *, shape: SamplingShape = SAMPLING) -> Tensor:
    """The edited copy of logits float32 [R, V]; rows whose seat is -1 hold anything. Arguments as in `sample`."""
    rows, vocab = logits.shape
    edited = torch.empty_like(logits)
    _stream_kernel[(rows, shape.chunks(vocab))](
        logits,
        edited,
        seats,
        state.fields,
        state.history,
        vocab,
        CHUNK=shape.chunk,
        num_warps=shape.num_warps,
        enable_fp_fusion=False,
    )
    max_listed = state.listed.shape[1]
    _listed_kernel[(rows, triton.cdiv(max_listed, shape.listed))](
        logits,
        edited,
        seats,
        state.fields,
        state.listed,
        state.history,
        state.position,
        vocab,
        MAX_LISTED=max_listed,
        BLOCK=shape.listed,
        num_warps=shape.small_warps,
        enable_fp_fusion=False,
    )
    return edited


def compile_cases() -> list[CompileCase]:
    """Llama 3's vocabulary."""
    pointers = {"logits": "*fp32", "edited": "*fp32", "seats": "*i32", "fields": "*i64"}
    stream = pointers | {"history": "*i32", "V": "i32", "CHUNK": "constexpr"}
    listed = pointers | {"listed": "*i64", "history": "*i32", "position": "*i64", "V": "i32"}
    return [
        CompileCase(
            name="sampling_edits/stream/fp32",
            kernel=_stream_kernel,
            signature=stream,
            constants={"CHUNK": SAMPLING.chunk},
            divisible=tuple(stream)[:-1],
            num_warps=SAMPLING.num_warps,
        ),
        CompileCase(
            name="sampling_edits/listed/fp32",
            kernel=_listed_kernel,
            signature=listed | {"MAX_LISTED": "constexpr", "BLOCK": "constexpr"},
            constants={"MAX_LISTED": 2048, "BLOCK": SAMPLING.listed},
            divisible=tuple(listed),
            num_warps=SAMPLING.small_warps,
            vector_loads=False,  # it gathers
        ),
    ]
