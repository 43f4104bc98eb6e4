"""Shrink against its oracle: mixed real ranks, adversarial segments, poisoned scratch, the same bits in any company."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fixtures.lora_device import DEVICE, TOLERANCE, DeviceSite, build_site, device_tiles, poisoned, rand
from lamina_kernels.gpu.lora_layout import SiteShape
from lamina_kernels.gpu.lora_shrink import shrink
from lamina_kernels.gpu.tuned import LORA_SHRINK_DECODE, LORA_SHRINK_PREFILL, ShrinkShape
from lamina_kernels.oracles import lora_device as oracle

KINDS = {"decode": LORA_SHRINK_DECODE, "prefill": LORA_SHRINK_PREFILL}
DTYPES = [torch.float16, torch.float32]
RANKS = [(1,), (7,), (8,), (0,), (64,), (256,)]  # slot 3 changes nothing here
LAST = len(RANKS) - 1

SEGMENTS = {
    "all one adapter": [(4, 0, 63)],
    "all different, last slot first": [(LAST, 0, 1), (4, 1, 2), (3, 2, 3), (2, 3, 4), (1, 4, 5), (0, 5, 6)],
    "base rows between": [(1, 2, 19), (LAST, 30, 31), (2, 40, 63)],
    "only a slot that changes nothing": [(3, 0, 63)],
    "none": [],
}

each_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def run(
    site: DeviceSite, x: Tensor, segments: list[tuple[int, int, int]], kind: ShrinkShape, capacity: int | None = None
) -> Tensor:
    """The planes, NaN where nothing was written."""
    splits = kind.splits(site.shape.in_features)
    planes = poisoned(splits + 1, len(x) + 1, int(site.table[:, 1].max()) + 8, dtype=torch.float32)
    shrink(x, site.pool, site.table, device_tiles(segments, kind.rows, capacity), planes, kind=kind)
    return planes


def expected(site: DeviceSite, x: Tensor, segments: list[tuple[int, int, int]], kind: ShrinkShape) -> Tensor:
    planes = poisoned(
        kind.splits(site.shape.in_features) + 1, len(x) + 1, int(site.table[:, 1].max()) + 8, dtype=torch.float64
    )
    oracle.shrink(x, site.pool, site.table, device_tiles(segments, kind.rows), planes, kind=kind)
    return planes


@each_kind
@each_dtype
@pytest.mark.parametrize("segments", SEGMENTS.values(), ids=SEGMENTS)
def test_each_segment_meets_its_own_adapter(
    segments: list[tuple[int, int, int]], dtype: torch.dtype, kind: ShrinkShape
) -> None:
    """Only real ranks of rows in segments are written: the rest of the poisoned planes stays NaN."""
    site = build_site(SiteShape(96, (64,)), RANKS, dtype)
    x = rand(63, 96, dtype=dtype, seed=1)
    x[19:30] = float("nan")  # base rows of one case; in the others they must not leak either
    planes = run(site, x, segments, kind, capacity=6)
    torch.testing.assert_close(
        planes.double(), expected(site, x, segments, kind), atol=TOLERANCE[dtype] / 4, rtol=0, equal_nan=True
    )


@each_kind
@pytest.mark.parametrize(
    ("in_features", "splits"),
    [(1, {1}), (17, {1}), (576, {1}), (1027, {2}), (1536, {3}), (4096, {8})],
    ids=["1", "17", "SmolLM2", "odd", "SmolLM2 down", "Llama-3-8B"],
)
def test_splits_of_odd_widths(in_features: int, splits: set[int], kind: ShrinkShape) -> None:
    site = build_site(SiteShape(in_features, (64, 64)), [(3, 16), (0, 5)], torch.float16)
    x = rand(5, in_features, dtype=torch.float16, seed=2)
    segments = [(1, 0, 2), (0, 3, 5)]
    planes = run(site, x, segments, kind)
    assert kind.splits(in_features) in splits
    torch.testing.assert_close(planes.double(), expected(site, x, segments, kind), atol=1e-3, rtol=0, equal_nan=True)


@each_kind
def test_stacked_slices_beyond_one_round_of_rank_programs(kind: ShrinkShape) -> None:
    """R = 768, three slices of 256: programs stride over the rank blocks."""
    site = build_site(SiteShape(40, (8, 8, 8)), [(256, 256, 256)], torch.float32)
    x = rand(3, 40, dtype=torch.float32, seed=3)
    planes = run(site, x, [(0, 0, 3)], kind)
    torch.testing.assert_close(planes.double(), expected(site, x, [(0, 0, 3)], kind), atol=1e-5, rtol=0, equal_nan=True)


@each_kind
@each_dtype
def test_a_rows_bits_do_not_depend_on_its_company(dtype: torch.dtype, kind: ShrinkShape) -> None:
    """Alone, among its adapter's rows, between other adapters, at another place of the tile."""
    site = build_site(SiteShape(1100, (64,)), [(7,), (16,)], dtype)
    x = rand(70, 1100, dtype=dtype, seed=4)
    alone = run(site, x[50:51], [(1, 0, 1)], kind)[:-1, 0, :16]
    for segments in ([(1, 0, 70)], [(0, 30, 47), (1, 47, 60), (0, 60, 70)], [(1, 50, 51)], [(1, 33, 51)]):
        assert torch.equal(run(site, x, segments, kind)[:-1, 50, :16], alone)


def test_rows_may_be_a_view_of_a_wider_tensor() -> None:
    site = build_site(SiteShape(48, (8,)), [(4,)], torch.float32)
    wide = rand(6, 100, dtype=torch.float32, seed=5)
    x = wide[:, 3:51]
    assert torch.equal(
        run(site, x, [(0, 1, 6)], LORA_SHRINK_DECODE).nan_to_num(7),
        run(site, x.contiguous(), [(0, 1, 6)], LORA_SHRINK_DECODE).nan_to_num(7),
    )


def test_wrong_arguments_are_refused() -> None:
    site = build_site(SiteShape(48, (8,)), [(4,)], torch.float32)
    x = rand(6, 48, dtype=torch.float32, seed=5)
    tiles = device_tiles([(0, 0, 6)], 16)
    planes = poisoned(1, 6, 8, dtype=torch.float32)
    good = (x, site.pool, site.table, tiles, planes)
    shrink(*good, kind=LORA_SHRINK_DECODE)
    wrong: list[tuple[int, Tensor]] = [
        (0, x.half()),
        (0, x.t().contiguous().t()),
        (0, x[0]),
        (1, site.pool.view(-1, 4)),
        (1, site.pool[::2]),
        (2, site.table.int()),
        (2, site.table[:, :8]),
        (3, tiles.long()),
        (3, tiles[:, :2]),
        (4, planes.double()),
        (4, planes[:, :5]),
        (4, planes[:0]),
        (4, planes.transpose(1, 2)),
    ]
    for position, value in wrong:
        arguments = list(good)
        arguments[position] = value
        with pytest.raises((TypeError, ValueError)):
            shrink(*arguments, kind=LORA_SHRINK_DECODE)


def test_nothing_is_launched_for_no_tiles() -> None:
    site = build_site(SiteShape(48, (8,)), [(4,)], torch.float32)
    empty = torch.empty(0, 48, device=DEVICE)
    shrink(
        empty,
        site.pool,
        site.table,
        device_tiles([], 16),
        poisoned(1, 0, 8, dtype=torch.float32),
        kind=LORA_SHRINK_DECODE,
    )
