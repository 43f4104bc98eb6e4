"""`LayerOps` on Triton kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal

from torch import Tensor

from lamina.models.interface import Linear
from lamina.models.layers import DenseLinear, Norm
from lamina_kernels.gpu.gated import gated
from lamina_kernels.gpu.norm import add_rms_norm, rms_norm

__all__ = ["DeviceOps"]


class _DeviceNorm:
    __slots__ = ("_eps", "_weight")

    def __init__(self, weight: Tensor, eps: float) -> None:
        self._weight, self._eps = weight.float().contiguous(), eps

    def __call__(self, x: Tensor) -> Tensor:
        return rms_norm(x, self._weight, self._eps)

    def add(self, h: Tensor, delta: Tensor) -> Tensor:
        return add_rms_norm(h, delta, self._weight, self._eps)


class DeviceOps:
    """The library's matrix products; one launch for a sum with its norm, one for an activation with its product."""

    def linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        return DenseLinear(weight, bias)

    def norm(self, weight: Tensor, eps: float) -> Norm:
        return _DeviceNorm(weight, eps)

    def gated(self, activation: str) -> Callable[[Tensor], Tensor]:
        kinds: Mapping[str, Literal["silu", "gelu_tanh"]] = {"silu": "silu", "gelu_tanh": "gelu_tanh"}
        return partial(gated, activation=kinds[activation])
