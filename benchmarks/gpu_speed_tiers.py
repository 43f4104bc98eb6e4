"""Spill and promote: blocks of the KV pool to pinned host memory and back, one by one and staged."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from chips import Chip
from gpu_clock import measure
from gpu_report import Figure, Item
from gpu_scale import Scale
from gpu_setup import DEVICE, ON_GPU

__all__ = ["items"]

BLOCK_SIZE = 16


def items(scale: Scale, chip: Chip) -> Iterator[Item]:
    yield "tiers", partial(_tiers, scale, chip)


def _tiers(scale: Scale, chip: Chip) -> list[Figure]:
    """Rates in GB/s of payload; the ceiling is the link's, which protocol overhead keeps at 75-85 %."""
    from lamina_kernels.gpu.blocks import gather_blocks, scatter_blocks

    shape, count = scale.shape, scale.blocks
    block = (2, shape.layers, BLOCK_SIZE, shape.kv_heads, shape.head_dim)
    pool = torch.zeros(2 * count, *block, dtype=scale.dtype, device=DEVICE)
    host = torch.zeros(count, *block, dtype=scale.dtype, pin_memory=ON_GPU)
    staged = torch.empty(count, *block, dtype=scale.dtype, device=DEVICE)
    numbers = list(range(0, 2 * count, 2))  # every other block: nothing merges
    ids = torch.tensor(numbers, dtype=torch.int32, device=DEVICE)

    def spill_singly() -> None:
        for row, number in enumerate(numbers):
            host[row].copy_(pool[number], non_blocking=True)

    def promote_singly() -> None:
        for row, number in enumerate(numbers):
            pool[number].copy_(host[row], non_blocking=True)

    def spill_staged() -> None:
        gather_blocks(pool, ids, staged)
        host.copy_(staged, non_blocking=True)

    def promote_staged() -> None:
        staged.copy_(host, non_blocking=True)
        scatter_blocks(staged, ids, pool)

    ways: dict[str, Callable[[], None]] = {
        "spill, a copy per block": spill_singly,
        "promote, a copy per block": promote_singly,
        "spill, gather + one copy": spill_staged,
        "promote, one copy + scatter": promote_staged,
    }
    what = f"{count} blocks of {host[0].nbytes >> 10} KiB"
    return [
        Figure.of_rate(f"{name}, {what}", host.nbytes / measure(run) / 1e9, chip.link_gb_s)
        for name, run in ways.items()
    ]
