"""Batched LoRA on torch operators: y[rows] += (x[rows] · Aᵀ) · B for each segment's adapter.

Shapes of one segment of n rows at one fused site:

    x [n, in]   A [R, in]          all slices' A stacked, R = sum of their real ranks: one shrink
    h [n, R]    B_s [r_s, out_s]   one slice's B, transposed and scaled; its h are columns [first, first + r_s)
    y [n, out]  slice s owns columns [column, column + out_s): one expand per slice, in place
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["SiteWeights", "Slice", "add_lora"]


@dataclass(frozen=True, slots=True)
class Slice:
    """One projection inside a fused site."""

    first: int  # first column of h
    column: int  # first column of y
    b: Tensor  # [rank, out], scaled


@dataclass(frozen=True, slots=True)
class SiteWeights:
    """One adapter's weights at one fused site of one layer; only the slices that it changes."""

    a: Tensor  # [sum of ranks, in]
    slices: tuple[Slice, ...]


def add_lora(x: Tensor, y: Tensor, segments: Sequence[tuple[int, int, SiteWeights]]) -> None:
    """Adds each segment (start row, stop row, weights) into y [T, out] in place; x is [T, in], other rows stay.

    A row's result depends only on its own segment.
    """
    for start, stop, weights in segments:
        hidden = torch.mm(x[start:stop], weights.a.t())
        rows = y[start:stop]
        for part in weights.slices:
            rank, width = part.b.shape
            rows[:, part.column : part.column + width].addmm_(hidden[:, part.first : part.first + rank], part.b)
