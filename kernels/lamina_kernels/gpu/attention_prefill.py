"""Causal attention of prompt chunks over paged keys and values.

    out[t, h] = sum_n softmax_n(scale * q[t, h] . k_n) v_n        n in (position(t) - window, position(t)]

The keys and values of the chunk are in blocks already, behind those of the prefix, so a chunk and its prefix are one
thing: positions in a table. The host cuts each chunk into tiles of `prefill_tile_rows` rows:

    positions       | 0 .. R-1 | R .. 2R-1 | 2R ..       R = tile rows; cuts lie at multiples of R in the *sequence*
    chunk at R + 5             |  x x x x  | x x         two tiles, whatever else is in the step

A program of the grid (KV heads, tiles) holds one tile's queries for the heads that share a KV head: row m of its matrix
product is head m % group at position m // group behind the cut, so that grouped queries read their keys once, a group
of 3, 5 or 7 costs no more than the rows left over at the end, and a position has its row whatever the chunk. The
program walks the key tiles, at multiples of KEYS in the sequence, that any of its rows can see. Tiles that one row
cannot see change none of its bits (see `attention_tile`); hence a row's result is the same whatever the chunk it came
in and whatever shares the step. There is one loop, with the mask in every step: a second, unmasked loop for tiles that
all rows see would save a compare and a select, but lets the compiler fuse the two loops' multiplications differently,
and which loop a tile falls in depends on the chunk.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from lamina_kernels.gpu import tuned
from lamina_kernels.gpu.attention_pool import NO_WINDOW, AttentionShape, check_attention, kv_pointer, logit_factors
from lamina_kernels.gpu.attention_tile import absorb_tile, load_tile, logits, tile_offsets
from lamina_kernels.gpu.compile_case import CompileCase

__all__ = ["build_prefill_tiles", "compile_cases", "fp8_cases", "paged_prefill", "prefill_tile_rows"]


def prefill_tile_rows(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Rows of one tile: what `build_prefill_tiles` must be given for `paged_prefill` of these shapes."""
    return max(1, tuned.prefill_tile(head_dim, dtype.itemsize).height // (heads // kv_heads))


def build_prefill_tiles(
    spans: Sequence[tuple[int, int, int, int]], tile_rows: int, capacity: int | None = None
) -> np.ndarray:
    """Cuts the chunks of a step into tiles.

    spans: (sequence, first row of q, rows, position of the first row) of each chunk. Returns int32 [n, 4] of
    (sequence, first row, rows, position of the first row), those with most keys first so that none starts late; with a
    capacity, [capacity, 4], the unused ones with sequence -1. Raises ValueError if they do not fit, or for a negative
    number.
    """
    tiles = []
    for sequence, first, count, start in spans:
        if min(sequence, first, count, start) < 0:
            raise ValueError(f"a span holds no negative numbers: {(sequence, first, count, start)}")
        end = start + count
        cuts = [start, *range((start // tile_rows + 1) * tile_rows, end, tile_rows), end]
        tiles += [(sequence, first + a - start, b - a, a) for a, b in itertools.pairwise(cuts) if b > a]
    capacity = len(tiles) if capacity is None else capacity
    if len(tiles) > capacity:
        raise ValueError(f"{len(tiles)} tiles do not fit {capacity}")
    tiles.sort(key=lambda tile: -(tile[2] + tile[3]))
    array = np.full((capacity, 4), -1, dtype=np.int32)
    array[: len(tiles)] = np.array(tiles, dtype=np.int32).reshape(-1, 4)
    return array


@triton.jit(do_not_specialize=["layer", "layers", "window", "table_stride"])
def _prefill_kernel(
    q, pool, tables, tiles, contexts, kv_scales, out,
    layer, layers, window, q_stride, table_stride, out_stride, factor, cap,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEIGHT: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, KEYS: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """One tile of rows, for the query heads of one KV head -> out."""
    kv_head = tl.program_id(0)
    p_tile = tiles + tl.program_id(1) * 4
    sequence = tl.load(p_tile).to(tl.int64)
    if sequence < 0:
        return
    first = tl.load(p_tile + 1)
    rows = tl.load(p_tile + 2)
    start = tl.load(p_tile + 3)
    end = tl.minimum(start + rows, tl.load(contexts + sequence))
    low = tl.maximum(start - window + 1, 0)

    m = tl.arange(0, HEIGHT)
    d = tl.arange(0, DIM_PAD)
    i_row = m // GROUP - start % (HEIGHT // GROUP)
    head = kv_head * GROUP + m % GROUP
    m_q = ((i_row >= 0) & (i_row < rows))[:, None] & (d < DIM)[None, :]
    row = (first + i_row).to(tl.int64)
    b_q = tl.load(q + (row * q_stride + head * DIM)[:, None] + d[None, :], mask=m_q, other=0.0)
    value_scale = 1.0
    if kv_scales is not None:
        factor = factor * tl.load(kv_scales + layer * 2)
        value_scale = tl.load(kv_scales + layer * 2 + 1)

    last = tl.minimum(start + i_row, end - 1)  # key that each row sees
    top = tl.full([HEIGHT], float("-inf"), tl.float32)
    total = tl.zeros([HEIGHT], tl.float32)
    acc = tl.zeros([HEIGHT, DIM_PAD], tl.float32)
    table = tables + sequence * table_stride
    for tile in range(low // KEYS, tl.cdiv(end, KEYS)):
        n = tile * KEYS + tl.arange(0, KEYS)
        held = (n >= low) & (n < end)  # by some row of this tile; beyond lie foreign or unwritten keys
        offsets = tile_offsets(table, n, held, layer, layers, kv_head, KV_HEADS, DIM, BLOCK_SIZE)
        b_k = load_tile(pool, offsets, held, DIM, DIM_PAD, b_q.dtype)
        scores = logits(tl.dot(b_q, tl.trans(b_k), input_precision="ieee"), factor, cap, CAPPED)
        seen = n[None, :] <= last[:, None]
        if WINDOWED:
            seen = seen & (n[None, :] > last[:, None] - window)
        scores = tl.where(seen, scores, float("-inf"))
        offsets += layers * (BLOCK_SIZE * KV_HEADS * DIM)
        b_v = load_tile(pool, offsets, held, DIM, DIM_PAD, b_q.dtype)
        top, total, acc = absorb_tile(scores, b_v, top, total, acc)

    result = acc * (value_scale / tl.where(total > 0, total, 1.0))[:, None]
    tl.store(out + (row * out_stride + head * DIM)[:, None] + d[None, :], result.to(out.dtype.element_ty), mask=m_q)


def paged_prefill(
    q: Tensor,
    pool: Tensor,
    layer: int,
    tables: Tensor,
    tiles: Tensor,
    contexts: Tensor,
    out: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    kv_scales: Tensor | None = None,
) -> None:
    """Writes to out [T, Hq * D] the causal attention of the rows of q [T, Hq, D] that are in a tile.

    tables int32 [B, max_blocks]; tiles int32 [n, 4] of `build_prefill_tiles` with this shape's `prefill_tile_rows` (a
    taller tile would lose rows: the numbers are on the device and cannot be checked here); contexts int32 [B]: keys of
    each sequence in the pool, the chunk's included, beyond which nothing is read. Rows in no tile stay as they are.
    The other arguments as in `attention_decode.paged_decode`.

    Raises TypeError or ValueError for what `check_attention` refuses, and for tiles of another shape or dtype.
    """
    shape = check_attention(
        q, pool, layer, tables, contexts, out, scale=scale, window=window, softcap=softcap, kv_scales=kv_scales
    )
    if tiles.dim() != 2 or tiles.shape[1] != 4 or not tiles.is_contiguous() or tiles.device != q.device:
        raise ValueError(f"tiles are contiguous [n, 4] beside q, not {tuple(tiles.shape)} on {tiles.device}")
    if tiles.dtype != torch.int32:
        raise TypeError(f"tiles are int32, not {tiles.dtype}")
    kv = kv_pointer(pool)
    tile = tuned.prefill_tile(shape.head_dim, q.element_size(), fp8_by_hand=kv.dtype == torch.uint8)
    if shape.group > tile.height:
        raise ValueError(f"{shape.group} query heads on one KV head: at most {tile.height}")
    if len(tiles) == 0:
        return
    factor, cap = logit_factors(scale, softcap)
    _prefill_kernel[(shape.kv_heads, len(tiles))](
        q, kv, tables, tiles, contexts, kv_scales, out,
        layer, shape.layers, NO_WINDOW if window is None else window,
        q.stride(0), tables.stride(0), out.stride(0), factor, cap,
        **_constants(shape, tile, windowed=window is not None, capped=softcap is not None),
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip


def _constants(shape: AttentionShape, tile: tuned.PrefillTile, *, windowed: bool, capped: bool) -> dict[str, object]:
    return {
        "KV_HEADS": shape.kv_heads,
        "GROUP": shape.group,
        "HEIGHT": tile.height,
        "DIM": shape.head_dim,
        "DIM_PAD": triton.next_power_of_2(shape.head_dim),
        "BLOCK_SIZE": shape.block_size,
        "KEYS": tile.keys,
        "WINDOWED": windowed,
        "CAPPED": capped,
    }


_KV_NAMES = {None: "", "u8": "_fp8", "fp8e4nv": "_fp8_native"}


def compile_cases() -> list[CompileCase]:
    """Llama-3-8B (8 KV heads, 4 queries each, dim 128) in each dtype; SmolLM2's, Gemma's and Phi's head dims; a cap."""
    llama = AttentionShape(heads=32, kv_heads=8, head_dim=128, block_size=16, layers=32)
    small = AttentionShape(heads=9, kv_heads=3, head_dim=64, block_size=16, layers=30)
    phi = AttentionShape(heads=32, kv_heads=32, head_dim=96, block_size=16, layers=32)
    gemma = AttentionShape(heads=16, kv_heads=8, head_dim=256, block_size=16, layers=42)
    cases = [_case(llama, dtype) for dtype in ("bf16", "fp16", "fp32")]
    cases += [_case(shape, "bf16") for shape in (small, phi)]
    cases += [_case(gemma, "bf16", gemma_like=True), _case(gemma, "fp32"), _case(llama, "bf16", kv="u8")]
    return cases


def fp8_cases() -> list[CompileCase]:
    """What only chips that convert float8 can compile, so that `compile_cases` cannot hold it."""
    llama = AttentionShape(heads=32, kv_heads=8, head_dim=128, block_size=16, layers=32)
    return [_case(llama, "bf16", kv="fp8e4nv")]


def _case(shape: AttentionShape, dtype: str, *, kv: str | None = None, gemma_like: bool = False) -> CompileCase:
    tile = tuned.prefill_tile(shape.head_dim, 4 if dtype == "fp32" else 2, fp8_by_hand=kv == "u8")
    constants = _constants(shape, tile, windowed=gemma_like, capped=gemma_like)
    signature = {"q": f"*{dtype}", "pool": f"*{kv or dtype}"} | dict.fromkeys(("tables", "tiles", "contexts"), "*i32")
    signature |= {"kv_scales": "*fp32" if kv else "constexpr", "out": f"*{dtype}"}
    signature |= dict.fromkeys(("layer", "layers", "window", "q_stride", "table_stride", "out_stride"), "i32")
    signature |= dict.fromkeys(("factor", "cap"), "fp32") | dict.fromkeys(constants, "constexpr")
    return CompileCase(
        name=f"attention_prefill/d{shape.head_dim}{'_gemma' if gemma_like else ''}{_KV_NAMES[kv]}/{dtype}",
        kernel=_prefill_kernel,
        signature=signature,
        constants=constants if kv else constants | {"kv_scales": None},
        divisible=("q", "pool", "tables", "tiles", "contexts", "out", "q_stride", "out_stride"),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        tensor_cores=dtype != "fp32",
    )
