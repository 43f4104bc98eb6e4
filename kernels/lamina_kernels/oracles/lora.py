"""Batched LoRA, one row and one slice at a time."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from lamina_kernels.lora import LoraWeights

__all__ = ["expand", "shrink"]


def shrink(x: Tensor, weights: Sequence[LoraWeights], rows: Sequence[tuple[int, int]], h: Tensor) -> None:
    """As `lamina_kernels.lora.shrink`."""
    for lora, (start, stop) in zip(weights, rows, strict=True):
        for row in range(start, stop):
            for rank in range(lora.a.shape[0]):
                h[row, rank] = (x[row] * lora.a[rank].to(x.dtype)).sum()


def expand(
    h: Tensor,
    weights: Sequence[LoraWeights],
    rows: Sequence[tuple[int, int]],
    y: Tensor,
    bias: Tensor | None = None,
) -> None:
    """As `lamina_kernels.lora.expand`."""
    for lora, (start, stop) in zip(weights, rows, strict=True):
        for row in range(start, stop):
            first = 0
            for number, (b, column) in enumerate(zip(lora.b, lora.columns, strict=True)):
                columns = slice(column, column + b.shape[1])
                for rank in range(b.shape[0]):
                    y[row, columns] += h[row, first + rank] * b[rank].to(y.dtype)
                gain = None if lora.gains is None else lora.gains[number]
                if gain is not None:
                    shift = 0 if bias is None else bias[columns].to(y.dtype)
                    y[row, columns] = gain.to(y.dtype) * (y[row, columns] - shift) + shift
                first += b.shape[0]
