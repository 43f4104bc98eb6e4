"""top_k and top_p where the head does not decide: the exact threshold in a row of any shape.

Wanted is the highest key T of which tokens at or above it measure a goal: k tokens (top_k), or the nucleus' weight
(top_p). The 32 bits of T are found four at a time. A pass adds up, per chunk, the count and the weight of the tokens
whose key begins with the digits found so far, by their next digit; the next pass begins by reading those sums, from the
highest digit down, until the goal is reached. After eight passes T is known, and how much lies above it; all tokens at
T weigh the same, so the number of them to keep follows by division, and the lowest ids are kept when the row is drawn.

Passes are launches [R, chunks]: even one row spreads over many multiprocessors. A row that needs no search leaves at
once. Sums are integers, so that the cut of the row cannot move T. State per row: [prefix, count above, weight above,
goal], read from one buffer and written, by the first chunk's program, into the other.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lamina_kernels.gpu.compile_case import CompileCase
from lamina_kernels.gpu.sampling_filters import nucleus_mass
from lamina_kernels.gpu.sampling_rows import EDGE, OPEN, PEAK, RECORD_STRIDE, TIES, TOTAL
from lamina_kernels.gpu.sampling_seats import HEAD, SCALE, SEAT_STRIDE, TOP_K, TOP_P, SeatState, as_float
from lamina_kernels.gpu.sampling_weights import key_float, order_key, weigh
from lamina_kernels.gpu.tuned import SAMPLING, SamplingShape

__all__ = ["compile_cases", "search_nucleus", "search_top_k"]

_STATE = 4  # prefix, count above, weight above, goal (0: nothing to search)
_PASSES = 8
_DIGITS: tl.constexpr = tl.constexpr(16)
_HEAD: tl.constexpr = tl.constexpr(HEAD)
_WIDTH: tl.constexpr = tl.constexpr(_STATE)


@triton.jit
def _aim_kernel(seats, fields, records, state, COUNT: tl.constexpr):
    i_row = tl.program_id(0).to(tl.int64)
    p_record = records + i_row * RECORD_STRIDE
    goal = tl.full([], 0, tl.int64)
    if tl.load(p_record + OPEN) != 0:
        p_seat = fields + tl.load(seats + i_row).to(tl.int64) * SEAT_STRIDE
        top_k = tl.load(p_seat + TOP_K)
        top_p = tl.load(p_seat + TOP_P)
        if COUNT:
            goal = tl.where(top_k > _HEAD, top_k, 0)
        else:
            goal = tl.where(top_p != 0, nucleus_mass(top_p, tl.load(p_record + TOTAL)), 0)
    p_state = state + i_row * _WIDTH
    tl.store(p_state, tl.full([], 0, tl.int64))
    tl.store(p_state + 1, tl.full([], 0, tl.int64))
    tl.store(p_state + 2, tl.full([], 0, tl.int64))
    tl.store(p_state + 3, goal)


@triton.jit
def _descend(p_state, p_sums, COUNT: tl.constexpr, CHUNKS: tl.constexpr, BLOCK: tl.constexpr):
    """One more digit. p_sums: [CHUNKS, 2, 16]. Returns prefix, count above, weight above."""
    i_digit = tl.arange(0, _DIGITS)
    i_chunk = tl.arange(0, BLOCK)
    p_count = p_sums + i_chunk[:, None] * (2 * _DIGITS) + i_digit[None, :]
    m_chunk = i_chunk[:, None] < CHUNKS
    counts = tl.sum(tl.load(p_count, mask=m_chunk, other=0), axis=0)
    weights = tl.sum(tl.load(p_count + _DIGITS, mask=m_chunk, other=0), axis=0)
    prefix = tl.load(p_state)
    above_count = tl.load(p_state + 1)
    above_weight = tl.load(p_state + 2)
    goal = tl.load(p_state + 3)
    if COUNT:
        measure = counts
        above = above_count
    else:
        measure = weights
        above = above_weight
    reach = above + tl.sum(tl.where(i_digit[None, :] >= i_digit[:, None], measure[None, :], 0), axis=1)
    digit = tl.max(tl.where(reach >= goal, i_digit, 0), axis=0)
    above_count += tl.sum(tl.where(i_digit > digit, counts, 0), axis=0)
    above_weight += tl.sum(tl.where(i_digit > digit, weights, 0), axis=0)
    return prefix * _DIGITS + digit, above_count, above_weight


@triton.jit(do_not_specialize=["shift"])
def _narrow_kernel(
    edited,
    seats,
    fields,
    records,
    state_in,
    sums_in,
    state_out,
    sums_out,
    shift,
    V,
    FIRST: tl.constexpr,
    COUNT: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    i_row = tl.program_id(0).to(tl.int64)
    p_record = records + i_row * RECORD_STRIDE
    i_chunk = tl.program_id(1)
    p_state = state_in + i_row * _WIDTH
    goal = tl.load(p_state + 3)
    if i_chunk == 0:
        tl.store(state_out + i_row * _WIDTH + 3, goal)
    if goal == 0:
        return
    if FIRST:
        prefix = tl.load(p_state)
        above_count = tl.load(p_state + 1)
        above_weight = tl.load(p_state + 2)
    else:
        prefix, above_count, above_weight = _descend(
            p_state, sums_in + i_row * (CHUNKS * 2 * _DIGITS), COUNT, CHUNKS, BLOCK
        )
    if i_chunk == 0:
        tl.store(state_out + i_row * _WIDTH, prefix)
        tl.store(state_out + i_row * _WIDTH + 1, above_count)
        tl.store(state_out + i_row * _WIDTH + 2, above_weight)
    p_seat = fields + tl.load(seats + i_row).to(tl.int64) * SEAT_STRIDE
    i_token = i_chunk * CHUNK + tl.arange(0, CHUNK)
    mask = i_token < V
    x = tl.load(edited + i_row * V + i_token, mask=mask, other=float("-inf"))
    found = order_key(x) >> shift.to(tl.uint32)
    match = mask & ((found >> 4) == prefix.to(tl.uint32))
    digit = tl.where(match, (found & 15).to(tl.int32), -1)
    i_digit = tl.arange(0, _DIGITS)
    counts = tl.zeros([_DIGITS], tl.int64)
    weights = tl.zeros([_DIGITS], tl.int64)
    if tl.max(digit, axis=0) >= 0:
        w = weigh(x, as_float(tl.load(p_record + PEAK)), as_float(tl.load(p_seat + SCALE)))
        for i in range(_DIGITS):
            count = tl.sum((digit == i).to(tl.int32), axis=0)
            if count > 0:  # after the first passes most digits are empty
                counts += tl.where(i_digit == i, count, 0)
                weights += tl.where(i_digit == i, tl.sum(tl.where(digit == i, w, 0), axis=0), 0)
    p_sums = sums_out + (i_row * CHUNKS + i_chunk) * (2 * _DIGITS) + i_digit
    tl.store(p_sums, counts)
    tl.store(p_sums + _DIGITS, weights)


@triton.jit
def _finish_kernel(seats, fields, records, state, sums, COUNT: tl.constexpr, CHUNKS: tl.constexpr, BLOCK: tl.constexpr):
    i_row = tl.program_id(0).to(tl.int64)
    p_record = records + i_row * RECORD_STRIDE
    p_state = state + i_row * _WIDTH
    goal = tl.load(p_state + 3)
    if goal == 0:
        return
    edge, above_count, above_weight = _descend(p_state, sums + i_row * (CHUNKS * 2 * _DIGITS), COUNT, CHUNKS, BLOCK)
    p_seat = fields + tl.load(seats + i_row).to(tl.int64) * SEAT_STRIDE
    w_edge = weigh(key_float(edge.to(tl.uint32)), as_float(tl.load(p_record + PEAK)), as_float(tl.load(p_seat + SCALE)))
    if COUNT:
        ties = goal - above_count
        tl.store(p_record + TOTAL, above_weight + ties * w_edge)
    else:
        # The edge is where the goal is reached, so it weighs something; 1 guards the division of a row that does not
        # exist.
        unit = tl.maximum(w_edge, 1)
        ties = (goal - above_weight + unit - 1) // unit
    tl.store(p_record + EDGE, edge)
    tl.store(p_record + TIES, ties)


def search_top_k(
    edited: Tensor, seats: Tensor, state: SeatState, records: Tensor, *, shape: SamplingShape = SAMPLING
) -> None:
    """Sets EDGE, TIES and TOTAL of open rows with top_k > HEAD. Arguments as `sampling_filters.filter_head`'s."""
    _search(edited, seats, state, records, shape, count=True)


