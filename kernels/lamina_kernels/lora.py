"""Batched LoRA in plain torch: what every kernel must compute, on any device, and the fallback where none fits.

y[rows] += (x[rows] · Aᵀ) · B, each segment of rows with its own adapter. `shrink` is the first product, for all slices
of a fused projection at once; `expand` the second, slice by slice into its columns of y.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

__all__ = [
    "LoraSegments",
    "LoraTable",
    "LoraWeights",
    "PreparedLora",
    "SlotTable",
    "TorchLora",
    "TorchLoraTable",
    "expand",
    "shrink",
]

Rows = tuple[int, int]  # (first row, row after the last)


@dataclass(frozen=True)
class LoraWeights:
    """One adapter at one fused site: A [R, in] stacks its slices' A; slice s has B_s [r_s, out_s], times the scaling.

    `columns[s]` is the slice's first column in the fused output. Only the slices that the adapter changes are there:
    R is the sum of their real ranks. `gains[s]` [out_s] float32, if any, makes the slice a DoRA one: its outputs become
    gain * (W x + B A x) + bias, where gain = magnitude / ||W + B A|| by output row (Liu et al., "DoRA", 2024).
    """

    a: Tensor
    b: tuple[Tensor, ...]
    columns: tuple[int, ...]
    gains: tuple[Tensor | None, ...] | None = None

    def __post_init__(self) -> None:
        gains = self.gains if self.gains is not None else (None,) * len(self.b)
        widths = [b.shape[1:] for b in self.b]
        if len(gains) != len(widths) or any(
            g is not None and g.shape != width for g, width in zip(gains, widths, strict=True)
        ):
            raise ValueError("gains need one entry per slice: None, or as long as the slice is wide")
        if len(self.b) != len(self.columns) or sum(b.shape[0] for b in self.b) != self.a.shape[0]:
            raise ValueError("each slice needs B and a column, and A as many rows as the slices' ranks together")

    @property
    def rank(self) -> int:
        """R: rows of A."""
        return self.a.shape[0]

    def to(self, device: torch.device) -> LoraWeights:
        gains = None if self.gains is None else tuple(None if g is None else g.to(device) for g in self.gains)
        return LoraWeights(self.a.to(device), tuple(b.to(device) for b in self.b), self.columns, gains)

    @cached_property
    def nbytes(self) -> int:
        gains = [gain for gain in self.gains or () if gain is not None]
        return sum(t.numel() * t.element_size() for t in (self.a, *self.b, *gains))


def shrink(x: Tensor, weights: Sequence[LoraWeights], rows: Sequence[Rows], h: Tensor) -> None:
    """h[start:stop, :R_i] = x[start:stop] · A_iᵀ for each segment i; the rest of h is left as it is.

    x [T, in], h [T, >= max R_i], one dtype and device.
    """
    for lora, (start, stop) in zip(weights, rows, strict=True):
        torch.mm(x[start:stop], lora.a.t(), out=h[start:stop, : lora.rank])


def expand(
    h: Tensor, weights: Sequence[LoraWeights], rows: Sequence[Rows], y: Tensor, bias: Tensor | None = None
) -> None:
    """y[start:stop, columns of s] += h[start:stop, ranks of s] · B_s for each segment and each of its slices s.

    h [T, >= max R_i] from `shrink`, y [T, out]. Slices with gains become gain * (y - bias + h · B_s) + bias; `bias`
    [out] is what the base projection added to y.
    """
    for lora, (start, stop) in zip(weights, rows, strict=True):
        first = 0
        gains = lora.gains or (None,) * len(lora.b)
        for b, column, gain in zip(lora.b, lora.columns, gains, strict=True):
            rank, width = b.shape
            out = y[start:stop, column : column + width]
            out.addmm_(h[start:stop, first : first + rank], b)
            if gain is not None:
                _rescale(out, gain, None if bias is None else bias[column : column + width])
            first += rank


def _rescale(out: Tensor, gain: Tensor, bias: Tensor | None) -> None:
    wide = out.to(torch.promote_types(out.dtype, gain.dtype))
    shift = 0.0 if bias is None else bias.to(wide.dtype)
    out.copy_((wide - shift) * gain + shift)


class LoraSegments:
    """One step's rows by slot: (slot, start, stop), built once and used at every layer and site.

    Raises ValueError unless segments are not empty, do not overlap and have no negative number. Rows in none of them
    are base rows.
    """

    def __init__(self, segments: Sequence[tuple[int, int, int]]) -> None:
        self.slots = tuple(slot for slot, _, _ in segments)
        self.rows: tuple[Rows, ...] = tuple((start, stop) for _, start, stop in segments)
        self.stop = max((stop for _, stop in self.rows), default=0)
        self.last_slot = max(self.slots, default=-1)
        self._check()

    def _check(self) -> None:
        end = 0
        for start, stop in sorted(self.rows):
            if not end <= start < stop:
                raise ValueError(f"segment [{start}, {stop}) is empty, negative or overlaps the one before it")
            end = stop
        if min(self.slots, default=0) < 0:
            raise ValueError("slots are numbered from 0")

    @cached_property
    def table(self) -> Tensor:
        """int32 [segments, 3] on the CPU, for kernels."""
        flat = [(slot, *rows) for slot, rows in zip(self.slots, self.rows, strict=True)]
        return torch.tensor(flat, dtype=torch.int32).view(-1, 3)


class PreparedLora(Protocol):
    """One adapter at every site, laid out for the kind of table that prepared it."""

    @property
    def nbytes(self) -> int: ...


class SlotTable(Protocol):
    """Every loaded adapter's weights at every site, laid out as one kernel wants them.

    A site index numbers the fused sites of all layers from 0. Not safe for concurrent use, `prepare` apart.
    """

    def prepare(self, weights: Sequence[LoraWeights | None]) -> PreparedLora:
        """Lays out one adapter: one entry per site index, None where it changes nothing. Any thread may call this."""
        ...

    def put(self, slot: int, prepared: PreparedLora) -> None:
        """Fills a slot, quickly; TypeError if another kind of table prepared the weights."""
        ...

    def drop(self, slot: int) -> None:
        """Forgets the slot's weights."""
        ...


