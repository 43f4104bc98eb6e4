"""CUDA graph replay: one decode layer with LoRA, captured once, replayed for other adapters, rows and contexts.

Captured and eager launches must agree bit for bit, whatever is in the slots, because a replay only reads what the
persistent tensors hold then. Without a GPU the "replay" is a second eager run: the code below cannot rot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from chips import Chip
from gpu_case import DTYPES, noise, short
from gpu_clock import graph_of
from gpu_lora import Resident, resident, site_shapes, split_rows
from gpu_report import Item
from gpu_scale import FULL, SMALL, Scale
from gpu_setup import DEVICE, ON_GPU
from lamina_kernels.gpu.attention_decode import DecodeScratch, paged_decode
from lamina_kernels.gpu.gated import gated
from lamina_kernels.gpu.lora_expand import expand
from lamina_kernels.gpu.lora_shrink import shrink
from lamina_kernels.gpu.lora_tiles import build_tiles, tile_capacity
from lamina_kernels.gpu.norm import add_rms_norm
from lamina_kernels.gpu.rotate_write import rotate_write
from lamina_kernels.gpu.tuned import LORA_EXPAND_DECODE, LORA_SHRINK_DECODE

__all__ = ["items"]

SHAPE = FULL.shape if ON_GPU else SMALL.shape
ROWS, BLOCKS_EACH, BLOCK_SIZE, SLOTS = (64, 32, 16, 8) if ON_GPU else (3, 1, 16, 2)
RANKS = (16, 8, 64, 1, 7, 32, 16, 256) if ON_GPU else (7, 2)


class _Layer:
    """One decoder layer on persistent tensors; `run` is what a graph captures."""

    def __init__(self, dtype: torch.dtype) -> None:
        shape, self.dtype = SHAPE, dtype
        self.sites = site_shapes(shape, 1)
        self.weights = [
            noise(site.out_features, site.in_features, dtype=dtype, seed=i, scale=site.in_features**-0.5)
            for i, site in enumerate(self.sites)
        ]
        self.norm = noise(shape.hidden, dtype=torch.float32, seed=9)
        self.held = resident(self.sites, RANKS, dtype)
        capacity = tile_capacity(ROWS, SLOTS, LORA_SHRINK_DECODE.rows)
        self.tiles = torch.full((capacity, 3), -1, dtype=torch.int32, device=DEVICE)
        splits = max(LORA_SHRINK_DECODE.splits(site.in_features) for site in self.sites)
        self.planes = torch.empty(splits, ROWS, self.held.max_rank, dtype=torch.float32, device=DEVICE)
        self.scratch = DecodeScratch.allocate(ROWS, shape.heads, shape.head_dim, DEVICE)
        self.pool = noise(ROWS * BLOCKS_EACH, 2, 1, BLOCK_SIZE, shape.kv_heads, shape.head_dim, dtype=dtype, scale=0.5)
        self.tables = torch.zeros(ROWS, BLOCKS_EACH, dtype=torch.int32, device=DEVICE)
        self.contexts = torch.zeros(ROWS, dtype=torch.int32, device=DEVICE)
        self.slots = torch.full((ROWS,), -1, dtype=torch.int64, device=DEVICE)
        self.cos, self.sin = (torch.zeros(ROWS, 1, shape.head_dim, dtype=dtype, device=DEVICE) for _ in range(2))
        self.h, self.x = (torch.zeros(ROWS, shape.hidden, dtype=dtype, device=DEVICE) for _ in range(2))
        self.out = torch.zeros(ROWS, shape.hidden, dtype=dtype, device=DEVICE)

    def fill(self, seed: int) -> None:
        """Another step: other rows, adapters, contexts and blocks in the same tensors. Leaves some rows unused."""
        draw = torch.Generator().manual_seed(seed)
        used = ROWS if seed % 2 == 0 else max(1, ROWS - 3)
        contexts = torch.randint(1, BLOCKS_EACH * BLOCK_SIZE + 1, (ROWS,), generator=draw)
        contexts[used:] = 0
        blocks = torch.randperm(ROWS * BLOCKS_EACH, generator=draw).view(ROWS, BLOCKS_EACH)
        last = contexts - 1
        slots = blocks[torch.arange(ROWS), last.clamp(min=0) // BLOCK_SIZE] * BLOCK_SIZE + last % BLOCK_SIZE
        slots[used:] = -1
        parts = torch.randperm(SLOTS, generator=draw)[: 1 + seed % SLOTS].tolist()
        segments = split_rows(max(1, used - 1), parts)  # the last used row is a base row
        tiles = build_tiles(segments, LORA_SHRINK_DECODE.rows, len(self.tiles))
        self.tables.copy_(blocks.to(torch.int32))
        self.contexts.copy_(contexts.to(torch.int32))
        self.slots.copy_(slots)
        self.tiles.copy_(torch.from_numpy(tiles))
        self.held.table.copy_(self._swapped(seed))
        for tensor, salt in ((self.h, 1), (self.x, 2), (self.cos, 3), (self.sin, 4)):
            tensor.copy_(noise(*tensor.shape, dtype=self.dtype, seed=10 * seed + salt))

    def _swapped(self, seed: int) -> Tensor:
        """Other adapters in the slots; one slot empty."""
        fresh: Resident = resident(self.sites, RANKS, self.dtype)
        table = fresh.table.roll(seed, dims=1)
        table[:, seed % SLOTS, 1] = 0
        for field in (3, 7, 11):
            table[:, seed % SLOTS, field] = 0
        return table

    def run(self) -> None:
        shape = SHAPE
        qkv = self._project(0, self.x)
        heads = qkv.view(ROWS, -1, shape.head_dim)
        q, k, v = heads.split((shape.heads, shape.kv_heads, shape.kv_heads), 1)
        rotate_write(q, k, v, self.cos, self.sin, self.pool, 0, self.slots, None)
        mixed = torch.empty(ROWS, shape.heads * shape.head_dim, dtype=self.dtype, device=DEVICE)
        scale = shape.head_dim**-0.5
        paged_decode(q, self.pool, 0, self.tables, self.contexts, mixed, self.scratch, scale=scale)
        x = add_rms_norm(self.h, self._project(1, mixed), self.norm, 1e-5)
        inner = gated(self._project(2, x), "silu")
        self.out.copy_(add_rms_norm(self.h, self._project(3, inner), self.norm, 1e-5))

    def _project(self, number: int, x: Tensor) -> Tensor:
        y, site, kind = torch.mm(x, self.weights[number].t()), self.sites[number], LORA_SHRINK_DECODE
        held, table = self.held, self.held.table[number]
        shrink(x, held.pool, table, self.tiles, self.planes, kind=kind)
        splits = kind.splits(site.in_features)
        expand(
            *(self.planes, held.pool, held.gains, table, self.tiles, y, None),
            shape=site,
            splits=splits,
            kind=LORA_EXPAND_DECODE,
        )
        return y


def items(scale: Scale, chip: Chip) -> Iterator[Item]:
    for dtype in DTYPES[:2] if ON_GPU else DTYPES[:1]:
        yield f"replay equals eager, {short(dtype)}", partial(_replay, dtype)


def _replay(dtype: torch.dtype) -> None:
    layer = _Layer(dtype)
    layer.fill(0)
    replay = graph_of(layer.run)
    for seed in range(1, 5 if ON_GPU else 3):
        eager = _after(layer, seed, layer.run)
        replayed = _after(layer, seed, replay)
        for name, a, b in zip(("output", "residual", "pool"), eager, replayed, strict=True):
            assert torch.equal(a, b), f"step {seed}: the replay's {name} differs from eager launches"
        if seed == 1:
            assert bool(torch.isfinite(eager[0]).all()), "the layer's output is not finite"
            first = eager[0]
    assert not torch.equal(first, eager[0]), "steps with other inputs gave the same output"


def _after(layer: _Layer, seed: int, run: Callable[[], object]) -> tuple[Tensor, Tensor, Tensor]:
    pool = layer.pool.clone()
    layer.fill(seed)
    run()
    found = layer.out.clone(), layer.h.clone(), layer.pool.clone()
    layer.pool.copy_(pool)
    return found
