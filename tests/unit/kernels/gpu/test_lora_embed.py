"""Adapters on the embedding: one row of A is gathered per token, and expand does the rest."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fixtures.lora_device import DEVICE, TOLERANCE, build_site, device_tiles, poisoned, rand
from lamina_kernels.gpu.lora_embed import embed_shrink
from lamina_kernels.gpu.lora_expand import expand
from lamina_kernels.gpu.lora_layout import SiteShape
from lamina_kernels.gpu.tuned import DECODE_ROWS, LORA_EXPAND_DECODE, LORA_EXPAND_PREFILL, PREFILL_ROWS, ExpandShape
from lamina_kernels.oracles import lora_device as oracle

VOCAB = 50
RANKS = [(1,), (7,), (8,), (0,), (64,), (130,)]
SEGMENTS = [(5, 0, 20), (0, 20, 21), (3, 21, 22), (1, 30, 33), (4, 60, 63)]

each_height = pytest.mark.parametrize("tile_rows", [DECODE_ROWS, PREFILL_ROWS])


def tokens(count: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.randint(VOCAB, (count,), generator=torch.Generator().manual_seed(1)).to(dtype).to(DEVICE)


@each_height
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("ids", [torch.int32, torch.int64], ids=str)
def test_a_token_takes_its_own_row_of_a(ids: torch.dtype, dtype: torch.dtype, tile_rows: int) -> None:
    site = build_site(SiteShape(VOCAB, (24,)), RANKS, dtype, embedding=True)
    token_ids = tokens(63, ids)
    token_ids[[2, 31]] = torch.tensor([VOCAB, -1], dtype=ids, device=DEVICE)  # nobody's rows
    planes = poisoned(2, 63, 136, dtype=torch.float32)
    wanted = planes.clone()
    tiles = device_tiles(SEGMENTS, tile_rows, capacity=9)
    embed_shrink(token_ids, site.pool, site.table, tiles, planes, vocab=VOCAB, tile_rows=tile_rows)
    oracle.embed_shrink(token_ids, site.pool, site.table, tiles, wanted, vocab=VOCAB, tile_rows=tile_rows)
    assert torch.equal(planes.nan_to_num(7), wanted.nan_to_num(7))
    assert not planes[0, 2, :130].any()


@pytest.mark.parametrize("kind", [LORA_EXPAND_DECODE, LORA_EXPAND_PREFILL], ids=["decode", "prefill"])
def test_with_expand_it_is_the_product_of_a_one_hot_row(kind: ExpandShape) -> None:
    shape = SiteShape(VOCAB, (24,))
    site = build_site(shape, RANKS, torch.float32, embedding=True)
    token_ids = tokens(63)
    planes = poisoned(1, 63, 144, dtype=torch.float32)
    y = rand(63, 24, dtype=torch.float32, seed=2)
    wanted = y.double()
    tiles = device_tiles(SEGMENTS, kind.rows)
    embed_shrink(token_ids, site.pool, site.table, tiles, planes, vocab=VOCAB, tile_rows=kind.rows)
    expand(planes, site.pool, site.gains, site.table, tiles, y, None, shape=shape, splits=1, kind=kind)
    for slot, start, stop in SEGMENTS:
        rank = RANKS[slot][0]
        if rank:
            one_hot = torch.nn.functional.one_hot(token_ids[start:stop], VOCAB).double()
            a = rand(rank, VOCAB, dtype=torch.float32, seed=slot).double()
            b = rand(rank, 24, dtype=torch.float32, seed=1000 + 10 * slot).double() / rank**0.5
            wanted[start:stop] += one_hot @ a.t() @ b
    torch.testing.assert_close(y.double(), wanted, atol=TOLERANCE[torch.float32], rtol=0)


def test_wrong_arguments_are_refused() -> None:
    site = build_site(SiteShape(VOCAB, (24,)), [(4,)], torch.float32, embedding=True)
    token_ids, planes = tokens(4), poisoned(1, 4, 8, dtype=torch.float32)
    tiles = device_tiles([(0, 0, 4)], 16)
    good = (token_ids, site.pool, site.table, tiles, planes)
    wrong: list[tuple[int, Tensor]] = [
        (0, token_ids.float()),
        (0, token_ids.view(2, 2)),
        (0, tokens(8)[::2]),
        (1, site.pool[::2]),
        (2, site.table.int()),
        (3, tiles.long()),
        (4, planes[:, :3]),
        (4, planes[:0]),
    ]
    for position, value in wrong:
        arguments = list(good)
        arguments[position] = value
        with pytest.raises((TypeError, ValueError)):
            embed_shrink(*arguments, vocab=VOCAB, tile_rows=16)


def test_nothing_is_launched_for_no_tiles() -> None:
    site = build_site(SiteShape(VOCAB, (24,)), [(4,)], torch.float32, embedding=True)
    planes = poisoned(1, 0, 8, dtype=torch.float32)
    embed_shrink(tokens(0), site.pool, site.table, device_tiles([], 16), planes, vocab=VOCAB, tile_rows=16)
