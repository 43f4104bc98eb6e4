"""Paged attention in float64, one row and one head at a time, keys fetched one by one from their blocks."""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["paged_decode", "paged_prefill"]


def paged_decode(
    q: Tensor,
    pool: Tensor,
    layer: int,
    tables: Tensor,
    contexts: Tensor,
    out: Tensor,
    scratch: object = None,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    kv_scales: Tensor | None = None,
) -> None:
    """As `lamina_kernels.gpu.attention_decode.paged_decode`, which needs the scratch."""
    for row, context in enumerate(contexts.tolist()):
        out[row] = 0
        if context:
            low = 0 if window is None else max(context - window, 0)
            keys, values = _fetch(pool, layer, tables[row], low, context, kv_scales)
            out[row] = _attend(q[row], keys, values, scale, softcap).to(out.dtype)


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
    """As `lamina_kernels.gpu.attention_prefill.paged_prefill`."""
    for sequence, first, rows, start in tiles.tolist():
        for i in range(rows if sequence >= 0 else 0):
            stop = min(start + i + 1, int(contexts[sequence]))
            low = 0 if window is None else max(start + i + 1 - window, 0)
            keys, values = _fetch(pool, layer, tables[sequence], low, stop, kv_scales)
            out[first + i] = _attend(q[first + i], keys, values, scale, softcap).to(out.dtype)


def _fetch(
    pool: Tensor, layer: int, table: Tensor, low: int, stop: int, kv_scales: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Keys and values [stop - low, KV heads, dim] of positions low to stop, float64."""
    size = pool.shape[3]
    both = torch.stack([pool[int(table[n // size]), :, layer, n % size].double() for n in range(low, stop)], dim=1)
    if kv_scales is not None:
        both = both * kv_scales[layer].double().view(2, 1, 1, 1)
    return both[0], both[1]


def _attend(q: Tensor, keys: Tensor, values: Tensor, scale: float, softcap: float | None) -> Tensor:
    """q [heads, dim] -> [heads * dim] float64."""
    heads = q.shape[0]
    group = heads // keys.shape[1]
    out = []
    for head in range(heads):
        scores = scale * (keys[:, head // group] @ q[head].double())
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        weights = [math.exp(score - float(scores.max())) for score in scores.tolist()]
        total = math.fsum(weights)
        out.append(torch.tensor(weights, dtype=torch.float64, device=q.device) / total @ values[:, head // group])
    return torch.cat(out)
