"""top_k, top_p and min_p where the HEAD = 64 most likely tokens decide: most rows of a language model.

All three keep a head of the order (logit descending, id ascending):
top_k its first k tokens; top_p the shortest head that weighs floor(top_p * total), total being what top_k has left;
min_p those that weigh min_p * peak's weight. If the tokens beyond the 64th cannot be among them, the row is drawn here,
in one program, from 64 numbers: cumulated weights of 64 x 64 pairs give the nucleus, a running sum in the order of ids
the draw. Else the row stays open for `sampling_search` and `sampling_draw`, which agree to the last bit: all sums are
integers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lamina_kernels.gpu.compile_case import CompileCase
from lamina_kernels.gpu.sampling_head import merge_heads, store_head
from lamina_kernels.gpu.sampling_rows import OPEN, PEAK, RECORD_STRIDE, TOKEN, TOTAL, UNIFORM
from lamina_kernels.gpu.sampling_seats import HEAD, MIN_P, SCALE, SEAT_STRIDE, TOP_K, TOP_P, SeatState, as_float
from lamina_kernels.gpu.sampling_weights import key_float, packed_id, packed_key, share, weigh
from lamina_kernels.gpu.tuned import SAMPLING, SamplingShape

__all__ = ["compile_cases", "filter_head", "nucleus_mass"]


@triton.jit
def nucleus_mass(top_p, total):
    """What the nucleus must weigh: at least 1, so that it holds a token that can be drawn."""
    return tl.maximum(share(top_p, total), 1)


@triton.jit
def _chunk_kernel(
    edited, seats, fields, records, heads, totals, V, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, K: tl.constexpr
):
    i_row = tl.program_id(0).to(tl.int64)
    p_record = records + i_row * RECORD_STRIDE
    if tl.load(p_record + OPEN) == 0:
        return
    p_seat = fields + tl.load(seats + i_row).to(tl.int64) * SEAT_STRIDE
    top_k = tl.load(p_seat + TOP_K)
    if (top_k == 0) & (tl.load(p_seat + TOP_P) == 0) & (tl.load(p_seat + MIN_P) == 0):
        return
    i_chunk = tl.program_id(1)
    i_token = i_chunk * CHUNK + tl.arange(0, CHUNK)
    mask = i_token < V
    x = tl.load(edited + i_row * V + i_token, mask=mask, other=float("-inf"))
    w = weigh(x, as_float(tl.load(p_record + PEAK)), as_float(tl.load(p_seat + SCALE)))
    o_chunk = i_row * CHUNKS + i_chunk
    tl.store(totals + o_chunk, tl.sum(w, axis=0))
    store_head(heads + o_chunk * K, x, i_token, mask, K)


@triton.jit
def _resolve_kernel(seats, fields, heads, totals, records, CHUNKS: tl.constexpr, BLOCK: tl.constexpr, K: tl.constexpr):
    i_row = tl.program_id(0).to(tl.int64)
    p_record = records + i_row * RECORD_STRIDE
    if tl.load(p_record + OPEN) == 0:
        return
    p_seat = fields + tl.load(seats + i_row).to(tl.int64) * SEAT_STRIDE
    top_k = tl.load(p_seat + TOP_K)
    top_p = tl.load(p_seat + TOP_P)
    min_p = tl.load(p_seat + MIN_P)
    if (top_k == 0) & (top_p == 0) & (min_p == 0):
        return
    i_entry = tl.arange(0, K)
    packed = tl.load(heads + i_row * K + i_entry)
    valid = packed >= 0
    x = tl.where(valid, key_float(packed_key(packed)), float("-inf"))
    w = weigh(x, as_float(tl.load(p_record + PEAK)), as_float(tl.load(p_seat + SCALE)))
    before = packed[None, :] > packed[:, None]  # [entry, those before it]; places that are empty come last
    place = tl.sum(before.to(tl.int32), axis=1)
    covered = tl.sum(tl.where(before, w[None, :], 0), axis=1)

    i_chunk = tl.arange(0, BLOCK)
    total = tl.sum(tl.load(totals + i_row * CHUNKS + i_chunk, mask=i_chunk < CHUNKS, other=0), axis=0)
    small = (top_k > 0) & (top_k <= K)
    in_top_k = (top_k == 0) | (place < top_k)
    total = tl.where(small, tl.sum(tl.where(in_top_k, w, 0), axis=0), total)
    tl.store(p_record + TOTAL, total)
    mass = nucleus_mass(top_p, total)
    in_nucleus = (top_p == 0) | (covered < mass)
    last = tl.min(w, axis=0)  # nothing beyond the head weighs more; 0 if there is nothing beyond
    ends = last < min_p
    reaches = (top_p != 0) & (tl.sum(w, axis=0) >= mass)
    if small | ((top_k == 0) & (ends | reaches)) | ((top_k > K) & (top_p == 0) & ends):
        kept = tl.where(valid & in_top_k & in_nucleus & (w >= min_p), w, 0)
        target = share(tl.load(p_record + UNIFORM), tl.sum(kept, axis=0))
        passed = valid & (tl.cumsum(kept, axis=0) > target)
        tl.store(p_record + TOKEN, tl.min(tl.where(passed, packed_id(packed), 0x7FFFFFFF), axis=0))
        tl.store(p_record + OPEN, 0)


def filter_head(
    edited: Tensor, seats: Tensor, state: SeatState, records: Tensor, *, shape: SamplingShape = SAMPLING
) -> None:
    """Draws the rows whose filters end within the head; leaves the others open, with the row's TOTAL in their records.

    edited float32 [R, V], seats int32 [R], records as `sampling_rows.begin` made them.
    """
    rows, vocab = edited.shape
    chunks = shape.chunks(vocab)
    heads = torch.empty(rows, chunks, HEAD, dtype=torch.int64, device=edited.device)
    totals = torch.empty(rows, chunks, dtype=torch.int64, device=edited.device)
    _chunk_kernel[(rows, chunks)](
        edited,
        seats,
        state.fields,
        records,
        heads,
        totals,
        vocab,
        CHUNKS=chunks,
        CHUNK=shape.chunk,
        K=HEAD,
        num_warps=shape.num_warps,
    )
    _resolve_kernel[(rows,)](
        seats,
        state.fields,
        merge_heads(heads, shape=shape),
        totals,
        records,
        CHUNKS=chunks,
        BLOCK=triton.next_power_of_2(chunks),
        K=HEAD,
        num_warps=shape.small_warps,
    )


def compile_cases() -> list[CompileCase]:
    """Llama 3's vocabulary: 32 chunks."""
    chunk = {"edited": "*fp32", "seats": "*i32", "fields": "*i64", "records": "*i64", "heads": "*i64"}
    chunk |= {"totals": "*i64", "V": "i32"}
    resolve = {"seats": "*i32", "fields": "*i64", "heads": "*i64", "totals": "*i64", "records": "*i64"}
    return [
        CompileCase(
            name="sampling_filters/chunk/fp32",
            kernel=_chunk_kernel,
            signature=chunk | dict.fromkeys(("CHUNKS", "CHUNK", "K"), "constexpr"),
            constants={"CHUNKS": 32, "CHUNK": SAMPLING.chunk, "K": HEAD},
            divisible=tuple(chunk),
            num_warps=SAMPLING.num_warps,
        ),
        CompileCase(
            name="sampling_filters/resolve",
            kernel=_resolve_kernel,
            signature=resolve | dict.fromkeys(("CHUNKS", "BLOCK", "K"), "constexpr"),
            constants={"CHUNKS": 32, "BLOCK": 32, "K": HEAD},
            divisible=tuple(resolve),
            num_warps=SAMPLING.small_warps,
            vector_loads=False,  # 64 numbers
        ),
    ]
