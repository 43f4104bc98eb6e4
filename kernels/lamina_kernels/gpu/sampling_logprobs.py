"""Log-probability and rank of the token that was chosen, and the most likely alternatives, of the logits as given.

    logprob(t) = x[t] - log sum exp x;   rank(t) = 1 + tokens before t in the order (logit descending, id ascending)

One pass over the row after the choice: each chunk yields its maximum and its sum of exponentials, its K best
(`sampling_head`), and how many of its tokens come before the chosen one; one program a row puts the chunks together, in
the order of the chunks. Chunks depend on the vocabulary alone, so that a row's numbers do not depend on its batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lamina_kernels.gpu.compile_case import CompileCase
from lamina_kernels.gpu.sampling_head import merge_heads, store_head
from lamina_kernels.gpu.sampling_rows import RECORD_STRIDE, STATUS, TOKEN
from lamina_kernels.gpu.sampling_seats import LOGPROBS, SEAT_STRIDE, SeatState
from lamina_kernels.gpu.sampling_weights import key_float, packed_id, packed_key
from lamina_kernels.gpu.tuned import SAMPLING, SamplingShape

__all__ = ["compile_cases", "report_logprobs"]

_NEGATIVE_INFINITY: tl.constexpr = tl.constexpr(float("-inf"))


@triton.jit
def _wanted(p_record, fields, i_seat):
    """Whether the row has a token and its choice wants to know."""
    p_seat = fields + tl.maximum(i_seat, 0).to(tl.int64) * SEAT_STRIDE
    return (i_seat >= 0) & (tl.load(p_record + STATUS) == 0) & (tl.load(p_seat + LOGPROBS) >= 0)


@triton.jit
def _survey_kernel(
    logits,
    seats,
    fields,
    records,
    heads,
    sums,
    ahead,
    V,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    K: tl.constexpr,
):
    i_row = tl.program_id(0).to(tl.int64)
    p_record = records + i_row * RECORD_STRIDE
    if not _wanted(p_record, fields, tl.load(seats + i_row)):
        return
    i_chunk = tl.program_id(1)
    i_token = i_chunk * CHUNK + tl.arange(0, CHUNK)
    mask = i_token < V
    x = tl.load(logits + i_row * V + i_token, mask=mask, other=_NEGATIVE_INFINITY)
    token = tl.load(p_record + TOKEN)
    chosen = tl.load(logits + i_row * V + token)
    before = (x > chosen) | ((x == chosen) & (i_token < token))
    top = tl.max(x, axis=0)
    base = tl.where(top == _NEGATIVE_INFINITY, 0.0, top)  # else -inf - -inf
    o_chunk = i_row * CHUNKS + i_chunk
    tl.store(sums + o_chunk * 2, top)
    tl.store(sums + o_chunk * 2 + 1, tl.sum(tl.exp(x - base), axis=0))
    tl.store(ahead + o_chunk, tl.sum((mask & before).to(tl.int32), axis=0))
    store_head(heads + o_chunk * K, x, i_token, mask, K)


@triton.jit
def _report_kernel(
    logits,
    seats,
    fields,
    records,
    heads,
    sums,
    ahead,
    logprobs,
    ranks,
    top_ids,
    top_logprobs,
    V,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
    K: tl.constexpr,
    TOP: tl.constexpr,
):
    i_row = tl.program_id(0).to(tl.int64)
    p_record = records + i_row * RECORD_STRIDE
    i_entry = tl.arange(0, K)
    o_top = i_row * TOP + i_entry
    if not _wanted(p_record, fields, tl.load(seats + i_row)):
        tl.store(logprobs + i_row, float("nan"))
        tl.store(ranks + i_row, 0)
        tl.store(top_ids + o_top, tl.full([K], -1, tl.int32), mask=i_entry < TOP)
        tl.store(top_logprobs + o_top, tl.full([K], float("-inf"), tl.float32), mask=i_entry < TOP)
        return
    i_chunk = tl.arange(0, BLOCK)
    o_chunk = i_row * CHUNKS + i_chunk
    m_chunk = i_chunk < CHUNKS
    tops = tl.load(sums + o_chunk * 2, mask=m_chunk, other=float("-inf"))
    parts = tl.load(sums + o_chunk * 2 + 1, mask=m_chunk, other=0.0)
    peak = tl.max(tops, axis=0)
    norm = peak + tl.log(tl.sum(parts * tl.exp(tops - peak), axis=0))
    chosen = tl.load(logits + i_row * V + tl.load(p_record + TOKEN))
    tl.store(logprobs + i_row, chosen - norm)
    tl.store(ranks + i_row, 1 + tl.sum(tl.load(ahead + o_chunk, mask=m_chunk, other=0), axis=0))

    packed = tl.load(heads + i_row * K + i_entry)
    valid = packed >= 0
    place = tl.sum((packed[None, :] > packed[:, None]).to(tl.int32), axis=1)
    x = tl.where(valid, key_float(packed_key(packed)), float("-inf"))
    there = x > float("-inf")
    # Empty entries are equal and so share one place: they fill the end of the list in the order in which they lie.
    place += tl.where(valid, 0, tl.cumsum((packed < 0).to(tl.int32), axis=0) - 1)
    p_top = i_row * TOP + place
    tl.store(top_ids + p_top, tl.where(there, packed_id(packed), -1).to(tl.int32), mask=place < TOP)
    tl.store(top_logprobs + p_top, tl.where(there, x - norm, float("-inf")), mask=place < TOP)


def report_logprobs(
    logits: Tensor, seats: Tensor, state: SeatState, records: Tensor, top: int, *, shape: SamplingShape = SAMPLING
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(logprobs float32 [R], ranks int32 [R], top_ids int32 [R, top], top_logprobs float32 [R, top]), most likely
    first.

    logits float32 [R, V] as the model gave them; records after the draw. Rows without a token or a wish for
    log-probabilities have NaN, rank 0 and ids -1; -1 also stands where no possible token is left.
    """
    rows, vocab = logits.shape
    chunks, device = shape.chunks(vocab), logits.device
    head = triton.next_power_of_2(max(top, 1))
    heads = torch.empty(rows, chunks, head, dtype=torch.int64, device=device)
    sums = torch.empty(rows, chunks, 2, dtype=torch.float32, device=device)
    ahead = torch.empty(rows, chunks, dtype=torch.int32, device=device)
    logprobs = torch.empty(rows, dtype=torch.float32, device=device)
    ranks = torch.empty(rows, dtype=torch.int32, device=device)
    top_ids = torch.empty(rows, top, dtype=torch.int32, device=device)
    top_logprobs = torch.empty(rows, top, dtype=torch.float32, device=device)
    _survey_kernel[(rows, chunks)](
        logits,
        seats,
        state.fields,
        records,
        heads,
        sums,
        ahead,
        vocab,
        CHUNKS=chunks,
        CHUNK=shape.chunk,
        K=head,
        num_warps=shape.num_warps,
    )
    _report_kernel[(rows,)](
        logits,
        seats,
        state.fields,
        records,
        merge_heads(heads, shape=shape),
        sums,
        ahead,
        logprobs,
        ranks,
        top_ids,
        top_logprobs,
        vocab,
        CHUNKS=chunks,
        BLOCK=triton.next_power_of_2(chunks),
        K=head,
        TOP=top,
        num_warps=shape.small_warps,
    )
    return logprobs, ranks, top_ids, top_logprobs


