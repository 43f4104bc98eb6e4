"""Which rows each program of a LoRA kernel works on: a step's segments cut into tiles of at most `tile_rows` rows.

    rows       0         5             12     14                 31
    segments   | slot 2  | base rows    | slot 0 | slot 7          |          (slot, first row, row after the last)
    tiles      (2, 0, 5)                (0, 12, 2) (7, 14, 16) (7, 30, 1)     tile_rows = 16: (slot, first row, rows)
    padding    (-1, 0, 0) ...                                                 up to the capacity that a graph captured

A tile never mixes adapters, so one program multiplies its rows by one adapter's weights. Base rows are in no tile and
cost nothing; padding leaves at once. Decode rows and prefill rows have tiles of different heights, because one to a
few rows per adapter want little waste and long segments want the wide matrix instructions. A row's kind is its own
property, so its result does not depend on which other rows share the launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lamina_kernels.gpu.tuned import DECODE_ROWS, PREFILL_ROWS

__all__ = ["DECODE_ROWS", "PREFILL_ROWS", "LoraTiles", "build_tiles", "tile_capacity"]

TILE_FIELDS = 3  # slot, first row, rows


@dataclass(frozen=True)
class LoraTiles:
    """One step's tiles on the device: int32 [n, 3], decode rows and prefill rows apart."""

    decode: Tensor
    prefill: Tensor

    def __post_init__(self) -> None:
        for tiles in (self.decode, self.prefill):
            if tiles.dtype != torch.int32 or tiles.dim() != 2 or tiles.shape[1] != TILE_FIELDS:
                raise ValueError(f"tiles are int32 [n, 3], not {tiles.dtype} {tuple(tiles.shape)}")


def tile_capacity(rows: int, segments: int, tile_rows: int) -> int:
    """The most tiles that at most `rows` rows in at most `segments` segments can need."""
    used = min(rows, segments)
    return used + (rows - used) // tile_rows if used else 0


def build_tiles(
    segments: Sequence[tuple[int, int, int]], tile_rows: int, capacity: int | None = None
) -> npt.NDArray[np.int32]:
    """int32 [n, 3] (slot, first row, rows), at most `tile_rows` rows each; padded with slot -1 up to `capacity`.

    Segments are (slot, start, stop), sorted by start. Raises ValueError for an empty, negative, overlapping or unsorted
    segment, a negative slot, or more tiles than the capacity.
    """
    if tile_rows < 1:
        raise ValueError(f"a tile has at least one row, not {tile_rows}")
    slots, start, stop = np.asarray(segments, dtype=np.int64).reshape(-1, 3).T
    if (slots < 0).any() or (start < 0).any() or (stop <= start).any() or (start[1:] < stop[:-1]).any():
        raise ValueError("segments are sorted, without overlap, none empty, slots and rows numbered from 0")
    counts = -(-(stop - start) // tile_rows)
    total = int(counts.sum())
    if capacity is not None and total > capacity:
        raise ValueError(f"{total} tiles do not fit into a capacity of {capacity}")
    tiles = np.zeros((total if capacity is None else capacity, TILE_FIELDS), dtype=np.int32)
    tiles[total:, 0] = -1
    within = np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts)
    first = np.repeat(start, counts) + within * tile_rows
    tiles[:total, 0] = np.repeat(slots, counts)
    tiles[:total, 1] = first
    tiles[:total, 2] = np.minimum(np.repeat(stop, counts) - first, tile_rows)
    return tiles