def search_nucleus(
    edited: Tensor, seats: Tensor, state: SeatState, records: Tensor, *, shape: SamplingShape = SAMPLING
) -> None:
    """Sets EDGE and TIES of open rows with top_p; their TOTAL must be known. A nucleus lies within what top_k left."""
    _search(edited, seats, state, records, shape, count=False)


def _search(
    edited: Tensor, seats: Tensor, state: SeatState, records: Tensor, shape: SamplingShape, *, count: bool
) -> None:
    rows, vocab = edited.shape
    chunks = shape.chunks(vocab)
    block = triton.next_power_of_2(chunks)
    found = torch.empty(2, rows, _STATE, dtype=torch.int64, device=edited.device)
    sums = torch.empty(2, rows, chunks, 2, _DIGITS.value, dtype=torch.int64, device=edited.device)
    _aim_kernel[(rows,)](seats, state.fields, records, found[0], COUNT=count, num_warps=1)
    for i in range(_PASSES):
        old, new = i % 2, (i + 1) % 2
        _narrow_kernel[(rows, chunks)](
            edited,
            seats,
            state.fields,
            records,
            found[old],
            sums[old],
            found[new],
            sums[new],
            28 - 4 * i,
            vocab,
            FIRST=i == 0,
            COUNT=count,
            CHUNKS=chunks,
            BLOCK=block,
            CHUNK=shape.chunk,
            num_warps=shape.num_warps,
        )
    _finish_kernel[(rows,)](
        seats, state.fields, records, found[0], sums[0], COUNT=count, CHUNKS=chunks, BLOCK=block, num_warps=1
    )


