"""DoRA (Liu et al., 2024): an adapter that also sets the length of each row of the base weight.

With W the base weight, A and B the adapter's and s its scaling, the projection becomes

    y = gain * (W x + s B A x) + bias,    gain = magnitude / ||W + s B A||, the norm of each output row

The norm needs W, but not x, so it is taken once, when the adapter is loaded.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

__all__ = ["BaseWeights", "dora_gains"]

_PIECE = 4 << 20  # elements of W + s B A at a time: 16 MiB in float32


class BaseWeights(Protocol):
    """The base model's plain weights, one projection at a time."""

    def rows(self, layer: int, target: str) -> Tensor:
        """W [out, in] of `target`, e.g. "q_proj", with the values that the model computes with. It may be read anew."""
        ...


def dora_gains(weight: Tensor, a: Tensor, b: Tensor, magnitude: Tensor) -> Tensor:
    """float32 [out] for weight [out, in] of any float dtype, and float32 A [r, in], B [out, r] times its scaling and
    magnitude [out], all on the CPU. A row of zeros gives infinity or NaN.

    Raises ValueError unless the shapes agree.
    """
    outputs, inputs = weight.shape
    if a.shape != (b.shape[1], inputs) or b.shape[0] != outputs or magnitude.shape != (outputs,):
        shapes = [list(tensor.shape) for tensor in (weight, a, b, magnitude)]
        raise ValueError(f"W, A, B and the magnitude have shapes {shapes}, which do not fit each other")
    count = max(1, _PIECE // inputs)
    pieces = zip(torch.split(weight, count), torch.split(b, count), strict=True)
    return magnitude / torch.cat([torch.addmm(w.float(), left, a).norm(dim=1) for w, left in pieces])
