"""The K most likely tokens of a row, exactly, in the order of their ids.

Two launches: each chunk keeps its K best, then one program a row keeps the K best of those. No sort: the K-th key is
found bit by bit (32 counts of keys that reach a trial key), everything above it is kept and, of what equals it, the
lowest ids. Kept tokens move to their places by a running count, so they stay in the order of their ids, which is the
order that the inverse distribution needs; whoever needs the order by logit compares K x K pairs, which is little for
K <= 64.

Entries are `sampling_weights.pack`ed; -1 stands behind the last if a row has fewer than K tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lamina_kernels.gpu.compile_case import CompileCase
from lamina_kernels.gpu.sampling_weights import order_key, pack, packed_key
from lamina_kernels.gpu.tuned import SAMPLING, SamplingShape

__all__ = ["compile_cases", "merge_heads", "store_head"]


@triton.jit
def _kth_key(key, K: tl.constexpr):
    """The largest uint32 that at least K of `key` reach; 0 if there are fewer than K above 0."""
    edge = tl.full([], 0, tl.uint32)
    bit = tl.full([], 0x80000000, tl.uint32)
    for _ in range(32):
        trial = edge | bit
        reached = tl.sum((key >= trial).to(tl.int32), axis=0)
        edge = tl.where(reached >= K, trial, edge)
        bit = bit >> 1
    return edge


@triton.jit
def _store_best(out, key, packed, valid, K: tl.constexpr):
    """key is 0 where not valid; packed in the order of ids. out has room for K."""
    edge = _kth_key(key, K)
    above = key > edge
    tie = valid & (key == edge)
    room = K - tl.sum(above.to(tl.int32), axis=0)
    keep = above | (tie & (tl.cumsum(tie.to(tl.int32), axis=0) <= room))
    count = tl.cumsum(keep.to(tl.int32), axis=0)
    i_slot = tl.arange(0, K)
    tl.store(out + i_slot, tl.full([K], -1, tl.int64), mask=i_slot >= tl.sum(keep.to(tl.int32), axis=0))
    tl.store(out + count - 1, packed, mask=keep)


@triton.jit
def store_head(out, x, i_token, valid, K: tl.constexpr):
    """Writes the K best of a chunk x float32 with ids i_token to out [K] int64."""
    key = tl.where(valid, order_key(x), 0)
    _store_best(out, key, pack(key, i_token), valid, K)


@triton.jit
def _merge_kernel(heads, merged, COUNT: tl.constexpr, BLOCK: tl.constexpr, K: tl.constexpr):
    i_row = tl.program_id(0).to(tl.int64)
    i_entry = tl.arange(0, BLOCK)
    packed = tl.load(heads + i_row * COUNT + i_entry, mask=i_entry < COUNT, other=-1)
    valid = packed >= 0
    key = tl.where(valid, packed_key(packed), 0)
    _store_best(merged + i_row * K, key, packed, valid, K)


def merge_heads(heads: Tensor, *, shape: SamplingShape = SAMPLING) -> Tensor:
    """The best K of heads int64 [R, chunks, K] as int64 [R, K]. Rows of which nothing was written yield anything."""
    rows, chunks, head = heads.shape
    if chunks == 1:
        return heads[:, 0]
    merged = torch.empty(rows, head, dtype=torch.int64, device=heads.device)
    _merge_kernel[(rows,)](
        heads,
        merged,
        COUNT=chunks * head,
        BLOCK=triton.next_power_of_2(chunks * head),
        K=head,
        num_warps=shape.small_warps,
    )
    return merged


def compile_cases() -> list[CompileCase]:
    """Llama 3's vocabulary in 32 chunks, heads for filters (64) and for 20 log-probabilities (32)."""
    return [
        CompileCase(
            name=f"sampling_head/merge/{head}",
            kernel=_merge_kernel,
            signature={"heads": "*i64", "merged": "*i64", "COUNT": "constexpr", "BLOCK": "constexpr", "K": "constexpr"},
            constants={"COUNT": 32 * head, "BLOCK": 32 * head, "K": head},
            divisible=("heads", "merged"),
            num_warps=SAMPLING.small_warps,
        )
        for head in (64, 32)
    ]
