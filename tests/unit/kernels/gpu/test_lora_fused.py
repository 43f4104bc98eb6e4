"""The fused plan against the same oracle as the table, and what either plan costs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lamina_kernels.gpu.lora_fused import FusedSite
from lamina_kernels.gpu.lora_layout import SiteShape
from lamina_kernels.gpu.lora_plan import choose_plan, fused_cost, two_launch_cost
from lamina_kernels.gpu.lora_table import TritonLoraTable
from lamina_kernels.lora import LoraWeights
from support.triton_lora import adapter, changed, tiles

SHAPE = SiteShape(37, (40, 17, 9))
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-2}
SLOTS, RANKS = 3, 24


def lora(seed: int, ranks: tuple[int, ...], *, dora: bool = False) -> LoraWeights:
    (weights,) = adapter(seed, ranks, dora=dora, sites=(SHAPE,))
    assert weights is not None
    return weights


def site(dtype: torch.dtype = torch.float32, *, bias: bool = False) -> FusedSite:
    """With random W and bias."""
    fused = FusedSite(SHAPE, slots=SLOTS, ranks=RANKS, dtype=dtype, device=torch.device("cpu"), bias=bias)
    generator = torch.Generator().manual_seed(0)
    fused.weight.copy_(torch.randn(fused.weight.shape, generator=generator) / 6)
    if fused.bias is not None:
        fused.bias.copy_(torch.randn(66, generator=generator))
    return fused


def inputs(rows: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(rows, 37, generator=torch.Generator().manual_seed(rows)).to(dtype)


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_matches_the_oracle(dtype: torch.dtype, bias: bool) -> None:
    """Mixed ranks up to a full slot, DoRA, a base row, an empty slot, the last slot."""
    fused = site(dtype, bias=bias)
    loaded = {0: lora(1, (8, 8, 8)), 2: lora(2, (0, 7, 1), dora=True)}
    for slot, weights in loaded.items():
        fused.put(slot, fused.prepare(weights))
    x = inputs(6, dtype)
    segments = [(2, 0, 2), (0, 3, 4), (1, 4, 5), (2, 5, 6)]
    base = torch.nn.functional.linear(
        x.double(), fused.weight.double(), None if fused.bias is None else fused.bias.double()
    )
    want = changed(loaded, segments, x, base, fused.bias)
    got = fused.project(x, tiles(segments).decode)
    torch.testing.assert_close(got.double(), want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_same_as_the_table() -> None:
    """Both plans, given the same y, add the same up to the order of sums."""
    fused = site()
    weights = lora(3, (5, 2, 9))
    fused.put(1, fused.prepare(weights))
    table = TritonLoraTable(
        [SHAPE],
        dtype=torch.float32,
        device=torch.device("cpu"),
        capacity_bytes=1 << 16,
        max_slots=SLOTS,
        max_rank=RANKS,
        max_tokens=4,
        decode_rows=4,
    )
    table.put(1, table.prepare([weights]))
    x = inputs(4)
    y_ext = fused.forward(x)
    y = y_ext[:, :66].clone()
    batch = tiles([(1, 0, 3)])
    table.apply(0, batch, x, y)
    torch.testing.assert_close(fused.expand_selected(y_ext, batch.decode), y, rtol=1e-5, atol=1e-5)


def test_the_weight_is_no_copy() -> None:
    """W is rows of the matrix that is multiplied; loads and drops leave its bits alone."""
    fused = site(bias=True)
    before = fused.weight.clone()
    fused.put(0, fused.prepare(lora(1, (8, 8, 8))))
    fused.put(2, fused.prepare(lora(2, (8, 8, 8))))
    fused.drop(0)
    assert torch.equal(fused.weight, before)
    fused.weight.zero_()
    assert fused.bias is not None
    assert torch.equal(fused.forward(inputs(2))[:, :66], fused.bias.expand(2, 66))


def test_a_slot_is_reused_without_a_trace() -> None:
    """A smaller adapter after a larger one gives the same bits as in a fresh site; a dropped slot adds nothing."""
    used, fresh = site(), site()
    used.put(2, used.prepare(lora(1, (8, 8, 8), dora=True)))
    for fused in (used, fresh):
        fused.put(2, fused.prepare(lora(2, (0, 3, 0))))
    x, batch = inputs(3), tiles([(2, 0, 3)]).decode
    assert torch.equal(used.project(x, batch), fresh.project(x, batch))
    used.drop(2)
    y_ext = used.forward(x)
    assert not y_ext[:, 66:].any()
    assert torch.equal(used.expand_selected(y_ext.clone(), batch), y_ext[:, :66])


def test_neighbours_do_not_matter() -> None:
    """Infinite weights in another slot change no bit of this slot's rows."""
    fused = site()
    fused.put(1, fused.prepare(lora(1, (8, 8, 8))))
    x, batch = inputs(2), tiles([(1, 0, 2)]).decode
    before = fused.project(x, batch)
    other = lora(2, (8, 8, 8))
    other = replace(other, a=torch.full_like(other.a, torch.inf))
    fused.put(0, fused.prepare(other))
    fused.put(2, fused.prepare(other))
    assert torch.equal(fused.project(x, batch), before)


