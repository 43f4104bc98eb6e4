"""Rotary position embedding: angles once per step for all layers, rotation in place."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lamina.models.rope_config import RopeConfig

__all__ = ["Rope", "Rotation", "inverse_frequencies"]


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Angle per position for each pair of dimensions: [head_dim / 2] float32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        return _llama3(frequencies, rope)
    return frequencies


def _llama3(frequencies: Tensor, rope: RopeConfig) -> Tensor:
    """Slows down waves longer than the original context, leaves short ones, and blends between (Llama 3.1)."""
    turns = rope.original_max_context * frequencies / (2.0 * math.pi)  # of each wave within the original context
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1.0 - blend) * frequencies / rope.factor + blend * frequencies


class Rotation:
    """The rotation of one step's tokens."""

    __slots__ = ("_half", "cos", "signed_sin")

    def __init__(self, cos: Tensor, signed_sin: Tensor) -> None:
        """Both [T, 1, head_dim]; `signed_sin` has its first half negated."""
        self.cos, self.signed_sin = cos, signed_sin
        self._half = cos.shape[-1] // 2

    def __call__(self, heads: Tensor) -> None:
        """Rotates heads [T, any number, head_dim] in place: (a, b) -> (a cos - b sin, b cos + a sin)."""
        swapped = heads.roll(self._half, -1)
        heads.mul_(self.cos).addcmul_(swapped, self.signed_sin)


class Rope:
    """Makes rotations. Immutable."""

    __slots__ = ("_dtype", "_signed")

    def __init__(self, rope: RopeConfig, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        frequencies = inverse_frequencies(rope, head_dim)
        # sin is odd and cos even, so negative frequencies give (-sin, sin) and (cos, cos) without another operation.
        self._signed = torch.cat((-frequencies, frequencies)).to(device)
        self._dtype = dtype

    def at(self, positions: Tensor) -> Rotation:
        """positions [T] int64."""
        angles = positions.to(torch.float32)[:, None, None] * self._signed
        return Rotation(angles.cos().to(self._dtype), angles.sin().to(self._dtype))
