"""RMS norm by its formula, in float64."""

from __future__ import annotations

from torch import Tensor

__all__ = ["add_rms_norm", "rms_norm"]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As `lamina_kernels.gpu.norm.rms_norm`."""
    wide = x.double()
    y = wide / (wide.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double()
    return y.to(x.dtype)


def add_rms_norm(h: Tensor, delta: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As `lamina_kernels.gpu.norm.add_rms_norm`."""
    h.copy_(h.double() + delta.double())
    return rms_norm(h, weight, eps)
