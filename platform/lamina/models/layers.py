"""The parts of a decoder layer: linear maps, norms, activations. Plain tensors, inference only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from lamina.models.interface import Linear

__all__ = ["GATED", "DenseLinear", "LayerOps", "Norm", "RmsNorm", "TorchOps", "identity", "linear"]


class Norm(Protocol):
    def __call__(self, x: Tensor) -> Tensor:
        """The norm of x over its last dimension: new, in x's dtype."""
        ...

    def add(self, h: Tensor, delta: Tensor) -> Tensor:
        """h += delta in place; returns the norm of the sum."""
        ...


class LayerOps(Protocol):
    """What a decoder layer needs beside attention, from whoever computes it best on a device."""

    def linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        """For weight [out, in] and bias [out]. The caller should drop its own references."""
        ...

    def norm(self, weight: Tensor, eps: float) -> Norm:
        """RMSNorm: x / sqrt(mean(x²) + eps) * weight, float32 inside; weight float32 [dim] or [heads, dim]."""
        ...

    def gated(self, activation: str) -> Callable[[Tensor], Tensor]:
        """[T, 2 * inner] -> [T, inner]: the activation ("silu" or "gelu_tanh") of the first half times the second."""
        ...


_PACK_FOR_ROWS = 32  # the batch that packed weights are laid out for; 1 costs 20-40 % at M >= 8, 256 changes nothing


def linear(weight: Tensor, bias: Tensor | None) -> Linear:
    """The fastest linear map here for weight [out, in] and bias [out]. The caller should drop its own reference.

    float32 weights on a CPU are packed once into oneDNN's blocked layout. Measured on Zen 3 (torch 2.13, 2 threads,
    the 30 x 4 layer projections of SmolLM2-135M one after the other, weights not in cache), milliseconds:

        rows                           1     2     4     8    16
        F.linear(x, w)                59   101    96   100   121
        torch.mm(x, w_t_contiguous)   46    65   115   118   140
        packed                        69    41    46    54    67

    and for its lm_head [49152, 576], 1 thread, GFLOP/s at 1 / 4 / 32 / 64 rows: F.linear 4 / 6 / 28 / 33, F.linear in
    pieces of 3072 columns 3 / 7 / 36 / 38, packed 4 / 13 / 48 / 56.
    """
    if _is_packable(weight):
        return _PackedLinear(weight, bias)
    return DenseLinear(weight, bias)


def _is_packable(weight: Tensor) -> bool:
    return weight.device.type == "cpu" and weight.dtype == torch.float32 and torch._C._has_mkldnn


class DenseLinear:
    """torch's own product; its weight [out, in] can be moved."""

    __slots__ = ("bias", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def move(self, weight: Tensor, bias: Tensor | None) -> None:
        """Copies weight and bias into the given tensors and computes with those from now on."""
        weight.copy_(self.weight)
        if self.bias is not None and bias is not None:
            bias.copy_(self.bias)
        self.weight, self.bias = weight, bias


class _PackedLinear:
    __slots__ = ("_weight", "bias")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, _PACK_FOR_ROWS)
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self.bias, "none", [], "")
        return y


class RmsNorm:
    """y = x / sqrt(mean(x²) + eps) * w over the last dimension, in float32 inside; y is new and has x's dtype.

    `weight` [..., dim] broadcasts against x: one call can norm heads that have different weights.
    """

    __slots__ = ("_dim", "_eps", "_share", "_weight")

    def __init__(self, weight: Tensor, eps: float) -> None:
        self._weight = weight.float()
        self._dim = weight.shape[-1]
        self._share = 1.0 / self._dim
        self._eps = torch.tensor(eps, dtype=torch.float32, device=weight.device)

    def __call__(self, x: Tensor) -> Tensor:
        # The norm's length in one operation, where square and mean are two, and F.rms_norm on CPU is six:
        # 14 µs against 22 µs for one row of 576, 61 times a step.
        wide = x.float()
        length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        factor = torch.addcmul(self._eps, length, length, value=self._share).rsqrt_()
        return torch.mul(wide, factor).mul_(self._weight).to(x.dtype)

    def add(self, h: Tensor, delta: Tensor) -> Tensor:
        return self(h.add_(delta))


def identity(x: Tensor) -> Tensor:
    """Stands where an architecture has no norm."""
    return x


def _silu_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def _gelu_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh").mul_(up)


GATED: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType({"silu": _silu_mul, "gelu_tanh": _gelu_mul})
"""ModelConfig.activation -> [T, 2 * inner] -> [T, inner]: activation of the first half times the second."""


class TorchOps:
    """`LayerOps` on torch's own operators, for any device."""

    def linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        return linear(weight, bias)

    def norm(self, weight: Tensor, eps: float) -> Norm:
        return RmsNorm(weight, eps)

    def gated(self, activation: str) -> Callable[[Tensor], Tensor]:
        return GATED[activation]
