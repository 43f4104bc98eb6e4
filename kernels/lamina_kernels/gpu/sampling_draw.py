"""The draw from a whole row: the inverse of the distribution over ids, at the row's uniform number.

Kept are tokens with a key above EDGE, the TIES lowest ids at it, and of these what weighs at least min_p. Two launches:
sums per chunk [R, chunks]; then one program a row finds the chunk in which the running sum passes floor(u * total),
reads that chunk once more and finds the token. Sums are integers: the second launch meets exactly what the first one
added, a token without weight is never found, and the result is the same however the row is cut.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lamina_kernels.gpu.compile_case import CompileCase
from lamina_kernels.gpu.sampling_rows import EDGE, OPEN, PEAK, RECORD_STRIDE, TIES, TOKEN, UNIFORM
from lamina_kernels.gpu.sampling_seats import MIN_P, SCALE, SEAT_STRIDE, SeatState, as_float
from lamina_kernels.gpu.sampling_weights import key_float, order_key, share, weigh
from lamina_kernels.gpu.tuned import SAMPLING, SamplingShape

__all__ = ["compile_cases", "draw"]


@triton.jit
def _sum_kernel(edited, seats, fields, records, sums, V, CHUNKS: tl.constexpr, CHUNK: tl.constexpr):
    """sums [R, CHUNKS, 2]: the weight above EDGE, the number of tokens at it."""
    i_row = tl.program_id(0).to(tl.int64)
    p_record = records + i_row * RECORD_STRIDE
    if tl.load(p_record + OPEN) == 0:
        return
    p_seat = fields + tl.load(seats + i_row).to(tl.int64) * SEAT_STRIDE
    i_chunk = tl.program_id(1)
    i_token = i_chunk * CHUNK + tl.arange(0, CHUNK)
    mask = i_token < V
    x = tl.load(edited + i_row * V + i_token, mask=mask, other=float("-inf"))
    w = weigh(x, as_float(tl.load(p_record + PEAK)), as_float(tl.load(p_seat + SCALE)))
    key = order_key(x)
    edge = tl.load(p_record + EDGE).to(tl.uint32)
    kept = (key > edge) & (w >= tl.load(p_seat + MIN_P))
    o_sum = (i_row * CHUNKS + i_chunk) * 2
    tl.store(sums + o_sum, tl.sum(tl.where(kept, w, 0), axis=0))
    tl.store(sums + o_sum + 1, tl.sum((mask & (key == edge)).to(tl.int64), axis=0))


@triton.jit
def _draw_kernel(
    edited, seats, fields, sums, records, V, CHUNKS: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr
):
    i_row = tl.program_id(0).to(tl.int64)
    p_record = records + i_row * RECORD_STRIDE
    if tl.load(p_record + OPEN) == 0:
        return
    p_seat = fields + tl.load(seats + i_row).to(tl.int64) * SEAT_STRIDE
    peak = as_float(tl.load(p_record + PEAK))
    scale = as_float(tl.load(p_seat + SCALE))
    min_p = tl.load(p_seat + MIN_P)
    edge = tl.load(p_record + EDGE).to(tl.uint32)
    ties = tl.load(p_record + TIES)
    w_edge = weigh(key_float(edge), peak, scale)
    w_edge = tl.where((ties > 0) & (w_edge >= min_p), w_edge, 0)

    i_block = tl.arange(0, BLOCK)
    p_sum = sums + (i_row * CHUNKS + i_block) * 2
    above = tl.load(p_sum, mask=i_block < CHUNKS, other=0)
    tied = tl.load(p_sum + 1, mask=i_block < CHUNKS, other=0)
    tied_before = tl.cumsum(tied, axis=0) - tied
    at_edge = tl.minimum(tl.maximum(ties - tied_before, 0), tied)
    weights = above + at_edge * w_edge
    running = tl.cumsum(weights, axis=0)
    target = share(tl.load(p_record + UNIFORM), tl.sum(weights, axis=0))
    i_chunk = tl.min(tl.where(running > target, i_block, CHUNKS - 1), axis=0)
    earlier = i_block < i_chunk
    passed = tl.sum(tl.where(earlier, weights, 0), axis=0)
    used = tl.sum(tl.where(earlier, tied, 0), axis=0)

    i_token = i_chunk * CHUNK + tl.arange(0, CHUNK)
    mask = i_token < V
    x = tl.load(edited + i_row * V + i_token, mask=mask, other=float("-inf"))
    w = weigh(x, peak, scale)
    key = order_key(x)
    tie = mask & (key == edge)
    kept = (key > edge) | (tie & (used + tl.cumsum(tie.to(tl.int32), axis=0) <= ties))
    w = tl.where(kept & (w >= min_p), w, 0)
    found = passed + tl.cumsum(w, axis=0) > target
    tl.store(p_record + TOKEN, tl.min(tl.where(found, i_token, V - 1), axis=0).to(tl.int64))


def draw(edited: Tensor, seats: Tensor, state: SeatState, records: Tensor, *, shape: SamplingShape = SAMPLING) -> None:
    """Sets TOKEN of every row that is still open. Arguments as `sampling_filters.filter_head`'s."""
    rows, vocab = edited.shape
    chunks = shape.chunks(vocab)
    sums = torch.empty(rows, chunks, 2, dtype=torch.int64, device=edited.device)
    _sum_kernel[(rows, chunks)](
        edited,
        seats,
        state.fields,
        records,
        sums,
        vocab,
        CHUNKS=chunks,
        CHUNK=shape.chunk,
        num_warps=shape.num_warps,
    )
    _draw_kernel[(rows,)](
        edited,
        seats,
        state.fields,
        sums,
        records,
        vocab,
        CHUNKS=chunks,
        BLOCK=triton.next_power_of_2(chunks),
        CHUNK=shape.chunk,
        num_warps=shape.num_warps,
    )


def compile_cases() -> list[CompileCase]:
    """Llama 3's vocabulary: 32 chunks."""
    sums = {"edited": "*fp32", "seats": "*i32", "fields": "*i64", "records": "*i64", "sums": "*i64", "V": "i32"}
    draws = {"edited": "*fp32", "seats": "*i32", "fields": "*i64", "sums": "*i64", "records": "*i64", "V": "i32"}
    return [
        CompileCase(
            name="sampling_draw/sum/fp32",
            kernel=_sum_kernel,
            signature=sums | {"CHUNKS": "constexpr", "CHUNK": "constexpr"},
            constants={"CHUNKS": 32, "CHUNK": SAMPLING.chunk},
            divisible=tuple(sums),
            num_warps=SAMPLING.num_warps,
        ),
        CompileCase(
            name="sampling_draw/draw/fp32",
            kernel=_draw_kernel,
            signature=draws | dict.fromkeys(("CHUNKS", "BLOCK", "CHUNK"), "constexpr"),
            constants={"CHUNKS": 32, "BLOCK": 32, "CHUNK": SAMPLING.chunk},
            divisible=tuple(draws),
            num_warps=SAMPLING.num_warps,
        ),
    ]
