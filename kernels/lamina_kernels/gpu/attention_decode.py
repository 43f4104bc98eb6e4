"""Attention of decode rows over paged keys and values."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lamina_kernels.gpu.attention_pool import check_attention

__all__ = ["SPLITS", "DecodeScratch", "paged_decode"]

SPLITS = 16


@dataclass(frozen=True, slots=True)
class DecodeScratch:
    """Room for the parts of a row's keys, written and read within one `paged_decode`; any layers may share it."""

    partial: Tensor  # float32 [rows, heads, SPLITS, head_dim]
    stats: Tensor  # float32 [rows, heads, SPLITS, 2]: running maximum (base 2), running sum

    @classmethod
    def allocate(cls, rows: int, heads: int, head_dim: int, device: torch.device) -> DecodeScratch:
        """For up to `rows` decode rows."""
        partial = torch.empty((rows, heads, SPLITS, head_dim), dtype=torch.float32, device=device)
        return cls(partial, torch.empty((rows, heads, SPLITS, 2), dtype=torch.float32, device=device))


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

    tables int32 [B, max_blocks] and contexts int32 [B] (keys to attend to, this token's included). A row of context 0 is
    unused: its output is zero. The other arguments as in `paged_prefill`.
    """
    check_attention(
        q, pool, layer, tables, contexts, out, scale=scale, window=window, softcap=softcap, kv_scales=kv_scales
    )
    raise NotImplementedError
