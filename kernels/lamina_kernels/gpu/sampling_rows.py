"""From logits to what every later kernel must know of a row: is it sound, what is its best token, where does its draw
fall.

    records [R, RECORD] int64    status, token, whether it is still open, peak, uniform, and the filter's threshold

Two launches: each chunk finds its best (`pack`ed: the highest logit, the lowest id) in the logits as given and as
edited, then one program a row takes the best of the bests. `commit` ends every step: it hands out tokens and moves the
seats on.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lamina_kernels.gpu.compile_case import CompileCase
from lamina_kernels.gpu.sampling_random import uniform_fraction
from lamina_kernels.gpu.sampling_seats import GREEDY, INDEX, PENALIZED, SEAT_STRIDE, SEED, SeatState
from lamina_kernels.gpu.sampling_weights import key_float, order_key, pack, packed_id, packed_key
from lamina_kernels.gpu.tuned import SAMPLING, SamplingShape

__all__ = [
    "ALL_MASKED",
    "NOT_FINITE",
    "OK",
    "RECORD",
    "UNUSED",
    "begin",
    "commit",
    "compile_cases",
]

OK, NOT_FINITE, ALL_MASKED, UNUSED = 0, 1, 2, -1

RECORD = 8
STATUS: tl.constexpr = tl.constexpr(0)
TOKEN: tl.constexpr = tl.constexpr(1)  # -1 until it is drawn
OPEN: tl.constexpr = tl.constexpr(2)  # 1 until it is drawn; 0 from the start if there is nothing to draw
PEAK: tl.constexpr = tl.constexpr(3)  # bits of the highest edited logit
UNIFORM: tl.constexpr = tl.constexpr(4)  # fraction of 2^64
EDGE: tl.constexpr = tl.constexpr(5)  # `order_key`: tokens above it are kept,
TIES: tl.constexpr = tl.constexpr(6)  # and of those at it so many, the lowest ids
TOTAL: tl.constexpr = tl.constexpr(7)  # weight of what top_k has left

RECORD_STRIDE: tl.constexpr = tl.constexpr(RECORD)
_OK: tl.constexpr = tl.constexpr(OK)
_NOT_FINITE: tl.constexpr = tl.constexpr(NOT_FINITE)
_ALL_MASKED: tl.constexpr = tl.constexpr(ALL_MASKED)
_UNUSED: tl.constexpr = tl.constexpr(UNUSED)
_LOWEST_KEY: tl.constexpr = tl.constexpr(0x007FFFFF)  # of -inf
_HIGHEST_KEY: tl.constexpr = tl.constexpr(0xFF800000)  # of +inf
_NAN_KEY: tl.constexpr = tl.constexpr(0xFFFFFFFF)
_ROWS = 64  # of one program of `commit`


@triton.jit
def _best(logits, i_row, i_token, V):
    """The `pack`ed best of a chunk; NaN is better than anything."""
    x = tl.load(logits + i_row * V + i_token, mask=i_token < V, other=float("-inf"))
    key = tl.where(x != x, _NAN_KEY, order_key(x))
    return tl.max(pack(key, i_token), axis=0)


@triton.jit
def _best_kernel(logits, edited, seats, best, V, CHUNKS: tl.constexpr, CHUNK: tl.constexpr):
    i_row = tl.program_id(0).to(tl.int64)
    i_chunk = tl.program_id(1)
    if tl.load(seats + i_row) < 0:
        return
    i_token = i_chunk * CHUNK + tl.arange(0, CHUNK)
    o_best = (i_row * CHUNKS + i_chunk) * 2
    tl.store(best + o_best, _best(logits, i_row, i_token, V))
    tl.store(best + o_best + 1, _best(edited, i_row, i_token, V))


@triton.jit
def _finite(key):
    """Between the keys of -inf and +inf, without them."""
    return (key > _LOWEST_KEY) & (key < _HIGHEST_KEY)


@triton.jit
def _begin_kernel(seats, fields, position, best, records, CHUNKS: tl.constexpr, BLOCK: tl.constexpr):
    i_row = tl.program_id(0).to(tl.int64)
    p_record = records + i_row * RECORD_STRIDE
    i_seat = tl.load(seats + i_row).to(tl.int64)
    if i_seat < 0:
        tl.store(p_record + STATUS, _UNUSED)
        tl.store(p_record + TOKEN, -1)
        tl.store(p_record + OPEN, 0)
        return
    p_seat = fields + i_seat * SEAT_STRIDE
    i_chunk = tl.arange(0, BLOCK)
    p_best = best + (i_row * CHUNKS + i_chunk) * 2
    given = tl.max(tl.load(p_best, mask=i_chunk < CHUNKS, other=0), axis=0)
    edited = tl.max(tl.load(p_best + 1, mask=i_chunk < CHUNKS, other=0), axis=0)
    sound = _finite(packed_key(given))
    possible = _finite(packed_key(edited))
    status = tl.where(sound, tl.where(possible, _OK, _ALL_MASKED), _NOT_FINITE)
    greedy = tl.load(p_seat + GREEDY) != 0
    uniform = uniform_fraction(tl.load(p_seat + SEED), tl.load(p_seat + INDEX), tl.load(position + i_seat))
    tl.store(p_record + STATUS, status)
    tl.store(p_record + TOKEN, tl.where((status == _OK) & greedy, packed_id(edited), -1))
    tl.store(p_record + OPEN, ((status == _OK) & (not greedy)).to(tl.int64))
    tl.store(p_record + PEAK, key_float(packed_key(edited)).to(tl.int32, bitcast=True).to(tl.int64))
    tl.store(p_record + UNIFORM, uniform)
    tl.store(p_record + EDGE, _LOWEST_KEY)  # all that can be drawn lies above it
    tl.store(p_record + TIES, 0)
    tl.store(p_record + TOTAL, 0)


@triton.jit(do_not_specialize=["rows"])
def _commit_kernel(
    records, seats, fields, history, position, last_token, tokens, statuses, rows, V, ROWS: tl.constexpr
):
    i_row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    m_row = i_row < rows
    status = tl.load(records + i_row * RECORD_STRIDE + STATUS, mask=m_row, other=_UNUSED)
    token = tl.load(records + i_row * RECORD_STRIDE + TOKEN, mask=m_row, other=-1)
    tl.store(tokens + i_row, token, mask=m_row)
    tl.store(statuses + i_row, status.to(tl.int32), mask=m_row)
    m_ok = m_row & (status == _OK)
    i_seat = tl.load(seats + i_row, mask=m_ok, other=0).to(tl.int64)
    tl.store(last_token + i_seat, token, mask=m_ok)
    place = tl.load(position + i_seat, mask=m_ok, other=0)
    tl.store(position + i_seat, place + 1, mask=m_ok)
    penalized = tl.load(fields + i_seat * SEAT_STRIDE + PENALIZED, mask=m_ok, other=0) != 0
    p_seen = history + i_seat * V + token
    seen = tl.load(p_seen, mask=m_ok & penalized, other=0)
    tl.store(p_seen, seen + 2, mask=m_ok & penalized)


def begin(
    logits: Tensor, edited: Tensor, seats: Tensor, state: SeatState, *, shape: SamplingShape = SAMPLING
) -> Tensor:
    """The records int64 [R, RECORD] of the rows. logits and edited (may be the same tensor) are float32 [R, V]."""
    rows, vocab = logits.shape
    chunks = shape.chunks(vocab)
    best = torch.empty(rows, chunks, 2, dtype=torch.int64, device=logits.device)
    records = torch.empty(rows, RECORD, dtype=torch.int64, device=logits.device)
    _best_kernel[(rows, chunks)](
        logits, edited, seats, best, vocab, CHUNKS=chunks, CHUNK=shape.chunk, num_warps=shape.num_warps
    )
    _begin_kernel[(rows,)](
        seats,
        state.fields,
        state.position,
        best,
        records,
        CHUNKS=chunks,
        BLOCK=triton.next_power_of_2(chunks),
        num_warps=1,
    )
    return records


def commit(records: Tensor, seats: Tensor, state: SeatState) -> tuple[Tensor, Tensor]:
    """Tokens int64 [R] and statuses int32 [R]; the seats of rows that have a token move on by it."""
    rows = records.shape[0]
    tokens = torch.empty(rows, dtype=torch.int64, device=records.device)
    statuses = torch.empty(rows, dtype=torch.int32, device=records.device)
    _commit_kernel[(triton.cdiv(rows, _ROWS),)](
        records,
        seats,
        state.fields,
        state.history,
        state.position,
        state.last_token,
        tokens,
        statuses,
        rows,
        state.vocab_size,
        ROWS=_ROWS,
        num_warps=2,
    )
    return tokens, statuses


def compile_cases() -> list[CompileCase]:
    """Llama 3's vocabulary: 128 256 tokens in 32 chunks."""
    best = {"logits": "*fp32", "edited": "*fp32", "seats": "*i32", "best": "*i64", "V": "i32"}
    begins = {"seats": "*i32", "fields": "*i64", "position": "*i64", "best": "*i64", "records": "*i64"}
    commits = {"records": "*i64", "seats": "*i32", "fields": "*i64", "history": "*i32", "position": "*i64"}
    commits |= {"last_token": "*i64", "tokens": "*i64", "statuses": "*i32"}
    return [
        CompileCase(
            name="sampling_rows/best/fp32",
            kernel=_best_kernel,
            signature=best | {"CHUNKS": "constexpr", "CHUNK": "constexpr"},
            constants={"CHUNKS": 32, "CHUNK": SAMPLING.chunk},
            divisible=tuple(best),
            num_warps=SAMPLING.num_warps,
        ),
        CompileCase(
            name="sampling_rows/begin",
            kernel=_begin_kernel,
            signature=begins | {"CHUNKS": "constexpr", "BLOCK": "constexpr"},
            constants={"CHUNKS": 32, "BLOCK": 32},
            divisible=tuple(begins),
            num_warps=1,
            vector_loads=False,  # one number a lane
        ),
        CompileCase(
            name="sampling_rows/commit",
            kernel=_commit_kernel,
            signature=commits | {"rows": "i32", "V": "i32", "ROWS": "constexpr"},
            constants={"ROWS": _ROWS},
            divisible=(*commits, "V"),
            num_warps=2,
            vector_loads=False,  # one number a lane
        ),
    ]
