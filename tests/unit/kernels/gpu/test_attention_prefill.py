"""Prefill attention over paged keys and values, against float64."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from lamina_kernels.gpu import tuned
from lamina_kernels.gpu.attention_prefill import build_prefill_tiles, paged_prefill, prefill_tile_rows
from support.kernel_numbers import DEVICE, DTYPES
from support.paged_attention import LAYER, Paged, assert_near, prefill, prefill_reference, queries, tiles_of


class TestTiles:
    def test_cuts_lie_at_multiples_in_the_sequence(self) -> None:
        tiles = build_prefill_tiles([(0, 0, 20, 5)], 8)
        assert sorted(tiles.tolist()) == [[0, 0, 3, 5], [0, 3, 8, 8], [0, 11, 8, 16], [0, 19, 1, 24]]
        assert tiles.dtype == np.int32

    def test_most_keys_first(self) -> None:
        tiles = build_prefill_tiles([(0, 0, 4, 0), (1, 4, 4, 100)], 8)
        assert tiles.tolist() == [[1, 4, 4, 100], [0, 0, 4, 0]]

    def test_unused_tiles_are_marked(self) -> None:
        assert build_prefill_tiles([(2, 0, 1, 0)], 8, 3).tolist() == [[2, 0, 1, 0], [-1] * 4, [-1] * 4]
        assert build_prefill_tiles([], 8).shape == (0, 4)
        assert build_prefill_tiles([(0, 0, 0, 5)], 8, 1).tolist() == [[-1] * 4]

    def test_too_many_or_negative(self) -> None:
        with pytest.raises(ValueError, match="do not fit"):
            build_prefill_tiles([(0, 0, 17, 0)], 8, 2)
        with pytest.raises(ValueError, match="negative"):
            build_prefill_tiles([(0, 0, 1, -1)], 8)

    def test_a_tile_holds_whole_groups(self) -> None:
        """64 rows or more of one product, whatever the group; groups of 3 lose two rows of 128, not a quarter."""
        assert prefill_tile_rows(32, 8, 128, torch.bfloat16) == 32
        assert prefill_tile_rows(9, 3, 64, torch.bfloat16) == 42


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group", [1, 3, 4, 8])
def test_prompts_and_chunks_behind_a_prefix(group: int, dtype: torch.dtype) -> None:
    """Whole prompts, a prefix in blocks, one token behind a prefix, an unused tile, a row of no sequence."""
    paged = Paged.of([(0, 33), (0, 77), (0, 1), (0, 50)], kv_heads=1, dim=64, dtype=dtype)
    q = queries(33 + 27 + 1 + 1 + 1, group, 64, dtype)
    spans = [(0, 0, 33, 0), (1, 33, 27, 50), (2, 60, 1, 0), (3, 62, 1, 49)]
    tiles = tiles_of(paged, q, spans)
    tiles = torch.cat([tiles, torch.full_like(tiles[:1], -1)])
    out = prefill(paged, q, tiles)
    assert_near(out, prefill_reference(paged, q, tiles))
    assert out[61].isnan().all()
    assert not out[:61].isnan().any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("dim", "block_size", "kv_heads"), [(80, 16, 2), (96, 32, 1), (128, 16, 1), (256, 32, 1)])
def test_head_dims(dim: int, block_size: int, kv_heads: int, dtype: torch.dtype) -> None:
    paged = Paged.of([(0, 40)], kv_heads=kv_heads, dim=dim, dtype=dtype, block_size=block_size)
    q = queries(23, kv_heads * 2, dim, dtype)
    tiles = tiles_of(paged, q, [(0, 0, 23, 17)])
    assert_near(prefill(paged, q, tiles), prefill_reference(paged, q, tiles))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [1, 5, 70])
def test_a_window_hides_what_lies_before(window: int, dtype: torch.dtype) -> None:
    """What no row of a chunk sees may be gone: its blocks are NaN, its table entries wild."""
    chunks = [(0, 20), (150, 21)]  # start, rows
    ranges = [(max(start - window + 1, 0), start + rows) for start, rows in chunks]
    paged = Paged.of(ranges, kv_heads=1, dim=64, dtype=dtype)
    q = queries(41, 2, 64, dtype)
    tiles = tiles_of(paged, q, [(0, 0, 20, 0), (1, 20, 21, 150)])
    assert_near(prefill(paged, q, tiles, window=window), prefill_reference(paged, q, tiles, window=window))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_soft_cap_and_scale(dtype: torch.dtype) -> None:
    paged = Paged.of([(0, 30)], kv_heads=1, dim=64, dtype=dtype)
    q = queries(30, 2, 64, dtype) * 5
    tiles = tiles_of(paged, q, [(0, 0, 30, 0)])
    numbers = {"scale": 0.5, "softcap": 4.0, "window": 17}
    assert_near(prefill(paged, q, tiles, **numbers), prefill_reference(paged, q, tiles, **numbers), factor=3)


@pytest.mark.parametrize("by_hand", [True, False])
def test_fp8_keys_and_values(by_hand: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lamina_kernels.gpu.attention_pool._widens_fp8", lambda device: not by_hand)
    paged = Paged.of([(0, 70)], kv_heads=1, dim=64, dtype=torch.float32).in_fp8()
    for dtype in DTYPES:
        q = queries(20, 3, 64, dtype)
        tiles = tiles_of(paged, q, [(0, 0, 20, 50)])
        assert_near(prefill(paged, q, tiles), prefill_reference(paged, q, tiles), factor=3)


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many tiles of few rows and keys, which the interpreter is quick with."""
    small = tuned.PrefillTile(height=16, keys=16, num_warps=4, num_stages=2)
    monkeypatch.setattr(tuned, "prefill_tile", lambda head_dim, element_size, *, fp8_by_hand=False: small)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [None, 7])
