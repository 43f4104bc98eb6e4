"""LoRA on the device's layout (`gpu.lora_layout`), one row at a time, in float64.

Each function has its kernel's signature. Planes may be float64 here; where they are float32, only storing rounds.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from lamina_kernels.gpu.lora_layout import SLICE_FIELDS, SLICE_START, SiteShape, padded
from lamina_kernels.gpu.tuned import ExpandShape, ShrinkShape

__all__ = ["embed_shrink", "expand", "shrink"]


def shrink(x: Tensor, pool: Tensor, table: Tensor, tiles: Tensor, planes: Tensor, *, kind: ShrinkShape) -> None:
    """As `lamina_kernels.gpu.lora_shrink.shrink`."""
    in_features = x.shape[1]
    chunk = kind.chunk(in_features)
    for slot, row in _rows(tiles):
        rank = int(table[slot, 1])
        a = _matrix(pool, int(table[slot, 0]), rank, in_features)
        for split in range(kind.splits(in_features)):
            part = slice(split * chunk, min((split + 1) * chunk, in_features))
            planes[split, row, :rank] = (a[:, part] @ x[row, part].double()).to(planes.dtype)


def embed_shrink(
    token_ids: Tensor, pool: Tensor, table: Tensor, tiles: Tensor, planes: Tensor, *, vocab: int, tile_rows: int
) -> None:
    """As `lamina_kernels.gpu.lora_embed.embed_shrink`."""
    for slot, row in _rows(tiles):
        rank, token = int(table[slot, 1]), int(token_ids[row])
        planes[0, row, :rank] = 0
        if 0 <= token < vocab:
            planes[0, row, :rank] = _matrix(pool, int(table[slot, 0]), vocab, rank)[token].to(planes.dtype)


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
    """As `lamina_kernels.gpu.lora_expand.expand`, but h is not rounded to the pool's dtype."""
    for slot, row in _rows(tiles):
        h = planes[:splits, row].double().sum(0)
        for s, (first, width) in enumerate(zip(shape.columns, shape.widths, strict=True)):
            field = SLICE_START + s * SLICE_FIELDS
            b_offset, rank, first_rank, gain = table[slot, field : field + SLICE_FIELDS].tolist()
            if rank == 0:
                continue
            columns = slice(first, first + width)
            delta = h[first_rank : first_rank + rank] @ _matrix(pool, b_offset, rank, width)
            changed = y[row, columns].double() + delta
            if gain >= 0:
                base = torch.zeros(width) if bias is None else bias[columns].double()
                changed = gains[gain : gain + width].double() * (changed - base) + base
            y[row, columns] = changed.to(y.dtype)


def _rows(tiles: Tensor) -> Iterator[tuple[int, int]]:
    """(slot, row) of every row in a tile."""
    for slot, first, count in tiles.tolist():
        if slot >= 0:
            yield from ((slot, row) for row in range(first, first + count))


def _matrix(pool: Tensor, offset: int, rows: int, width: int) -> Tensor:
    """float64 [rows, width] from padded rows in the pool."""
    return pool[offset : offset + rows * padded(width)].view(rows, padded(width))[:, :width].double()
