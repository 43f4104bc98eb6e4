"""Expand against its oracle: ragged slices in one launch, DoRA, and not a bit changed where nothing is to change."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fixtures.lora_device import DEVICE, TOLERANCE, DeviceSite, build_site, device_tiles, poisoned, rand
from lamina_kernels.gpu.lora_expand import expand
from lamina_kernels.gpu.lora_layout import SLICE_START, SiteShape
from lamina_kernels.gpu.tuned import LORA_EXPAND_DECODE, LORA_EXPAND_PREFILL, ExpandShape
from lamina_kernels.oracles import lora_device as oracle

KINDS = {"decode": LORA_EXPAND_DECODE, "prefill": LORA_EXPAND_PREFILL}
QKV = SiteShape(16, (144, 72, 72))
RANKS = [(1, 7, 8), (64, 0, 1), (0, 0, 0), (0, 16, 0), (256, 3, 33), (8, 8, 8)]
LAST = len(RANKS) - 1

SEGMENTS = {
    "all one adapter": [(4, 0, 63)],
    "all different": [(LAST, 0, 1), (4, 1, 2), (3, 2, 3), (2, 3, 4), (1, 4, 5), (0, 5, 6)],
    "base rows between": [(1, 2, 19), (LAST, 30, 31), (3, 40, 63)],
    "only a slot that changes nothing": [(2, 0, 63)],
    "none": [],
}

each_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
each_dtype = pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)


def written_planes(site: DeviceSite, rows: int, segments: list[tuple[int, int, int]], splits: int, seed: int) -> Tensor:
    """What shrink leaves: sums at real ranks of rows in segments, NaN elsewhere."""
    highest = int(site.table[:, 1].max())
    planes = poisoned(splits + 1, rows, -(-highest // 16) * 16, dtype=torch.float32)
    values = rand(splits, rows, highest, dtype=torch.float32, seed=seed) / splits**0.5
    for slot, start, stop in segments:
        rank = int(site.table[slot, 1])
        planes[:splits, start:stop, :rank] = values[:, start:stop, :rank]
    return planes


def run(
    site: DeviceSite,
    planes: Tensor,
    segments: list[tuple[int, int, int]],
    y: Tensor,
    kind: ExpandShape,
    *,
    bias: Tensor | None = None,
    splits: int = 3,
    capacity: int | None = None,
) -> None:
    tiles = device_tiles(segments, kind.rows, capacity)
    expand(planes, site.pool, site.gains, site.table, tiles, y, bias, shape=site.shape, splits=splits, kind=kind)


def expected(
    site: DeviceSite,
    planes: Tensor,
    segments: list[tuple[int, int, int]],
    y: Tensor,
    kind: ExpandShape,
    *,
    bias: Tensor | None = None,
    splits: int = 3,
) -> Tensor:
    wanted = y.double()
    tiles = device_tiles(segments, kind.rows)
    oracle.expand(
        planes, site.pool, site.gains, site.table, tiles, wanted, bias, shape=site.shape, splits=splits, kind=kind
    )
    return wanted


@each_kind
@each_dtype
@pytest.mark.parametrize("segments", SEGMENTS.values(), ids=SEGMENTS)
def test_each_row_gains_its_own_adapter_at_every_slice(
    segments: list[tuple[int, int, int]], dtype: torch.dtype, kind: ExpandShape
) -> None:
    """Base rows and untouched slices keep their bits, also NaN."""
    site = build_site(QKV, RANKS, dtype)
    y = rand(63, QKV.out_features, dtype=dtype, seed=1)
    y[19:25] = float("nan")
    before = y.clone()
    planes = written_planes(site, 63, segments, 3, seed=2)
    run(site, planes, segments, y, kind, capacity=6)
    wanted = expected(site, planes, segments, before, kind)
    torch.testing.assert_close(y.double(), wanted, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype], equal_nan=True)
    same = (wanted == before.double()) | before.isnan()
    assert torch.equal(y[same].nan_to_num(7), before[same].nan_to_num(7))


@each_kind
@each_dtype
@pytest.mark.parametrize("with_bias", [False, True], ids=["no bias", "bias"])
def test_dora_scales_all_but_the_bias(with_bias: bool, dtype: torch.dtype, kind: ExpandShape) -> None:
    """Slot 1 has gains on two of three slices, slot 0 has none, in one launch."""
    site = build_site(SiteShape(16, (40, 24, 9)), [(4, 4, 4), (8, 0, 3)], dtype, dora=[1])
    segments = [(0, 0, 3), (1, 3, 8)]
    y = rand(9, 73, dtype=dtype, seed=3)
    bias = rand(73, dtype=dtype, seed=4) if with_bias else None
    before = y.clone()
    planes = written_planes(site, 9, segments, 3, seed=5)
    run(site, planes, segments, y, kind, bias=bias)
    wanted = expected(site, planes, segments, before, kind, bias=bias)
    torch.testing.assert_close(y.double(), wanted, atol=2 * TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert torch.equal(y[3:8, 40:64], before[3:8, 40:64])


@each_kind
def test_the_scaling_is_in_b_and_the_bias_matters_only_to_dora(kind: ExpandShape) -> None:
    site = build_site(SiteShape(16, (40,)), [(4,)], torch.float32)
    planes = written_planes(site, 2, [(0, 0, 2)], 1, seed=6)
    y = rand(2, 40, dtype=torch.float32, seed=7)
    with_bias, doubled = y.clone(), y.clone()
    run(site, planes, [(0, 0, 2)], y, kind, splits=1)
    run(site, planes, [(0, 0, 2)], with_bias, kind, splits=1, bias=poisoned(40, dtype=torch.float32))
    assert torch.equal(y, with_bias)
    before = doubled.clone()
    first = int(site.table[0, SLICE_START])
    site.pool[first : first + 160] *= 2
    run(site, planes, [(0, 0, 2)], doubled, kind, splits=1)
    torch.testing.assert_close(doubled - before, 2 * (y - before))


@each_kind
def test_an_untouched_slice_keeps_the_sign_of_its_zeros(kind: ExpandShape) -> None:
    """Adding nothing would turn -0 into 0: such programs must leave before they write."""
    site = build_site(SiteShape(16, (40, 24)), [(4, 0)], torch.float32)
    planes = written_planes(site, 3, [(0, 0, 2)], 3, seed=18)
    y = torch.full((3, 64), -0.0, device=DEVICE)
    run(site, planes, [(0, 0, 2)], y, kind)
    assert y[:2, 40:].signbit().all()
    assert y[2].signbit().all()
    assert y[:2, :40].all()


@each_kind
@pytest.mark.parametrize("widths", [(1,), (127, 129), (576, 192, 192), (3, 1, 257)], ids=str)
def test_ragged_slices(widths: tuple[int, ...], kind: ExpandShape) -> None:
    site = build_site(SiteShape(16, widths), [tuple(range(3, 3 + len(widths)))], torch.float16)
    planes = written_planes(site, 3, [(0, 1, 3)], 2, seed=8)
    y = rand(3, sum(widths), dtype=torch.float16, seed=9)
    wanted = expected(site, planes, [(0, 1, 3)], y, kind, splits=2)
    run(site, planes, [(0, 1, 3)], y, kind, splits=2)
    torch.testing.assert_close(y.double(), wanted, atol=4e-3, rtol=4e-3)


def test_a_vocabulary_as_output() -> None:
    """lm_head is a site like others, many columns wide: 128 256 for Llama 3. Wide blocks spare the interpreter."""
    site = build_site(SiteShape(16, (128256,)), [(2,), (9,)], torch.float16)
    planes = written_planes(site, 2, [(1, 1, 2)], 3, seed=10)
    y = rand(2, 128256, dtype=torch.float16, seed=11)
    wanted = expected(site, planes, [(1, 1, 2)], y, LORA_EXPAND_DECODE)
    run(site, planes, [(1, 1, 2)], y, replace(LORA_EXPAND_DECODE, block_columns=8192), capacity=1)
    torch.testing.assert_close(y.double(), wanted, atol=8e-3, rtol=4e-3)


@each_kind
@each_dtype
def test_a_rows_bits_do_not_depend_on_its_company(dtype: torch.dtype, kind: ExpandShape) -> None:
    """Alone, among its adapter's rows, between other adapters, at another place of the tile."""
    site = build_site(SiteShape(16, (40, 24)), [(7, 3), (5, 40)], dtype, dora=[1])
    planes = written_planes(site, 70, [(1, 0, 70)], 3, seed=12)
    y = rand(70, 64, dtype=dtype, seed=13)
    alone = y[50:51].clone()
    run(site, planes[:, 50:51], [(1, 0, 1)], alone, kind)
    for segments in ([(1, 0, 70)], [(0, 30, 47), (1, 47, 60), (0, 60, 70)], [(1, 50, 51)], [(1, 33, 51)]):
        among = y.clone()
        run(site, planes, segments, among, kind)
        assert torch.equal(among[50], alone[0])


