"""Paged attention on drawn shapes, contexts and chunks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from lamina_kernels.gpu.attention_prefill import build_prefill_tiles
from support.paged_attention import (
    Paged,
    assert_near,
    decode,
    decode_reference,
    prefill,
    prefill_reference,
    queries,
    tiles_of,
)

KV_HEADS = st.integers(1, 2)
GROUPS = st.integers(1, 5)
WINDOWS = st.none() | st.integers(1, 90)
SOFTCAPS = st.none() | st.floats(0.5, 50)


@settings(max_examples=8, deadline=None)
@given(
    contexts=st.lists(st.integers(0, 90), min_size=1, max_size=3),
    kv_heads=KV_HEADS,
    group=GROUPS,
    dim=st.sampled_from([64, 80]),
    window=WINDOWS,
    softcap=SOFTCAPS,
)
def test_decode(
    contexts: list[int], kv_heads: int, group: int, dim: int, window: int | None, softcap: float | None
) -> None:
    ranges = [(0 if window is None else max(context - window, 0), context) for context in contexts]
    paged = Paged.of(ranges, kv_heads=kv_heads, dim=dim, dtype=torch.float32)
    q = queries(len(contexts), kv_heads * group, dim, torch.float32)
    numbers = {"window": window, "softcap": softcap}
    assert_near(decode(paged, q, **numbers), decode_reference(paged, q, **numbers))


@settings(max_examples=8, deadline=None)
@given(
    chunks=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20)), min_size=1, max_size=2),
    kv_heads=KV_HEADS,
    group=GROUPS,
    window=WINDOWS,
    softcap=SOFTCAPS,
)
def test_prefill(
    chunks: list[tuple[int, int]], kv_heads: int, group: int, window: int | None, softcap: float | None
) -> None:
    ranges = [(0 if window is None else max(start - window + 1, 0), start + count) for start, count in chunks]
    paged = Paged.of(ranges, kv_heads=kv_heads, dim=64, dtype=torch.float32)
    q = queries(sum(count for _, count in chunks), kv_heads * group, 64, torch.float32)
    spans, row = [], 0
    for sequence, (start, count) in enumerate(chunks):
        spans.append((sequence, row, count, start))
        row += count
    tiles = tiles_of(paged, q, spans)
    numbers = {"window": window, "softcap": softcap}
    assert_near(prefill(paged, q, tiles, **numbers), prefill_reference(paged, q, tiles, **numbers))


@given(
    counts=st.lists(st.tuples(st.integers(0, 200), st.integers(0, 200)), max_size=6),
    tile_rows=st.integers(1, 130),
    spare=st.integers(0, 5),
)
def test_tiles_cover_every_row_once(counts: list[tuple[int, int]], tile_rows: int, spare: int) -> None:
    """In order within a sequence, no tile across a multiple of its height."""
    spans, row = [], 0
    for sequence, (start, count) in enumerate(counts):
        spans.append((sequence, row, count, start))
        row += count
    tiles = build_prefill_tiles(spans, tile_rows)
    padded = build_prefill_tiles(spans, tile_rows, len(tiles) + spare)
    assert padded[: len(tiles)].tolist() == tiles.tolist()
    assert (padded[len(tiles) :] == -1).all()
    covered = {}
    for sequence, first, rows, start in tiles.tolist():
        assert 0 < rows <= tile_rows
        assert start // tile_rows == (start + rows - 1) // tile_rows
        covered |= {first + i: (sequence, start + i) for i in range(rows)}
    wanted = {first + i: (sequence, start + i) for sequence, first, count, start in spans for i in range(count)}
    assert covered == wanted
    assert sum(tile[2] for tile in tiles.tolist()) == len(wanted)
