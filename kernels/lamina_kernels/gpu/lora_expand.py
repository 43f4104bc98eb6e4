"""y[rows, columns of slice s] += h_s . B_s for every adapter of a step and every slice of a fused site, in one launch.

    h = planes[0, row] + planes[1, row] + ...        in this order, in fp32, then rounded to the pool's dtype
    d = h[h_s : h_s + r_s] . B_s                     B_s [r_s, width_s] holds the adapter's scaling
    y = y + d                                        plain LoRA
    y = g * (y - bias + d) + bias                    DoRA, g = gains[g_s + column]: scales W + dW but not the bias

Tiling: program (tile, c) owns the tile's rows and one block of columns. Column blocks of all slices are numbered through,
slice after slice (a ragged grid laid flat), so slices of different width waste no program. It loops over the slice's real
rank in blocks. A slice that the adapter leaves alone (r_s = 0) costs a few loads. y is read and written once.

Determinism: planes are summed in order by each program that needs them; a column of a row is written by one program.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lamina_kernels.gpu.compile_case import CompileCase
from lamina_kernels.gpu.lora_checks import check_pool, check_rows
from lamina_kernels.gpu.lora_layout import ALIGN, FIELDS, MAX_SLICES, SLICE_FIELDS, SLICE_START, SiteShape
from lamina_kernels.gpu.tuned import LORA_EXPAND_DECODE, LORA_EXPAND_PREFILL, LORA_SHRINK_DECODE, LORA_SHRINK_PREFILL
from lamina_kernels.gpu.tuned import ExpandShape

__all__ = ["compile_cases", "expand"]


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
    """Adds each row's own adapter to y in place: y[row, columns of s] += h_s . B_s, with DoRA's gains where it has them.

    planes float32 [>= splits, >= T, >= every R], from `shrink` with the same tiles; pool [N]; gains float32 [G]; table int64
    [slots, FIELDS], one site's rows (`lora_layout`); tiles int32 [n, 3] for `kind.rows`; y [T, out], the pool's dtype, rows
    may be strided; bias [out] of the base layer, or None. Rows in no tile and slices of rank 0 keep their bits. Raises
    ValueError or TypeError for wrong shapes, dtypes or strides; numbers inside `table` and `tiles` are trusted.
    """
    raise NotImplementedError