def test_y_may_be_a_view_of_a_wider_tensor() -> None:
    site = build_site(SiteShape(16, (40,)), [(4,)], torch.float32)
    planes = written_planes(site, 4, [(0, 1, 4)], 3, seed=14)
    wide = rand(4, 100, dtype=torch.float32, seed=15)
    before = wide.clone()
    y = wide[:, 7:47]
    packed = y.contiguous()
    run(site, planes, [(0, 1, 4)], packed, LORA_EXPAND_DECODE)
    run(site, planes, [(0, 1, 4)], y, LORA_EXPAND_DECODE)
    assert torch.equal(y, packed)
    before[:, 7:47] = packed
    assert torch.equal(wide, before)


def test_wrong_arguments_are_refused() -> None:
    site = build_site(SiteShape(16, (40,)), [(4,)], torch.float32)
    tiles = device_tiles([(0, 0, 6)], 16)
    planes = poisoned(2, 6, 16, dtype=torch.float32)
    y = rand(6, 40, dtype=torch.float32, seed=16)
    bias = rand(40, dtype=torch.float32, seed=17)
    good = (planes, site.pool, site.gains, site.table, tiles, y, bias)
    wrong: list[tuple[int, Tensor]] = [
        (0, planes.half()),
        (0, planes[:, :5]),
        (0, planes[:1]),
        (1, site.pool.half()),
        (2, site.gains.half()),
        (2, site.gains[::2]),
        (3, site.table[:, :8]),
        (4, tiles.long()),
        (5, y[:, :39]),
        (5, y.t().contiguous().t()),
        (6, bias.half()),
        (6, bias[:39]),
    ]
    for position, value in wrong:
        arguments = list(good)
        arguments[position] = value
        with pytest.raises((TypeError, ValueError)):
            expand(*arguments, shape=site.shape, splits=2, kind=LORA_EXPAND_DECODE)
    with pytest.raises(ValueError, match="splits"):
        expand(*good, shape=site.shape, splits=0, kind=LORA_EXPAND_DECODE)


def test_nothing_is_launched_for_no_tiles() -> None:
    site = build_site(SiteShape(16, (40,)), [(4,)], torch.float32)
    empty = torch.empty(0, 40, device=DEVICE)
    run(site, poisoned(3, 0, 16, dtype=torch.float32), [], empty, LORA_EXPAND_DECODE)