def test_no_tiles_and_padding() -> None:
    fused = site()
    fused.put(0, fused.prepare(lora(1, (1, 1, 1))))
    x = inputs(2)
    base = fused.forward(x)[:, :66]
    assert torch.equal(fused.project(x, tiles([]).decode), base)
    assert torch.equal(fused.project(x, torch.tensor([[-1, 0, 0]] * 3, dtype=torch.int32)), base)


def test_misuse() -> None:
    fused = site()
    packed = fused.prepare(lora(1, (1, 1, 1)))
    for slot in (-1, SLOTS):
        with pytest.raises(ValueError, match=f"no slot {slot}"):
            fused.put(slot, packed)
    with pytest.raises(TypeError, match="packed for another"):
        site(torch.float16).put(0, packed)
    with pytest.raises(ValueError, match="has 25 ranks on all slices"):
        fused.prepare(lora(1, (9, 8, 8)))
    with pytest.raises(ValueError, match="multiple of 8"):
        FusedSite(SHAPE, slots=1, ranks=12, dtype=torch.float32, device=torch.device("cpu"))
    with pytest.raises(TypeError, match="share one of"):
        fused.forward(inputs(1, torch.float16))
    with pytest.raises(ValueError, match="columns"):
        fused.expand_selected(torch.zeros(1, 66), tiles([(0, 0, 1)]).decode)
    with pytest.raises(ValueError, match="int32"):
        fused.expand_selected(fused.forward(inputs(1)), torch.zeros(1, 3, dtype=torch.int64))


QKV = SiteShape(4096, (4096, 1024, 1024))
H200 = {"bytes_per_s": 4.8e12, "flops_per_s": 0.99e15, "launch_s": 1e-6}


def test_costs_by_hand() -> None:
    """8 slots of rank 16 on the qkv of an 8-billion-parameter model, one row: the numbers, counted out."""
    fused, two = fused_cost(QKV, 8, 16, 1), two_launch_cost(QKV, 8, 16, 1)
    assert (fused.launches, two.launches) == (2, 3)
    columns = 8 * 16 * 3
    assert fused.kernels[0].bytes == 2 * (4096 + 4096 * (6144 + columns) + 6144 + columns)
    assert fused.kernels[0].flops == 2 * 4096 * (6144 + columns)
    assert two.kernels[0].bytes == 2 * (4096 + 4096 * 6144 + 6144)
    assert two.kernels[1].flops == 2 * 48 * 4096
    assert fused.kernels[1].flops == two.kernels[2].flops == 2 * 16 * 6144
    assert fused.kernels[1].bytes == 2 * 48 + 2 * (16 * 6144 + 2 * 6144)
    assert fused.bytes == sum(kernel.bytes for kernel in fused.kernels)
    assert fused.flops > two.flops


@pytest.mark.parametrize(
    ("slots", "rank", "rows", "plan"),
    [
        (4, 8, 4, "fused"),  # A of all slots costs less than a launch
        (64, 64, 1, "two-launch"),  # 63 idle slots
        (32, 64, 4096, "two-launch"),  # the matrix unit has no time to give away
    ],
)
def test_the_cheaper_plan(slots: int, rank: int, rows: int, plan: str) -> None:
    assert choose_plan(QKV, slots, rank, rows, **H200) == plan


def test_without_launches_idle_slots_decide() -> None:
    """One row, eight slots: reading seven adapters for nothing can only pay for a launch."""
    free = {**H200, "launch_s": 0.0}
    assert choose_plan(QKV, 8, 16, 1, **free) == "two-launch"
    assert choose_plan(QKV, 8, 16, 1, **H200) == "fused"