def test_chunks_do_not_change_a_bit(window: int | None, dtype: torch.dtype) -> None:
    """A prompt at once, in chunks that straddle tiles, and token by token at the end."""
    length, heads = 41, 3
    paged = Paged.of([(0, length)], kv_heads=1, dim=64, dtype=dtype)
    q = queries(length, heads, 64, dtype)
    whole = prefill(paged, q, tiles_of(paged, q, [(0, 0, length, 0)]), window=window)
    assert not whole.isnan().any()
    for cuts in ([0, 7, 8, 30, 41], [0, 33, 40, 41]):
        for start, stop in itertools.pairwise(cuts):
            # Keys behind the chunk are not there yet: NaN, and no table entry.
            then = Paged.of([(0, length)], kv_heads=1, dim=64, dtype=dtype, seed=start + 1)
            then.contexts[0] = stop
            for n in range(stop, length):
                then.pool[then.tables[0, n // 16].long(), :, LAYER, n % 16] = torch.nan
            then.tables[0, -(-stop // 16) :] = 2**30
            tiles = tiles_of(then, q, [(0, 0, stop - start, start)])
            chunk = prefill(then, q[start:stop], tiles, window=window)
            assert torch.equal(chunk, whole[start:stop])


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_neighbours_do_not_change_a_bit(dtype: torch.dtype) -> None:
    """Alone, and among other sequences at another place in q, in the tables and in the pool."""
    q = queries(29, 2, 64, dtype)
    alone = Paged.of([(0, 40)], kv_heads=1, dim=64, dtype=dtype)
    wanted = prefill(alone, q, tiles_of(alone, q, [(0, 0, 29, 11)]))
    others = queries(13, 2, 64, dtype, seed=3)
    among = Paged.of([(0, 90), (0, 13), (0, 40)], kv_heads=1, dim=64, dtype=dtype, seed=5)
    together = torch.cat([others, q, others])
    spans = [(1, 0, 13, 0), (2, 13, 29, 11), (0, 42, 13, 77)]
    got = prefill(among, together, tiles_of(among, together, spans, capacity=40))
    assert torch.equal(got[13:42], wanted)
    among.pool[among.tables[0, 1].long(), :, LAYER, 3] = torch.nan
    got = prefill(among, together, tiles_of(among, together, spans))
    assert torch.equal(got[13:42], wanted)
    assert got[42:].isnan().all()


def test_keys_beyond_the_context_are_not_read() -> None:
    """A tile that claims more rows than there are keys: the last rows see what there is."""
    paged = Paged.of([(0, 20)], kv_heads=1, dim=64, dtype=torch.float32)
    q = queries(10, 2, 64, torch.float32)
    tiles = tiles_of(paged, q, [(0, 0, 10, 14)])
    assert_near(prefill(paged, q, tiles), prefill_reference(paged, q, tiles))


def test_no_tiles() -> None:
    paged = Paged.of([(0, 20)], kv_heads=1, dim=64, dtype=torch.float32)
    q = queries(2, 2, 64, torch.float32)
    assert prefill(paged, q, tiles_of(paged, q, [])).isnan().all()


@pytest.mark.parametrize(
    ("tiles", "error"),
    [
        (torch.zeros(2, 3, dtype=torch.int32), ValueError),
        (torch.zeros(4, dtype=torch.int32), ValueError),
        (torch.zeros(4, 4, dtype=torch.int32).t(), ValueError),
        (torch.zeros(2, 4, dtype=torch.int64), TypeError),
    ],
)
def test_bad_tiles(tiles: torch.Tensor, error: type[Exception]) -> None:
    paged = Paged.of([(0, 20)], kv_heads=1, dim=64, dtype=torch.float32)
    q, out = queries(2, 2, 64, torch.float32), torch.empty(2, 128, device=DEVICE)
    with pytest.raises(error):
        paged_prefill(q, paged.pool, LAYER, paged.tables, tiles.to(DEVICE), paged.contexts, out, scale=1.0)


def test_too_many_heads_on_one_kv_head() -> None:
    paged = Paged.of([(0, 20)], kv_heads=1, dim=64, dtype=torch.float32)
    q = queries(2, 33, 64, torch.float32)
    with pytest.raises(ValueError, match="at most 32"):
        prefill(paged, q, torch.zeros(1, 4, dtype=torch.int32, device=DEVICE))
