"""Rotary embedding and the write into the pool, token by token, in float64."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["rotate_write"]


def rotate_write(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    signed_sin: Tensor,
    pool: Tensor,
    layer: int,
    slots: Tensor,
    kv_scales: Tensor | None,
) -> None:
    """As `lamina_kernels.gpu.rotate_write.rotate_write`."""
    for t, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        block, offset = divmod(slot, pool.shape[3])
        q[t] = _rotated(q[t], cos[t], signed_sin[t])
        _write(pool[block, 0, layer, offset], _rotated(k[t], cos[t], signed_sin[t]), kv_scales, layer, 0)
        _write(pool[block, 1, layer, offset], v[t].double(), kv_scales, layer, 1)


def _rotated(heads: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    wide = heads.double()
    return wide * cos.double() + wide.roll(wide.shape[-1] // 2, -1) * signed_sin.double()


def _write(row: Tensor, heads: Tensor, kv_scales: Tensor | None, layer: int, side: int) -> None:
    if kv_scales is not None:
        largest = torch.finfo(row.dtype).max
        heads = (heads / kv_scales[layer, side].double()).clamp(-largest, largest)
    row.copy_(heads)