def compile_cases() -> list[CompileCase]:
    """Llama 3's vocabulary: 32 chunks. The first pass is the same but for one branch."""
    common = {"seats": "*i32", "fields": "*i64", "records": "*i64"}
    narrow = {"edited": "*fp32"} | common
    narrow |= {"state_in": "*i64", "sums_in": "*i64", "state_out": "*i64", "sums_out": "*i64"}
    cases = []
    for name, count in (("top_k", True), ("nucleus", False)):
        cases.append(
            CompileCase(
                name=f"sampling_search/{name}/narrow/fp32",
                kernel=_narrow_kernel,
                signature=narrow
                | {"shift": "i32", "V": "i32"}
                | dict.fromkeys(("FIRST", "COUNT", "CHUNKS", "BLOCK", "CHUNK"), "constexpr"),
                constants={"FIRST": False, "COUNT": count, "CHUNKS": 32, "BLOCK": 32, "CHUNK": SAMPLING.chunk},
                divisible=(*narrow, "V"),
                num_warps=SAMPLING.num_warps,
            )
        )
        cases.append(
            CompileCase(
                name=f"sampling_search/{name}/aim",
                kernel=_aim_kernel,
                signature=common | {"state": "*i64", "COUNT": "constexpr"},
                constants={"COUNT": count},
                divisible=(*common, "state"),
                num_warps=1,
                vector_loads=False,  # a handful of numbers
            )
        )
        cases.append(
            CompileCase(
                name=f"sampling_search/{name}/finish",
                kernel=_finish_kernel,
                signature=common
                | {"state": "*i64", "sums": "*i64"}
                | dict.fromkeys(("COUNT", "CHUNKS", "BLOCK"), "constexpr"),
                constants={"COUNT": count, "CHUNKS": 32, "BLOCK": 32},
                divisible=(*common, "state", "sums"),
                num_warps=1,
                vector_loads=False,  # sums of 32 chunks
            )
        )
    return cases
