"""What the LoRA launchers check before they hand pointers to a kernel: shapes, dtypes and strides, never values."""

from __future__ import annotations

import torch
from torch import Tensor

from lamina_kernels.gpu.lora_layout import FIELDS

__all__ = ["check_pool", "check_rows"]

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def check_rows(name: str, rows: Tensor, dtype: torch.dtype) -> None:
    """[T, width] of the pool's dtype, elements of a row side by side."""
    if rows.dtype != dtype or dtype not in _DTYPES:
        raise TypeError(f"{name} and the pool share one of {_DTYPES}, not {rows.dtype} and {dtype}")
    if rows.dim() != 2 or not rows.shape[1] or rows.stride(1) != 1:
        raise ValueError(f"{name} is [T, width] with unit stride, not {tuple(rows.shape)} strides {rows.stride()}")


def check_pool(pool: Tensor, table: Tensor, tiles: Tensor, planes: Tensor) -> None:
    """Flat pool, one site's rows of the table, tiles and planes."""
    if pool.dim() != 1 or not pool.is_contiguous():
        raise ValueError(f"the pool is flat and contiguous, not {tuple(pool.shape)}")
    if table.dtype != torch.int64 or tiles.dtype != torch.int32 or planes.dtype != torch.float32:
        raise TypeError(f"int64 table, int32 tiles, float32 planes, not {table.dtype}, {tiles.dtype}, {planes.dtype}")
    if table.dim() != 2 or table.shape[1] != FIELDS or not table.is_contiguous():
        raise ValueError(f"the table is contiguous [slots, {FIELDS}], not {tuple(table.shape)}")
    if tiles.dim() != 2 or tiles.shape[1] != 3 or not tiles.is_contiguous():
        raise ValueError(f"tiles are contiguous [n, 3], not {tuple(tiles.shape)}")
    if planes.dim() != 3 or planes.stride(2) != 1:
        raise ValueError(f"planes are [splits, rows, ranks] with unit stride, not {tuple(planes.shape)}")
