"""Random adapters on the device, in the layout that the LoRA kernels read (`lamina_kernels.gpu.lora_layout`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_setup import DEVICE
from lamina_kernels.gpu.lora_layout import FIELDS, SLICE_FIELDS, SLICE_START, SiteShape, padded
from shapes import Shape

__all__ = ["Resident", "resident", "site_shapes", "split_rows"]


@dataclass(frozen=True)
class Resident:
    """`table[site, slot]` says where the adapter in `slot` lies at that site."""

    pool: Tensor  # flat, of the computing type
    gains: Tensor  # float32, DoRA's
    table: Tensor  # int64 [sites, slots, FIELDS]
    max_rank: int  # largest R of a site and slot


def site_shapes(shape: Shape, layers: int) -> list[SiteShape]:
    """The fused sites of `layers` layers, in the model's order."""
    return [SiteShape(site.inputs, site.widths) for site in shape.sites] * layers


def resident(
    sites: Sequence[SiteShape], ranks: Sequence[int], dtype: torch.dtype, *, dora: bool = False, seed: int = 0
) -> Resident:
    """One adapter of each rank, on every slice of every site; a rank of 0 leaves an adapter without effect."""
    table = torch.zeros(len(sites), len(ranks), FIELDS, dtype=torch.int64)
    table[:, :, [SLICE_START + SLICE_FIELDS * s + 3 for s in range(3)]] = -1
    end = gains = 0
    for number, site in enumerate(sites):
        for slot, rank in enumerate(ranks):
            if not rank:
                continue
            row = table[number, slot]
            row[0], row[1] = end, rank * len(site.widths)
            end += int(row[1]) * padded(site.in_features)
            for s, width in enumerate(site.widths):
                at = SLICE_START + SLICE_FIELDS * s
                row[at], row[at + 1], row[at + 2] = end, rank, s * rank
                end += rank * padded(width)
                if dora:
                    row[at + 3], gains = gains, gains + width
    generator = torch.Generator(device=DEVICE).manual_seed(seed)
    pool = torch.empty(max(end, 8), dtype=dtype, device=DEVICE).normal_(0, 0.05, generator=generator)
    gain = torch.rand(max(gains, 1), device=DEVICE, generator=generator) + 0.5
    return Resident(pool, gain, table.to(DEVICE), int(table[:, :, 1].max()))


def split_rows(rows: int, parts: Sequence[int]) -> list[tuple[int, int, int]]:
    """Segments (slot, start, stop): `rows` rows dealt evenly to the slots in `parts`; who gets none is left out."""
    each, more = divmod(rows, len(parts)) if parts else (0, 0)
    segments, start = [], 0
    for number, slot in enumerate(parts):
        stop = start + each + (number < more)
        if stop > start:
            segments.append((slot, start, stop))
        start = stop
    return segments
