"""Tiles cover each segment's rows once, in order, and never mix adapters."""

from __future__ import annotations

import pytest
import torch

from lamina_kernels.gpu.lora_tiles import DECODE_ROWS, PREFILL_ROWS, LoraTiles, build_tiles, tile_capacity


def test_a_segment_is_cut_into_tiles_and_base_rows_are_in_none() -> None:
    tiles = build_tiles([(2, 0, 5), (0, 12, 14), (7, 14, 31)], 16)
    assert tiles.tolist() == [[2, 0, 5], [0, 12, 2], [7, 14, 16], [7, 30, 1]]
    assert tiles.dtype == "int32"


def test_padding_up_to_the_capacity_has_slot_minus_one() -> None:
    assert build_tiles([(3, 1, 2)], 16, capacity=3).tolist() == [[3, 1, 1], [-1, 0, 0], [-1, 0, 0]]


@pytest.mark.parametrize("capacity", [None, 0, 2])
def test_no_segments_give_padding_only(capacity: int | None) -> None:
    assert build_tiles([], 64, capacity).tolist() == [[-1, 0, 0]] * (capacity or 0)


@pytest.mark.parametrize(
    ("segments", "capacity"),
    [
        ([(0, 0, 17)], 1),
        ([(0, 3, 3)], None),
        ([(0, 4, 3)], None),
        ([(-1, 0, 1)], None),
        ([(0, -1, 1)], None),
        ([(0, 0, 3), (1, 2, 4)], None),
        ([(0, 3, 4), (1, 0, 1)], None),
    ],
    ids=["too many", "empty", "backwards", "slot below 0", "row below 0", "overlap", "unsorted"],
)
def test_bad_segments_are_refused(segments: list[tuple[int, int, int]], capacity: int | None) -> None:
    with pytest.raises(ValueError, match=r"segments|capacity"):
        build_tiles(segments, 16, capacity)


def test_a_tile_without_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one row"):
        build_tiles([], 0)


@pytest.mark.parametrize("tile_rows", [DECODE_ROWS, PREFILL_ROWS])
@pytest.mark.parametrize("rows", [0, 1, 3, 63, 129, 256])
@pytest.mark.parametrize("segments", [0, 1, 2, 64, 300])
def test_the_capacity_is_what_the_worst_step_needs(tile_rows: int, rows: int, segments: int) -> None:
    worst = _worst(rows, min(rows, segments), tile_rows)
    assert len(build_tiles(worst, tile_rows)) == tile_capacity(rows, segments, tile_rows)


def _worst(rows: int, segments: int, tile_rows: int) -> list[tuple[int, int, int]]:
    """Segments of one row more than whole tiles, as long as rows last; then of one row; the last has the rest."""
    cut, start = [], 0
    for i in range(segments):
        spare = rows - start - (segments - i)
        stop = rows if i == segments - 1 else start + 1 + min(tile_rows, spare // tile_rows * tile_rows)
        cut.append((i, start, stop))
        start = stop
    return cut


def test_tiles_on_the_device_have_their_shape_checked() -> None:
    good = torch.zeros(2, 3, dtype=torch.int32)
    LoraTiles(good, good)
    for bad in (good.long(), good[0], good[:, :2]):
        with pytest.raises(ValueError, match=r"int32 \[n, 3\]"):
            LoraTiles(good, bad)
