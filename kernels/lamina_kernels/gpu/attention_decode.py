"""Attention of decode rows over paged keys and values: one query token per sequence.

    out[b, h] = sum_n softmax_n(scale * q[b, h] . k_n) v_n        n in [max(context - window, 0), context)

Decode reads every key and value once and does next to nothing with them, so it runs at the speed of memory if enough
loads are under way. One program per row would leave a long context to a few of the chip's processors; so a row's keys
are cut into up to SPLITS parts, one program of a grid (KV heads, rows, parts) each, and a second kernel merges them:

    row's key tiles   | 0 1 2 3 | 4 5 6 7 | 8 9 |           part = max(MIN_TILES, ceil(tiles / SPLITS)) tiles
                         part 0    part 1   part 2          parts beyond leave at once

A part's length follows from its row's context alone, and the merge adds the parts in a fixed order: no atomics, and a
row's bits never depend on its neighbours. Tiles before the window are not visited. The query heads that share a KV head
are the rows of one matrix product (padded to 16, its least height), so that grouped queries read their keys once. KV
heads come first in the grid because their keys are neighbours in memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from lamina_kernels.gpu import tuned
from lamina_kernels.gpu.attention_pool import NO_WINDOW, AttentionShape, check_attention, kv_pointer, logit_factors
from lamina_kernels.gpu.attention_tile import absorb_tile, load_tile, logits, tile_offsets
from lamina_kernels.gpu.compile_case import CompileCase

__all__ = ["SPLITS", "DecodeScratch", "compile_cases", "fp8_cases", "paged_decode"]

SPLITS = tuned.DECODE_SPLITS


@dataclass(frozen=True, slots=True)
class DecodeScratch:
    """Room for the parts of rows, written and read within one `paged_decode`; launches of one stream may share it."""

    partial: Tensor  # float32 [rows, heads, SPLITS, head_dim]: acc of each part
    stats: Tensor  # float32 [rows, heads, SPLITS, 2]: top and total of each part

    @classmethod
    def allocate(cls, rows: int, heads: int, head_dim: int, device: torch.device) -> DecodeScratch:
        """For up to `rows` decode rows."""
        partial = torch.empty((rows, heads, SPLITS, head_dim), dtype=torch.float32, device=device)
        return cls(partial, torch.empty((rows, heads, SPLITS, 2), dtype=torch.float32, device=device))


@triton.jit
def _key_tiles(context, window, KEYS: tl.constexpr, MIN_TILES: tl.constexpr, SPLITS: tl.constexpr):
    """First position seen, first tile, end of tiles, tiles per part of a row."""
    low = tl.maximum(context - window, 0)
    first = low // KEYS
    stop = tl.cdiv(context, KEYS)
    return low, first, stop, tl.maximum(tl.cdiv(stop - first, SPLITS), MIN_TILES)


@triton.jit(do_not_specialize=["layer", "layers", "window", "table_stride"])
def _decode_kernel(
    q, pool, tables, contexts, kv_scales, partial, stats,
    layer, layers, window, q_stride, table_stride, factor, cap,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, KEYS: tl.constexpr, MIN_TILES: tl.constexpr, SPLITS: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """One part of one row's keys, for the query heads of one KV head -> partial, stats."""
    kv_head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    part = tl.program_id(2)
    context = tl.load(contexts + row)
    low, first, stop, part_tiles = _key_tiles(context, window, KEYS, MIN_TILES, SPLITS)
    start = first + part * part_tiles
    stop = tl.minimum(start + part_tiles, stop)
    if start >= stop:
        return

    g = tl.arange(0, GROUP_PAD)
    d = tl.arange(0, DIM_PAD)
    head = kv_head * GROUP + g
    m_q = (g < GROUP)[:, None] & (d < DIM)[None, :]
    b_q = tl.load(q + row * q_stride + head[:, None] * DIM + d[None, :], mask=m_q, other=0.0)
    value_scale = 1.0
    if kv_scales is not None:
        factor = factor * tl.load(kv_scales + layer * 2)
        value_scale = tl.load(kv_scales + layer * 2 + 1)

    top = tl.full([GROUP_PAD], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_PAD], tl.float32)
    acc = tl.zeros([GROUP_PAD, DIM_PAD], tl.float32)
    table = tables + row * table_stride
    for tile in range(start, stop):
        n = tile * KEYS + tl.arange(0, KEYS)
        seen = (n >= low) & (n < context)
        offsets = tile_offsets(table, n, seen, layer, layers, kv_head, KV_HEADS, DIM, BLOCK_SIZE)
        b_k = load_tile(pool, offsets, seen, DIM, DIM_PAD, b_q.dtype)
        offsets += layers * (BLOCK_SIZE * KV_HEADS * DIM)
        b_v = load_tile(pool, offsets, seen, DIM, DIM_PAD, b_q.dtype)
        scores = logits(tl.dot(b_q, tl.trans(b_k), input_precision="ieee"), factor, cap, CAPPED)
        scores = tl.where(seen[None, :], scores, float("-inf"))
        top, total, acc = absorb_tile(scores, b_v, top, total, acc)

    o_part = (row * (KV_HEADS * GROUP) + head) * SPLITS + part  # int64 [GROUP_PAD]
    tl.store(partial + o_part[:, None] * DIM + d[None, :], acc * value_scale, mask=m_q)
    tl.store(stats + o_part * 2, top, mask=g < GROUP)
    tl.store(stats + o_part * 2 + 1, total, mask=g < GROUP)


