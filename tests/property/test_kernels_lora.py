"""Shrink and expand together against float64, for drawn sites, ranks, adapters and segments of both kinds of row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fixtures.lora_device import TOLERANCE, DeviceSite, build_site, device_tiles, poisoned, rand
from lamina_kernels.gpu.lora_expand import expand
from lamina_kernels.gpu.lora_layout import SiteShape
from lamina_kernels.gpu.lora_shrink import shrink
from lamina_kernels.gpu.lora_tiles import DECODE_ROWS, build_tiles, tile_capacity
from lamina_kernels.gpu.tuned import (
    LORA_EXPAND_DECODE,
    LORA_EXPAND_PREFILL,
    LORA_SHRINK_DECODE,
    LORA_SHRINK_PREFILL,
    ExpandShape,
    ShrinkShape,
)
from lamina_kernels.oracles import lora_device as oracle

Segments = list[tuple[int, int, int]]
RANK = st.sampled_from([0, 1, 3, 7, 8, 16, 33, 64])
Kind = tuple[ShrinkShape, ExpandShape]
KINDS: tuple[Kind, Kind] = ((LORA_SHRINK_DECODE, LORA_EXPAND_DECODE), (LORA_SHRINK_PREFILL, LORA_EXPAND_PREFILL))


class Kernels(NamedTuple):
    shrink: Callable[..., None]
    expand: Callable[..., None]
    planes: torch.dtype


TRITON = Kernels(shrink, expand, torch.float32)
ORACLE = Kernels(oracle.shrink, oracle.expand, torch.float64)


@dataclass
class Step:
    """Rows [0, split) decode, rows [split, rows) prefill."""

    shape: SiteShape
    ranks: list[tuple[int, ...]]
    dora: list[int]
    rows: int
    decode: Segments
    prefill: Segments
    dtype: torch.dtype


@st.composite
def segments(draw: st.DrawFn, start: int, slots: int) -> Segments:
    """In any order of slots, with base rows between."""
    found = []
    for slot in draw(st.permutations(range(slots)))[: draw(st.integers(0, slots))]:
        first = start + draw(st.integers(0, 3))
        start = first + draw(st.sampled_from([1, 1, 2, 17, 40]))
        found.append((slot, first, start))
    return found


@st.composite
def steps(draw: st.DrawFn) -> Step:
    widths = tuple(draw(st.lists(st.integers(1, 150), min_size=1, max_size=3)))
    slots = draw(st.integers(1, 4))
    ranks = [tuple(draw(RANK) for _ in widths) for _ in range(slots)]
    decode = draw(segments(0, slots))
    split = max((stop for _, _, stop in decode), default=0)
    prefill = draw(segments(split, slots))
    return Step(
        shape=SiteShape(draw(st.sampled_from([5, 64, 1100])), widths),
        ranks=ranks,
        dora=draw(st.lists(st.integers(0, slots - 1), unique=True)),
        rows=max(split, max((stop for _, _, stop in prefill), default=0)) + draw(st.integers(0, 2)),
        decode=decode,
        prefill=prefill,
        dtype=draw(st.sampled_from([torch.float16, torch.float32])),
    )


def apply(kernels: Kernels, site: DeviceSite, x: Tensor, y: Tensor, cut: Segments, kind: Kind) -> None:
    splits = kind[0].splits(site.shape.in_features)
    planes = poisoned(splits, len(x), 208, dtype=kernels.planes)
    tiles = device_tiles(cut, kind[1].rows)
    kernels.shrink(x, site.pool, site.table, tiles, planes, kind=kind[0])
    kernels.expand(
        planes, site.pool, site.gains, site.table, tiles, y, None, shape=site.shape, splits=splits, kind=kind[1]
    )


@settings(max_examples=12, deadline=None)
@given(steps())
def test_a_step_is_what_float64_says(step: Step) -> None:
    site = build_site(step.shape, step.ranks, step.dtype, dora=step.dora)
    x = rand(step.rows, step.shape.in_features, dtype=step.dtype, seed=3)
    y = rand(step.rows, step.shape.out_features, dtype=step.dtype, seed=4)
    before, wanted = y.clone(), y.double()
    for cut, kind in zip((step.decode, step.prefill), KINDS, strict=True):
        apply(TRITON, site, x, y, cut, kind)
        apply(ORACLE, site, x, wanted, cut, kind)
    torch.testing.assert_close(y.double(), wanted, atol=3 * TOLERANCE[step.dtype], rtol=TOLERANCE[step.dtype])
    touched = torch.zeros(step.rows, dtype=torch.bool)
    for _, start, stop in step.decode + step.prefill:
        touched[start:stop] = True
    assert torch.equal(y[~touched], before[~touched])


@given(segments(0, 5), st.sampled_from([1, DECODE_ROWS, 64]))
@settings(deadline=None)
def test_tiles_cover_each_row_of_a_segment_once(cut: Segments, tile_rows: int) -> None:
    tiles = build_tiles(cut, tile_rows)
    covered = [(slot, row) for slot, first, count in tiles.tolist() for row in range(first, first + count)]
    assert covered == [(slot, row) for slot, start, stop in cut for row in range(start, stop)]
    assert all(1 <= count <= tile_rows for _, _, count in tiles.tolist())
    rows = max((stop for _, _, stop in cut), default=0)
    assert len(tiles) <= tile_capacity(rows, len(cut), tile_rows)