@runtime_checkable
class LoraTable(SlotTable, Protocol):
    """One that computes from a step's segments on the host. It owns scratch memory."""

    def apply(self, site: int, segments: LoraSegments, x: Tensor, y: Tensor, bias: Tensor | None = None) -> None:
        """Adds each segment's change to y [T, out] in place; x [T, in]. Rows outside every segment stay as they are.

        `bias` [out] is what the base projection added to y: DoRA does not scale it.
        """
        ...


@dataclass(frozen=True)
class TorchLora:
    """Prepared for `TorchLoraTable`: the weights as they are."""

    sites: tuple[LoraWeights | None, ...]

    @property
    def nbytes(self) -> int:
        return sum(lora.nbytes for lora in self.sites if lora is not None)


class TorchLoraTable:
    """A LoraTable of torch's own matrix products: two or more per segment and site."""

    def __init__(self, sites: int, device: torch.device | None = None) -> None:
        """`device`: where steps run; None: where the weights are."""
        self._weights: list[dict[int, LoraWeights]] = [{} for _ in range(sites)]
        self._device = device

    def prepare(self, weights: Sequence[LoraWeights | None]) -> TorchLora:
        device = self._device
        if device is None:
            return TorchLora(tuple(weights))
        return TorchLora(tuple(None if lora is None else lora.to(device) for lora in weights))

    def put(self, slot: int, prepared: PreparedLora) -> None:
        if not isinstance(prepared, TorchLora):
            raise TypeError(f"{type(prepared).__name__} was prepared for another kernel")
        for at_site, lora in zip(self._weights, prepared.sites, strict=True):
            at_site.pop(slot, None)
            if lora is not None:
                at_site[slot] = lora

    def drop(self, slot: int) -> None:
        for at_site in self._weights:
            at_site.pop(slot, None)

    def apply(self, site: int, segments: LoraSegments, x: Tensor, y: Tensor, bias: Tensor | None = None) -> None:
        at_site = self._weights[site]
        active = [(at_site[s], rows) for s, rows in zip(segments.slots, segments.rows, strict=True) if s in at_site]
        if not active:
            return
        weights, rows = zip(*active, strict=True)
        h = x.new_empty(segments.stop, max(lora.rank for lora in weights))
        shrink(x, weights, rows, h)
        expand(h, weights, rows, y, bias)
