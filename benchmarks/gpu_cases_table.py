"""Calls of what the runner uses: a LoRA table filled slot by slot, the fused plan, blocks to the host and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from gpu_case import Call, noise, short
from gpu_setup import DEVICE, ON_GPU
from lamina_kernels.gpu.lora_layout import SiteShape
from lamina_kernels.lora import LoraWeights

__all__ = ["calls"]

SITE = SiteShape(4096, (4096, 1024, 1024)) if ON_GPU else SiteShape(40, (24, 8, 8))
RANKS = ((16, 16, 16), (64, 0, 8), (7, 1, 3)) if ON_GPU else ((3, 1, 2), (0, 2, 5))
DECODE = ((1, 0, 1), (0, 1, 3))  # (slot, first row, row after the last); row 3 is a base row
PREFILL = ((1, 4, 7), (0, 7, 140 if ON_GPU else 9))
SLOTS, ROWS = 3, PREFILL[-1][2] + 1


def calls(dtype: torch.dtype) -> Iterator[Call]:
    for dora in (False, True):
        adapters = _adapters(dtype, dora=dora)
        yield _table(dtype, adapters, "dora" if dora else "plain")
        yield _fused(dtype, adapters, "dora" if dora else "plain")
    yield _mover(dtype)


def _adapters(dtype: torch.dtype, *, dora: bool) -> list[LoraWeights]:
    """One per entry of RANKS, values that `dtype` holds exactly."""
    from support.triton_lora import adapter

    found = [adapter(seed, ranks, dora=dora, sites=[SITE])[0] for seed, ranks in enumerate(RANKS)]
    return [
        LoraWeights(
            (lora.a / SITE.in_features**0.5).to(dtype), tuple(b.to(dtype) for b in lora.b), lora.columns, lora.gains
        )
        for lora in found
        if lora is not None
    ]


def _reference(
    adapters: Sequence[LoraWeights], segments: Sequence[tuple[int, int, int]]
) -> Callable[[Tensor, Tensor, Tensor], None]:
    """In float64; y is changed in place."""
    from support.triton_lora import changed

    def run(x: Tensor, y: Tensor, bias: Tensor) -> None:
        y.copy_(changed(dict(enumerate(adapters)), segments, x, y, bias))

    return run


def _tiles(segments: Sequence[tuple[int, int, int]], rows: int) -> Tensor:
    from lamina_kernels.gpu.lora_tiles import build_tiles

    used = build_tiles(segments, rows)
    return torch.from_numpy(build_tiles(segments, rows, len(used) + 1)).to(DEVICE)


def _table(dtype: torch.dtype, adapters: Sequence[LoraWeights], kind: str) -> Call:
    """Slots filled, one of them twice, so that something was dropped and moved."""
    from lamina_kernels.gpu.lora_table import TritonLoraTable
    from lamina_kernels.gpu.lora_tiles import DECODE_ROWS, PREFILL_ROWS, LoraTiles

    table = TritonLoraTable(
        [SITE],
        dtype=dtype,
        device=DEVICE,
        capacity_bytes=64 << 20,
        max_slots=SLOTS,
        max_rank=64,
        max_tokens=ROWS,
        decode_rows=DECODE[-1][2],
    )
    for slot, lora in ((0, adapters[-1]), *enumerate(adapters)):
        table.put(slot, table.prepare([lora]))
    tiles = LoraTiles(_tiles(DECODE, DECODE_ROWS), _tiles(PREFILL, PREFILL_ROWS))
    return Call(
        name=f"table apply/{kind}/{short(dtype)}",
        launch=lambda x, y, bias: table.apply(0, tiles, x, y, bias),
        oracle=_reference(adapters, (*DECODE, *PREFILL)),
        arguments=(*_rows(dtype, ROWS), noise(SITE.out_features, dtype=dtype, seed=3)),
        written=(1,),
    )


def _fused(dtype: torch.dtype, adapters: Sequence[LoraWeights], kind: str) -> Call:
    """The base projection is part of the product, so y is computed, not given."""
    from lamina_kernels.gpu.lora_fused import FusedSite
    from lamina_kernels.gpu.lora_tiles import DECODE_ROWS

    widest = max(sum(ranks) for ranks in RANKS)
    site = FusedSite(SITE, slots=SLOTS, ranks=-(-widest // 8) * 8, dtype=dtype, device=DEVICE, bias=True)
    assert site.bias is not None
    site.weight.copy_(noise(SITE.out_features, SITE.in_features, dtype=dtype, seed=4, scale=SITE.in_features**-0.5))
    site.bias.copy_(noise(SITE.out_features, dtype=dtype, seed=3))
    for slot, lora in enumerate(adapters):
        site.put(slot, site.prepare(lora))
    tiles = _tiles(DECODE, DECODE_ROWS)
    change = _reference(adapters, DECODE)
    weight, bias = site.weight.cpu().double(), site.bias.cpu()

    def launch(x: Tensor, y: Tensor) -> None:
        y.copy_(site.project(x, tiles))

    def oracle(x: Tensor, y: Tensor) -> None:
        wide = x.double() @ weight.t() + bias.double()
        change(x, wide, bias)
        y.copy_(wide)

    x, y = _rows(dtype, DECODE[-1][2] + 1)
    tolerance = {torch.float32: 1e-4}.get(dtype)  # the base product is the library's, in its own order
    return Call(
        name=f"fused plan/{kind}/{short(dtype)}",
        launch=launch,
        oracle=oracle,
        arguments=(x, y),
        written=(1,),
        tolerance=tolerance,
    )


def _rows(dtype: torch.dtype, rows: int) -> tuple[Tensor, Tensor]:
    return noise(rows, SITE.in_features, dtype=dtype), noise(rows, SITE.out_features, dtype=dtype, seed=1)


def _mover(dtype: torch.dtype) -> Call:
    """Blocks spilled, wiped and promoted to other places come back bit for bit, by whichever way costs chose."""
    from lamina_kernels.gpu import blocks as kernels
    from lamina_kernels.gpu.block_mover import BlockMover, HostBlocks, calibrate

    pool = noise(8, 2, 2, 16, 2, 64, dtype=dtype)
    host = HostBlocks(4, pool[0].nbytes, pin=ON_GPU)
    costs = calibrate(DEVICE, kernels, budget_seconds=0.1 if ON_GPU else 0.0)

    def launch(pool: Tensor) -> None:
        mover = BlockMover(pool, host, costs=costs, kernels=kernels)
        mover.spill([5, 0, 7], [1, 3, 0]).wait()
        pool[[5, 0, 7]] = 0
        mover.promote([0, 1, 3], [2, 5, 6]).gate()

    def oracle(pool: Tensor) -> None:
        held = pool.clone()
        pool[[5, 0, 7]] = 0
        pool[2], pool[5], pool[6] = held[7], held[5], held[0]

    return Call(
        name=f"block mover/{short(dtype)}",
        launch=launch,
        oracle=oracle,
        arguments=(pool,),
        written=(0,),
        tolerance=0.0,
    )
