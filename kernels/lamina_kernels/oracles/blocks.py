"""Whole blocks of the KV pool, one at a time. Plain torch: exact, and what runs where there is no GPU."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["clear_blocks", "copy_blocks", "gather_blocks", "scatter_blocks"]


def clear_blocks(pool: Tensor, ids: Tensor) -> None:
    """As `lamina_kernels.gpu.blocks.clear_blocks`."""
    for block in ids.tolist():
        if block >= 0:
            pool[block].zero_()


def copy_blocks(pool: Tensor, sources: Tensor, targets: Tensor) -> None:
    """As `lamina_kernels.gpu.blocks.copy_blocks`."""
    for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
        if source >= 0 and target >= 0:
            pool[target].copy_(pool[source])


def gather_blocks(pool: Tensor, ids: Tensor, out: Tensor) -> None:
    """As `lamina_kernels.gpu.blocks.gather_blocks`."""
    for row, block in enumerate(ids.tolist()):
        if block >= 0:
            _bytes(out[row]).copy_(_bytes(pool[block]))


def scatter_blocks(staged: Tensor, ids: Tensor, pool: Tensor) -> None:
    """As `lamina_kernels.gpu.blocks.scatter_blocks`."""
    for row, block in enumerate(ids.tolist()):
        if block >= 0:
            _bytes(pool[block]).copy_(_bytes(staged[row]))


def _bytes(row: Tensor) -> Tensor:
    return row.view(-1).view(torch.uint8)
