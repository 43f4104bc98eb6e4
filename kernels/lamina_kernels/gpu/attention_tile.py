"""The inner step that decode and prefill attention share: one tile of keys, in base-2 online softmax.

For scores s_n over the keys seen so far a row holds m = max s_n, l = sum 2^(s_n - m) and acc = sum 2^(s_n - m) v_n; the
attention is acc / l. A tile moves all three to the new maximum m': everything held is multiplied by 2^(m - m'). Tiles
that a row cannot see leave its numbers as they are *to the bit*: the factor is 2^0 and the terms added are zeros. So a
row's result depends on the tiles that it sees, which lie at multiples of KEYS in its sequence, and on nothing else of
the launch.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["absorb_tile", "load_tile", "logits", "tile_offsets", "widen_fp8"]


@triton.jit
def tile_offsets(
    table, n, seen, layer, layers, kv_head, KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr
):
    """Offset in the pool of the keys at positions n [KEYS] (int64); the values lie `layers` pages further.

    Table entries of unseen positions are not read: they may be stale or missing.
    """
    block = tl.load(table + n // BLOCK_SIZE, mask=seen, other=0).to(tl.int64)
    page = block * (2 * layers) + layer  # one layer's keys, or values, of one block
    return (page * BLOCK_SIZE + n % BLOCK_SIZE) * (KV_HEADS * DIM) + kv_head * DIM


@triton.jit
def load_tile(pool, offsets, seen, DIM: tl.constexpr, DIM_PAD: tl.constexpr, dtype: tl.constexpr):
    """[KEYS, DIM_PAD] of `dtype`; zero where unseen, whatever lies there (0 * NaN would not be), and beyond DIM."""
    d = tl.arange(0, DIM_PAD)
    tile = tl.load(pool + offsets[:, None] + d[None, :], mask=seen[:, None] & (d < DIM)[None, :], other=0.0)
    if tile.dtype == tl.uint8:
        tile = widen_fp8(tile)
    return tile.to(dtype)


@triton.jit
def widen_fp8(bits):
    """float8_e4m3fn, given as uint8, to float16, exactly, for chips without an instruction for it (sm_80).

    Both formats are sign, exponent, mantissa. The byte with its sign repeated to the left, moved up by 7, has all in
    place but for one copy of the sign; the exponent (e4m3's bias is 7) then reads 8 lower under float16's bias of 15,
    subnormals included, which one multiplication mends. NaN (all ones) would become 480 and is kept by hand.

    About 10 integer instructions a value: in decode that bounds the speed, not memory. So chips that can convert do.
    """
    signed = bits.to(tl.int8, bitcast=True).to(tl.int16)
    half = ((signed << 7) & -16385).to(tl.float16, bitcast=True) * 256.0  # -16385: all bits but 2^14
    return tl.where((bits & 0x7F) == 0x7F, float("nan"), half)


@triton.jit
def logits(dots, factor, cap, CAPPED: tl.constexpr):
    """Scores times log2(e): `factor` holds scale * log2(e).

    Capped: cap * tanh(score / cap), where `factor` holds 2 * log2(e) * scale / softcap and `cap` softcap * log2(e);
    tanh(|x|) = (1 - t) / (1 + t) with t = 2^(-2 log2(e) |x|), which never overflows and keeps NaN.
    """
    scores = dots * factor
    if CAPPED:
        t = tl.exp2(-tl.abs(scores))
        size = cap * (1.0 - t) / (1.0 + t)
        scores = tl.where(scores < 0, -size, size)
    return scores


@triton.jit
def absorb_tile(scores, values, top, total, acc):
    """Adds scores [M, KEYS] float32 (-inf: hidden) with values [KEYS, DIM_PAD] to top, total [M], acc [M, DIM_PAD]."""
    new_top = tl.maximum(top, tl.max(scores, 1))
    base = tl.where(new_top == float("-inf"), 0.0, new_top)  # nothing seen yet: -inf - -inf would be NaN
    weights = tl.exp2(scores - base[:, None])
    decay = tl.exp2(top - base)
    total = total * decay + tl.sum(weights, 1)
    acc = tl.dot(weights.to(values.dtype), values, acc * decay[:, None], input_precision="ieee")
    return new_top, total, acc