def compile_cases() -> list[CompileCase]:
    """Llama 3's vocabulary in 32 chunks, 20 alternatives."""
    common = {"logits": "*fp32", "seats": "*i32", "fields": "*i64", "records": "*i64", "heads": "*i64"}
    common |= {"sums": "*fp32", "ahead": "*i32"}
    results = {"logprobs": "*fp32", "ranks": "*i32", "top_ids": "*i32", "top_logprobs": "*fp32"}
    return [
        CompileCase(
            name="sampling_logprobs/survey/fp32",
            kernel=_survey_kernel,
            signature=common | {"V": "i32"} | dict.fromkeys(("CHUNKS", "CHUNK", "K"), "constexpr"),
            constants={"CHUNKS": 32, "CHUNK": SAMPLING.chunk, "K": 32},
            divisible=(*common, "V"),
            num_warps=SAMPLING.num_warps,
        ),
        CompileCase(
            name="sampling_logprobs/report/fp32",
            kernel=_report_kernel,
            signature=common | results | {"V": "i32"} | dict.fromkeys(("CHUNKS", "BLOCK", "K", "TOP"), "constexpr"),
            constants={"CHUNKS": 32, "BLOCK": 32, "K": 32, "TOP": 20},
            divisible=(*common, *results, "V"),
            num_warps=SAMPLING.small_warps,
            vector_loads=False,  # 32 candidates
        ),
    ]