@triton.jit(do_not_specialize=["window"])
def _merge_kernel(
    partial, stats, contexts, out, window, out_stride,
    HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    KEYS: tl.constexpr, MIN_TILES: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """The parts of one row's head -> out; zero for an unused row."""
    head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    _, first, stop, part_tiles = _key_tiles(tl.load(contexts + row), window, KEYS, MIN_TILES, SPLITS)
    part = tl.arange(0, SPLITS)
    used = first + part * part_tiles < stop  # the others hold what an earlier launch left
    o_part = (row * HEADS + head) * SPLITS + part
    tops = tl.load(stats + o_part * 2, mask=used, other=float("-inf"))
    totals = tl.load(stats + o_part * 2 + 1, mask=used, other=0.0)
    d = tl.arange(0, DIM_PAD)
    m_acc = used[:, None] & (d < DIM)[None, :]
    accs = tl.load(partial + o_part[:, None] * DIM + d[None, :], mask=m_acc, other=0.0)
    top = tl.max(tops, 0)
    weights = tl.exp2(tops - tl.where(top == float("-inf"), 0.0, top))
    total = tl.sum(weights * totals, 0)
    merged = tl.sum(weights[:, None] * accs, 0) / tl.where(stop > first, total, 1.0)
    tl.store(out + row * out_stride + head * DIM + d, merged.to(out.dtype.element_ty), mask=d < DIM)


def paged_decode(
    q: Tensor,
    pool: Tensor,
    layer: int,
    tables: Tensor,
    contexts: Tensor,
    out: Tensor,
    scratch: DecodeScratch,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    kv_scales: Tensor | None = None,
) -> None:
    """Writes to out [B, Hq * D] the attention of q [B, Hq, D], one row per sequence.

    pool [blocks, 2, layers, block size, Hkv, D] holds the keys and values, this token's included, in q's dtype or
    float8_e4m3fn with kv_scales float32 [layers, 2] (of keys and values; stored = x / scale). tables int32
    [B, max_blocks] and contexts int32 [B] (keys to attend to) stay on the device. A row of context 0 is unused: its
    output is zero. `scale` is the factor on q . k; `window`: the token sees itself and the window - 1 tokens before;
    `softcap` c: scores become c * tanh(score / c). Rows of q, tables and out may lie apart, each contiguous. The grid
    follows from B and max_blocks alone, the result of a row from its own context only.

    Raises TypeError or ValueError for what `check_attention` refuses, and ValueError for a scratch that is too small.
    """
    shape = check_attention(
        q, pool, layer, tables, contexts, out, scale=scale, window=window, softcap=softcap, kv_scales=kv_scales
    )
    rows = q.shape[0]
    _check_scratch(scratch, rows, shape, q.device)
    if tables.shape[0] != rows:
        raise ValueError(f"a decode row is a sequence: {rows} rows of q, {tables.shape[0]} tables")
    if rows == 0:
        return
    tile = tuned.decode_tile(shape.head_dim, q.element_size())
    parts = min(SPLITS, max(1, triton.cdiv(tables.shape[1] * shape.block_size, tile.keys * tile.min_tiles)))
    window = NO_WINDOW if window is None else window
    factor, cap = logit_factors(scale, softcap)
    _decode_kernel[(shape.kv_heads, rows, parts)](
        q, kv_pointer(pool), tables, contexts, kv_scales, scratch.partial, scratch.stats,
        layer, shape.layers, window, q.stride(0), tables.stride(0), factor, cap,
        **_decode_constants(shape, tile, softcap is not None), num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    _merge_kernel[(shape.heads, rows)](
        scratch.partial, scratch.stats, contexts, out, window, out.stride(0),
        **_merge_constants(shape, tile), num_warps=tuned.MERGE_WARPS,
    )  # fmt: skip


def _check_scratch(scratch: DecodeScratch, rows: int, shape: AttentionShape, device: torch.device) -> None:
    fits = scratch.partial.shape[1:] == (shape.heads, SPLITS, shape.head_dim) and scratch.partial.shape[0] >= rows
    if not fits or scratch.stats.shape != (*scratch.partial.shape[:3], 2) or scratch.partial.device != device:
        raise ValueError(
            f"the scratch is for {tuple(scratch.partial.shape)} on {scratch.partial.device}, the launch has {rows} "
            f"rows of {shape.heads} heads of {shape.head_dim} on {device}"
        )


def _decode_constants(shape: AttentionShape, tile: tuned.DecodeTile, capped: bool) -> dict[str, object]:
    return {
        "KV_HEADS": shape.kv_heads,
        "GROUP": shape.group,
        "GROUP_PAD": max(16, triton.next_power_of_2(shape.group)),
        "DIM": shape.head_dim,
        "DIM_PAD": triton.next_power_of_2(shape.head_dim),
        "BLOCK_SIZE": shape.block_size,
        "KEYS": tile.keys,
        "MIN_TILES": tile.min_tiles,
        "SPLITS": SPLITS,
        "CAPPED": capped,
    }


def _merge_constants(shape: AttentionShape, tile: tuned.DecodeTile) -> dict[str, object]:
    return {
        "HEADS": shape.heads,
        "DIM": shape.head_dim,
        "DIM_PAD": triton.next_power_of_2(shape.head_dim),
        "KEYS": tile.keys,
        "MIN_TILES": tile.min_tiles,
        "SPLITS": SPLITS,
    }


_KV_NAMES = {None: "", "u8": "_fp8", "fp8e4nv": "_fp8_native"}


def compile_cases() -> list[CompileCase]:
    """Llama-3-8B (8 KV heads, 4 queries each, dim 128) in each dtype; SmolLM2's, Gemma's and Phi's head dims; a cap."""
    llama = AttentionShape(heads=32, kv_heads=8, head_dim=128, block_size=16, layers=32)
    small = AttentionShape(heads=9, kv_heads=3, head_dim=64, block_size=16, layers=30)
    phi = AttentionShape(heads=32, kv_heads=32, head_dim=96, block_size=16, layers=32)
    gemma = AttentionShape(heads=16, kv_heads=8, head_dim=256, block_size=16, layers=42)
    cases = [_decode_case(llama, dtype) for dtype in ("bf16", "fp16", "fp32")]
    cases += [_decode_case(shape, "bf16") for shape in (small, phi)]
    cases += [_decode_case(gemma, "bf16", capped=True), _decode_case(gemma, "fp32")]
    cases += [_decode_case(llama, "bf16", kv="u8")]
    return cases + [_merge_case(shape, dtype) for shape, dtype in ((llama, "bf16"), (llama, "fp16"), (gemma, "fp32"))]


def fp8_cases() -> list[CompileCase]:
    """What only chips that convert float8 can compile, so that `compile_cases` cannot hold it."""
    llama = AttentionShape(heads=32, kv_heads=8, head_dim=128, block_size=16, layers=32)
    return [_decode_case(llama, "bf16", kv="fp8e4nv")]


def _decode_case(shape: AttentionShape, dtype: str, *, kv: str | None = None, capped: bool = False) -> CompileCase:
    tile = tuned.decode_tile(shape.head_dim, 4 if dtype == "fp32" else 2)
    constants = _decode_constants(shape, tile, capped)
    signature = {"q": f"*{dtype}", "pool": f"*{kv or dtype}", "tables": "*i32", "contexts": "*i32"}
    signature["kv_scales"] = "*fp32" if kv else "constexpr"
    signature |= dict.fromkeys(("partial", "stats"), "*fp32")
    signature |= dict.fromkeys(("layer", "layers", "window", "q_stride", "table_stride"), "i32")
    signature |= dict.fromkeys(("factor", "cap"), "fp32") | dict.fromkeys(constants, "constexpr")
    return CompileCase(
        name=f"attention_decode/d{shape.head_dim}{'_capped' if capped else ''}{_KV_NAMES[kv]}/{dtype}",
        kernel=_decode_kernel,
        signature=signature,
        constants=constants if kv else constants | {"kv_scales": None},
        divisible=("q", "pool", "tables", "contexts", "partial", "stats", "q_stride"),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        tensor_cores=dtype != "fp32",
    )


def _merge_case(shape: AttentionShape, dtype: str) -> CompileCase:
    constants = _merge_constants(shape, tuned.decode_tile(shape.head_dim, 4 if dtype == "fp32" else 2))
    signature = {"partial": "*fp32", "stats": "*fp32", "contexts": "*i32", "out": f"*{dtype}"}
    signature |= dict.fromkeys(("window", "out_stride"), "i32") | dict.fromkeys(constants, "constexpr")
    return CompileCase(
        name=f"attention_merge/d{shape.head_dim}/{dtype}",
        kernel=_merge_kernel,
        signature=signature,
        constants=constants,
        divisible=("partial", "stats", "contexts", "out", "out_stride"),
        num_warps=tuned.MERGE_WARPS,
    )
