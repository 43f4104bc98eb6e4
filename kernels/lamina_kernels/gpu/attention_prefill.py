"""Attention of prompt chunks over paged keys and values."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from lamina_kernels.gpu.attention_pool import check_attention

__all__ = ["build_prefill_tiles", "paged_prefill", "prefill_tile_rows"]


def prefill_tile_rows(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Rows of one tile: what `build_prefill_tiles` must be given for `paged_prefill` of these shapes."""
    return 64 // (heads // kv_heads)


def build_prefill_tiles(
    spans: Sequence[tuple[int, int, int, int]], tile_rows: int, capacity: int | None = None
) -> np.ndarray:
    """Cuts the chunks of a step into tiles.

    spans: (sequence, first row of q, rows, position of the first row) of each chunk. Returns int32 [n, 4] of
    (sequence, first row, rows, position of the first row); with a capacity, [capacity, 4], the unused ones with
    sequence -1. Raises ValueError if they do not fit.
    """
    raise NotImplementedError


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

    tables int32 [B, max_blocks], tiles int32 [n, 4] of `build_prefill_tiles`, contexts int32 [B] (keys of each sequence
    in the pool, the chunk's included). Rows in no tile stay as they are.
    """
    check_attention(
        q, pool, layer, tables, contexts, out, scale=scale, window=window, softcap=softcap, kv_scales=kv_scales
    )
    raise NotImplementedError
