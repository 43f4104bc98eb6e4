"""y[rows, columns of slice s] += h_s . B_s for every adapter of a step and every slice of a fused site, in one launch.

    h = planes[0, row] + planes[1, row] + ...        in this order, in fp32, then rounded to the pool's dtype
    d = h[h_s : h_s + r_s] . B_s                     B_s [r_s, width_s] holds the adapter's scaling
    y = y + d                                        plain LoRA
    y = g * (y - bias + d) + bias                    DoRA, g = gains[g_s + column]: scales W + dW but not the bias

Tiling: program (tile, c) owns the tile's rows and one block of columns. Column blocks of all slices are numbered
through, slice after slice (a ragged grid laid flat), so slices of different width waste no program. It loops over the
slice's real rank in blocks. A slice that the adapter leaves alone (r_s = 0) costs a few loads. y is read and written
once.

Determinism: planes are summed in order by each program that needs them; a column of a row is written by one program.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lamina_kernels.gpu.compile_case import CompileCase
from lamina_kernels.gpu.lora_checks import check_pool, check_rows
from lamina_kernels.gpu.lora_layout import ALIGN, FIELDS, MAX_SLICES, SLICE_FIELDS, SLICE_START, SiteShape
from lamina_kernels.gpu.tuned import (
    LORA_EXPAND_DECODE,
    LORA_EXPAND_PREFILL,
    LORA_SHRINK_DECODE,
    LORA_SHRINK_PREFILL,
    ExpandShape,
)

__all__ = ["compile_cases", "expand"]


@triton.jit
def _sum_planes(planes, row, o_rank, mask, plane_stride, row_stride, SPLITS: tl.constexpr):
    """h [rows, ranks] in fp32, the splits added in order."""
    p_h = planes + row[:, None] * row_stride + o_rank[None, :]
    h = tl.load(p_h, mask=mask, other=0.0)
    for _ in tl.static_range(1, SPLITS):
        p_h += plane_stride
        h += tl.load(p_h, mask=mask, other=0.0)
    return h


@triton.jit
def _expand_kernel(
    planes,  # [>= SPLITS, T, ranks], strides plane_stride, row_stride, 1
    pool,  # [N]
    gains,  # [G]
    table,  # [slots, FIELDS]
    tiles,  # [n, 3]
    y,  # [T, width_0 + width_1 + width_2], rows y_stride apart
    bias,  # as wide as y, or None
    width_0,
    width_1,  # 0: no such slice
    width_2,
    y_stride,
    plane_stride,
    row_stride,
    ranks,
    FIELDS: tl.constexpr,
    SLICE_START: tl.constexpr,
    SLICE_FIELDS: tl.constexpr,
    ALIGN: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    i_tile, i_block = tl.program_id(0), tl.program_id(1)
    slot = tl.load(tiles + i_tile * 3)
    if slot < 0:
        return
    # Which slice this block of columns belongs to; absent slices have width 0.
    end_0 = tl.cdiv(width_0, BLOCK_COLUMNS)
    end_1 = end_0 + tl.cdiv(width_1, BLOCK_COLUMNS)
    past_0, past_1 = i_block >= end_0, i_block >= end_1
    width = tl.where(past_1, width_2, tl.where(past_0, width_1, width_0))
    column = tl.where(past_1, width_0 + width_1, tl.where(past_0, width_0, 0))
    i_block -= tl.where(past_1, end_1, tl.where(past_0, end_0, 0))

    p_slice = (
        table + slot.to(tl.int64) * FIELDS + SLICE_START + (past_0.to(tl.int32) + past_1.to(tl.int32)) * SLICE_FIELDS
    )
    rank = tl.load(p_slice + 1).to(tl.int32)
    if rank == 0:
        return
    p_b = pool + tl.multiple_of(tl.load(p_slice), ALIGN)
    first_rank, gain = tl.load(p_slice + 2).to(tl.int32), tl.load(p_slice + 3)

    first, count = tl.load(tiles + i_tile * 3 + 1), tl.load(tiles + i_tile * 3 + 2)
    o_row = tl.arange(0, ROWS)
    m_row = o_row < count
    row = (first + o_row).to(tl.int64)
    o_column = i_block * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    m_column = o_column < width
    p_y = y + row[:, None] * y_stride + (column + o_column)[None, :]
    m_y = m_row[:, None] & m_column[None, :]
    before = tl.load(p_y, mask=m_y, other=0.0)  # asked for first, wanted last

    stride = (width + ALIGN - 1) // ALIGN * ALIGN
    delta = tl.zeros((ROWS, BLOCK_COLUMNS), dtype=tl.float32)
    # Planes are read from a vector's boundary on, in whole vectors; what is outside the slice's ranks is then dropped.
    for rank_start in range(first_rank // ALIGN * ALIGN, first_rank + rank, BLOCK_RANK):
        o_rank = tl.multiple_of(rank_start, ALIGN) + tl.arange(0, BLOCK_RANK)
        m_rank = (o_rank >= first_rank) & (o_rank < first_rank + rank)
        m_h = m_row[:, None] & (o_rank < ranks)[None, :]
        h = _sum_planes(planes, row, o_rank, m_h, plane_stride, row_stride, SPLITS)
        h = tl.where(m_rank[None, :], h, 0.0)
        p_tile = p_b + (o_rank - first_rank)[:, None].to(tl.int64) * stride + o_column[None, :]
        b = tl.load(p_tile, mask=m_rank[:, None] & (o_column < stride)[None, :], other=0.0)  # rows are padded, too
        delta = tl.dot(h.to(b.dtype), b, delta, input_precision="ieee")

    after = before.to(tl.float32)
    if bias is None:
        base = tl.zeros((1, BLOCK_COLUMNS), dtype=tl.float32)
    else:
        base = tl.load(bias + column + o_column, mask=m_column, other=0.0).to(tl.float32)[None, :]
    if gain >= 0:
        gains_row = tl.load(gains + gain + o_column, mask=m_column, other=0.0)[None, :]
        after = gains_row * (after - base + delta) + base
    else:
        after += delta
    tl.store(p_y, after.to(y.dtype.element_ty), mask=m_y)


def expand(
    planes: Tensor,
    pool: Tensor,
    gains: Tensor,
    table: Tensor,
    tiles: Tensor,
    y: Tensor,
    bias: Tensor | None,
    *,
    shape: SiteShape,
    splits: int,
    kind: ExpandShape,
) -> None:
    """Adds each row's own adapter to y in place: y[row, columns of s] += h_s . B_s, then DoRA's gains if it has any.

    planes float32 [>= splits, >= T, >= every R] from `shrink` with the same tiles, read in whole vectors if the last
    size is a multiple of 16; pool [N]; gains float32 [G]; table int64 [slots, FIELDS], one site's rows (`lora_layout`);
    tiles int32 [n, 3] for `kind.rows`; y [T, out], the pool's dtype, rows may be strided; bias [out] of the base layer,
    or None. Rows in no tile and slices of rank 0 keep their bits. Raises ValueError or TypeError for wrong shapes,
    dtypes or strides; numbers inside `table` and `tiles` are trusted.
    """
    check_rows("y", y, pool.dtype)
    check_pool(pool, table, tiles, planes)
    _check_site(planes, gains, y, bias, shape, splits)
    if not tiles.shape[0]:
        return
    constants = _constants(kind, splits, pool.element_size())
    blocks = sum(triton.cdiv(width, constants["BLOCK_COLUMNS"]) for width in shape.widths)
    _expand_kernel[(tiles.shape[0], blocks)](
        planes,
        pool,
        gains,
        table,
        tiles,
        y,
        bias,
        *shape.widths,
        *(0,) * (MAX_SLICES - len(shape.widths)),
        y.stride(0),
        planes.stride(0),
        planes.stride(1),
        planes.shape[2],
        **constants,
        num_warps=kind.num_warps,
        num_stages=kind.num_stages,
    )


def _check_site(planes: Tensor, gains: Tensor, y: Tensor, bias: Tensor | None, shape: SiteShape, splits: int) -> None:
    if y.shape[1] != shape.out_features:
        raise ValueError(f"y has {y.shape[1]} columns, the site {shape.out_features}")
    if not 1 <= splits <= planes.shape[0] or planes.shape[1] < y.shape[0]:
        raise ValueError(f"planes {tuple(planes.shape)} hold less than {splits} splits of {y.shape[0]} rows")
    if gains.dtype != torch.float32 or gains.dim() != 1 or not gains.is_contiguous():
        raise ValueError(f"gains are flat float32, not {gains.dtype} {tuple(gains.shape)}")
    if bias is not None and (bias.dtype != y.dtype or bias.shape != y.shape[1:] or not bias.is_contiguous()):
        raise ValueError(f"the bias is {y.dtype} [{y.shape[1]}], not {bias.dtype} {tuple(bias.shape)}")


def _constants(kind: ExpandShape, splits: int, element_size: int) -> dict[str, int]:
    block_rank, block_columns = kind.blocks(element_size)
    return {
        "FIELDS": FIELDS,
        "SLICE_START": SLICE_START,
        "SLICE_FIELDS": SLICE_FIELDS,
        "ALIGN": ALIGN,
        "SPLITS": splits,
        "ROWS": kind.rows,
        "BLOCK_RANK": block_rank,
        "BLOCK_COLUMNS": block_columns,
    }


def compile_cases() -> list[CompileCase]:
    """Both kinds at the qkv projection of Llama-3-8B, with a bias as in Qwen2, and at its down projection."""
    kinds = {"decode": (LORA_EXPAND_DECODE, LORA_SHRINK_DECODE), "prefill": (LORA_EXPAND_PREFILL, LORA_SHRINK_PREFILL)}
    return [
        _case(
            f"lora_expand/{name}/{in_features}/{dtype}{'/bias' * bias}", dtype, kind, shrink.splits(in_features), bias
        )
        for name, (kind, shrink) in kinds.items()
        for in_features, dtype, bias in (
            (4096, "bf16", False),
            (4096, "bf16", True),
            (4096, "fp16", False),
            (4096, "fp32", True),
            (14336, "bf16", False),
        )
    ]


def _case(name: str, dtype: str, kind: ExpandShape, splits: int, bias: bool) -> CompileCase:
    pointers = {
        "planes": "*fp32",
        "pool": f"*{dtype}",
        "gains": "*fp32",
        "table": "*i64",
        "tiles": "*i32",
        "y": f"*{dtype}",
        "bias": f"*{dtype}" if bias else "constexpr",
    }
    numbers = ("width_0", "width_1", "width_2", "y_stride", "plane_stride", "row_stride", "ranks")
    constants = _constants(kind, splits, 4 if dtype == "fp32" else 2)
    return CompileCase(
        name=name,
        kernel=_expand_kernel,
        signature={**pointers, **dict.fromkeys(numbers, "i32"), **dict.fromkeys(constants, "constexpr")},
        constants=constants if bias else {**constants, "bias": None},
        divisible=tuple(n for n in (*pointers, *numbers) if bias or n != "bias"),
        num_warps=kind.num_warps,
        num_stages=kind.num_stages,
        tensor_cores=dtype != "fp32",
    )
