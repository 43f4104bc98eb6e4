"""Packing an adapter: what lies where, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lamina_kernels.gpu.lora_layout import ALIGN, FIELDS, SLICE_FIELDS, SLICE_START, SiteShape, padded
from lamina_kernels.gpu.lora_pack import PoolLayout, slice_numbers
from lamina_kernels.lora import LoraWeights
from support.triton_lora import EMBEDDING, SITES, adapter

LAYOUT = PoolLayout(SITES, torch.float16, max_rank=8, embedding=EMBEDDING)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("start", [0, 5 * ALIGN], ids=["first", "further on"])
def test_rows_say_where_everything_lies(dtype: torch.dtype, start: int) -> None:
    """Following the table's numbers gives back A, every B and every gain, bit for bit, wherever the adapter lies."""
    weights = adapter(1, (3, 0, 5), dora=True)
    packed = replace(LAYOUT, dtype=dtype).pack(weights)
    pool = torch.cat([torch.full((start,), torch.nan, dtype=dtype), packed.host])
    gains = pool.view(torch.float32)
    for site, (lora, row) in enumerate(zip(weights, packed.placement.rows_at(start).tolist(), strict=True)):
        assert lora is not None
        a = lora.a.t() if site == EMBEDDING else lora.a
        assert row[1] == lora.rank
        torch.testing.assert_close(_matrix(pool, row[0], *a.shape), a.to(dtype), rtol=0, atol=0)
        first = 0
        for b, column, gain in zip(lora.b, lora.columns, lora.gains or (), strict=True):
            at = SLICE_START + SLICE_FIELDS * SITES[site].columns.index(column)
            where, rank, h, g = row[at : at + SLICE_FIELDS]
            assert (rank, h) == (b.shape[0], first)
            torch.testing.assert_close(_matrix(pool, where, *b.shape), b.to(dtype), rtol=0, atol=0)
            assert (g < 0) == (gain is None)
            if gain is not None:
                torch.testing.assert_close(gains[g : g + len(gain)], gain, rtol=0, atol=0)
            first += rank


def _matrix(pool: torch.Tensor, start: int, rows: int, width: int) -> torch.Tensor:
    assert start % ALIGN == 0
    return pool[start : start + rows * padded(width)].view(rows, -1)[:, :width]


def test_an_adapter_takes_its_real_rank() -> None:
    """Bytes are those of its matrices, rows padded: nothing for the rank limit, nothing for absent slices."""
    packed = LAYOUT.pack([None, adapter(1, (2,))[1], *[None] * 4])
    assert packed.nbytes == 2 * 2 * (padded(72) + padded(37))
    assert packed.placement.starts == (0, 0, *[packed.host.numel()] * 5)


def test_an_adapter_that_changes_nothing_is_empty() -> None:
    packed = LAYOUT.pack([None] * len(SITES))
    assert packed.nbytes == 0
    assert packed.placement.rows_at(64)[:, 1].tolist() == [0] * len(SITES)


def test_no_offset_where_nothing_is() -> None:
    rows = LAYOUT.pack([None] * len(SITES)).placement.rows_at(64)
    assert rows[:, 0].tolist() == [0] * len(SITES)
    assert rows.shape[1] == FIELDS


def _with(**changes: object) -> LoraWeights:
    return replace(adapter(1)[0], **changes)  # type: ignore[type-var,arg-type]


BAD = {
    "A is": _with(a=torch.zeros(9, 38)),
    "no slice begins": _with(columns=(0, 41, 57)),
    "same column": _with(columns=(0, 0, 57)),
    "B is": _with(b=(torch.zeros(3, 40), torch.zeros(1, 17), torch.zeros(5, 10))),
    "not from 1 to 8": _with(a=torch.zeros(15, 37), b=(torch.zeros(9, 40), torch.zeros(1, 17), torch.zeros(5, 9))),
    "is 0, not": _with(a=torch.zeros(6, 37), b=(torch.zeros(0, 40), torch.zeros(1, 17), torch.zeros(5, 9))),
}


@pytest.mark.parametrize(("message", "lora"), BAD.items(), ids=BAD)
def test_what_does_not_fit_the_site_is_refused(message: str, lora: LoraWeights) -> None:
    with pytest.raises(ValueError, match=message):
        slice_numbers(SITES[0], lora, max_rank=8)
    with pytest.raises(ValueError, match=f"site 0: .*{message}"):
        LAYOUT.pack([lora, *[None] * 5])


def test_every_site_has_its_entry() -> None:
    with pytest.raises(ValueError, match="has 2 sites, the model 6"):
        LAYOUT.pack([None, None])


def test_layouts_that_no_kernel_can_read() -> None:
    with pytest.raises(TypeError, match="float64"):
        PoolLayout(SITES, torch.float64, max_rank=8)
    with pytest.raises(ValueError, match="at least 1"):
        PoolLayout(SITES, torch.float16, max_rank=0)
    with pytest.raises(ValueError, match="at least 1"):
        PoolLayout((), torch.float16, max_rank=8)
    with pytest.raises(ValueError, match="one slice"):
        PoolLayout((SiteShape(8, (8, 8)),), torch.float16, max_rank=8, embedding=0)
    with pytest.raises(ValueError, match="site 6"):
        PoolLayout(SITES, torch.float16, max_rank=8, embedding=6)
