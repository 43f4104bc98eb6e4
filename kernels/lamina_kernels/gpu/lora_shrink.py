"""h = x . A^T for every adapter of a step, as partial sums over splits of `in`. One launch covers all slices of a site.

    planes[s, row, 0:R] = x[row, split s] . A[0:R, split s]^T           R: the real rank rows of the row's own adapter

A site's slices (q, k and v; gate and up) share their input, so their A's are stacked, R rows in all, 1 to 768.

Tiling: program (tile, split, p) multiplies the tile's rows by the rank blocks p, p + P, p + 2P, ... below R. The grid
thus depends on capacities alone and stays the same in a captured graph, while a small R leaves the others at once.
Both kinds use matrix instructions: a decode tile has 16 rows, as few as they take, and rows it lacks are masked.

Determinism: splits are written to planes of their own, which `expand` sums in order; no atomics, and nothing to clear.
How `in` is cut depends on `in` and the kind of row only. So a row's sums never depend on other rows.

Nothing else of `planes` is written: rows outside the tiles and columns from R on keep what they held.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lamina_kernels.gpu.compile_case import CompileCase
from lamina_kernels.gpu.lora_checks import check_pool, check_rows
from lamina_kernels.gpu.lora_layout import ALIGN, FIELDS
from lamina_kernels.gpu.tuned import LORA_SHRINK_DECODE, LORA_SHRINK_PREFILL, ShrinkShape

__all__ = ["compile_cases", "shrink"]


@triton.jit
def _shrink_kernel(
    x,  # [T, in_features], rows x_stride apart
    pool,  # [N]
    table,  # [slots, FIELDS]
    tiles,  # [n, 3]
    planes,  # [splits, T, ranks], strides plane_stride, row_stride, 1
    in_features,
    x_stride,
    plane_stride,
    row_stride,
    FIELDS: tl.constexpr,
    ALIGN: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    i_tile, i_split = tl.program_id(0), tl.program_id(1)
    slot = tl.load(tiles + i_tile * 3)
    if slot < 0:
        return
    first, count = tl.load(tiles + i_tile * 3 + 1), tl.load(tiles + i_tile * 3 + 2)
    entry = table + slot.to(tl.int64) * FIELDS
    p_a = pool + tl.multiple_of(tl.load(entry), ALIGN)
    rank = tl.load(entry + 1).to(tl.int32)

    o_row = tl.arange(0, ROWS)
    m_row = o_row < count
    row = (first + o_row).to(tl.int64)
    stride = (in_features + ALIGN - 1) // ALIGN * ALIGN
    begin = i_split * CHUNK
    end = tl.minimum(begin + CHUNK, in_features)
    for rank_start in range(tl.program_id(2) * BLOCK_RANK, rank, tl.num_programs(2) * BLOCK_RANK):
        o_rank = rank_start + tl.arange(0, BLOCK_RANK)
        m_rank = o_rank < rank
        acc = tl.zeros((ROWS, BLOCK_RANK), dtype=tl.float32)
        for k in range(begin, end, BLOCK_K):
            o_k = k + tl.arange(0, BLOCK_K)
            m_k = o_k < in_features
            b_x = tl.load(x + row[:, None] * x_stride + o_k[None, :], mask=m_row[:, None] & m_k[None, :], other=0.0)
            b_a = tl.load(
                p_a + o_rank[None, :].to(tl.int64) * stride + o_k[:, None],
                mask=m_rank[None, :] & m_k[:, None],
                other=0.0,
            )
            acc = tl.dot(b_x, b_a, acc, input_precision="ieee")
        p_h = planes + i_split.to(tl.int64) * plane_stride + row[:, None] * row_stride + o_rank[None, :]
        tl.store(p_h, acc, mask=m_row[:, None] & m_rank[None, :])


def shrink(x: Tensor, pool: Tensor, table: Tensor, tiles: Tensor, planes: Tensor, *, kind: ShrinkShape) -> None:
    """planes[s, row, 0:R] = x[row, split s] . A^T for each row of each tile; the rest of `planes` is left as it is.

    x [T, in], rows may be strided; pool [N], x's dtype; table int64 [slots, FIELDS], one site's rows (`lora_layout`);
    tiles int32 [n, 3] for `kind.rows` (`lora_tiles`), its rows below T, its slots below `slots`; planes float32
    [>= kind.splits(in), >= T, >= every R]. Splits are summed by `expand(..., splits=kind.splits(in))`. Raises
    ValueError or TypeError for wrong shapes, dtypes or strides; numbers inside `table` and `tiles` are trusted.
    """
    check_rows("x", x, pool.dtype)
    check_pool(pool, table, tiles, planes)
    in_features = x.shape[1]
    splits = kind.splits(in_features)
    if planes.shape[0] < splits or planes.shape[1] < x.shape[0]:
        raise ValueError(f"planes {tuple(planes.shape)} hold less than {splits} splits of {x.shape[0]} rows")
    if not tiles.shape[0]:
        return
    _shrink_kernel[(tiles.shape[0], splits, kind.rank_programs)](
        x,
        pool,
        table,
        tiles,
        planes,
        in_features,
        x.stride(0),
        planes.stride(0),
        planes.stride(1),
        **_constants(kind, in_features, pool.element_size()),
        num_warps=kind.num_warps,
        num_stages=kind.num_stages,
    )


def _constants(kind: ShrinkShape, in_features: int, element_size: int) -> dict[str, int]:
    return {
        "FIELDS": FIELDS,
        "ALIGN": ALIGN,
        "CHUNK": kind.chunk(in_features),
        "ROWS": kind.rows,
        "BLOCK_RANK": kind.block_rank,
        "BLOCK_K": kind.block_k_fp32 if element_size == 4 else kind.block_k,
    }


def compile_cases() -> list[CompileCase]:
    """Both kinds at Llama-3-8B's qkv and down projections."""
    kinds = {"decode": LORA_SHRINK_DECODE, "prefill": LORA_SHRINK_PREFILL}
    return [
        _case(f"lora_shrink/{name}/{in_features}/{dtype}", dtype, in_features, kind)
        for name, kind in kinds.items()
        for in_features, dtype in ((4096, "bf16"), (4096, "fp16"), (4096, "fp32"), (14336, "bf16"))
    ]


def _case(name: str, dtype: str, in_features: int, kind: ShrinkShape) -> CompileCase:
    numbers = ("in_features", "x_stride", "plane_stride", "row_stride")
    constants = _constants(kind, in_features, 4 if dtype == "fp32" else 2)
    pointers = {"x": f"*{dtype}", "pool": f"*{dtype}", "table": "*i64", "tiles": "*i32", "planes": "*fp32"}
    return CompileCase(
        name=name,
        kernel=_shrink_kernel,
        signature={**pointers, **dict.fromkeys(numbers, "i32"), **dict.fromkeys(constants, "constexpr")},
        constants=constants,
        divisible=(*pointers, *numbers),
        num_warps=kind.num_warps,
        num_stages=kind.num_stages,
        tensor_cores=dtype != "fp32",
    )
