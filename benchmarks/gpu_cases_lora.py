"""Calls of the LoRA kernels: decode and prefill tiles, mixed ranks, base rows, DoRA, the embedding."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from gpu_case import Call, noise, poisoned, short
from gpu_lora import Resident, resident
from gpu_setup import DEVICE, ON_GPU
from lamina_kernels.gpu.lora_layout import SiteShape
from lamina_kernels.gpu.lora_tiles import build_tiles
from lamina_kernels.gpu.tuned import (
    LORA_EXPAND_DECODE,
    LORA_EXPAND_PREFILL,
    LORA_SHRINK_DECODE,
    LORA_SHRINK_PREFILL,
    ExpandShape,
    ShrinkShape,
)

__all__ = ["calls"]

RANKS = (8, 16, 64, 256, 7, 1, 0) if ON_GPU else (7, 1, 0)  # the last adapter changes nothing
SITES = (
    {"qkv": SiteShape(4096, (4096, 1024, 1024)), "down": SiteShape(14336, (4096,))}
    if ON_GPU
    else {"qkv": SiteShape(40, (24, 8, 8))}
)
KINDS: dict[str, tuple[ShrinkShape, ExpandShape]] = {
    "decode": (LORA_SHRINK_DECODE, LORA_EXPAND_DECODE),
    "prefill": (LORA_SHRINK_PREFILL, LORA_EXPAND_PREFILL),
}


def calls(dtype: torch.dtype) -> Iterator[Call]:
    """shrink and expand of every kind and site; expand with DoRA's gains; the embedding's gather."""
    for name, site in SITES.items():
        for kind, (shrink, expand) in KINDS.items():
            label = f"{name}/{kind}/{short(dtype)}"
            held = resident([site], RANKS, dtype)
            tiles, rows = _tiles(shrink.rows)
            yield _shrink(f"shrink/{label}", site, held, tiles, rows, shrink)
            yield _expand(f"expand/{label}", site, held, tiles, rows, shrink, expand)
            dora = resident([site], RANKS, dtype, dora=True)
            yield _expand(f"expand/dora/{label}", site, dora, tiles, rows, shrink, expand)
    yield _embedding(dtype)


def _tiles(tile_rows: int) -> tuple[Tensor, int]:
    """Segments of one row up to more than a tile, each behind a base row, with padding at the end."""
    segments, row = [], 0
    for slot in reversed(range(len(RANKS))):
        count = (1, 3, tile_rows + 1 if ON_GPU else 2)[slot % 3]
        segments.append((slot, row + 1, row + 1 + count))
        row += 1 + count
    tiles = build_tiles(segments, tile_rows)
    padded = build_tiles(segments, tile_rows, len(tiles) + 3)
    return torch.from_numpy(padded).to(DEVICE), row + 1


def _shrink(name: str, site: SiteShape, held: Resident, tiles: Tensor, rows: int, kind: ShrinkShape) -> Call:
    from lamina_kernels.gpu.lora_shrink import shrink
    from lamina_kernels.oracles import lora_device as oracle

    planes = poisoned(kind.splits(site.in_features), rows, held.max_rank, dtype=torch.float32)
    x = noise(rows, site.in_features, dtype=held.pool.dtype)
    return Call(
        name=name,
        launch=shrink,
        oracle=oracle.shrink,
        arguments=(x, held.pool, held.table[0], tiles, planes),
        options={"kind": kind},
        written=(4,),
        tolerance=1e-5,  # sums are fp32 whatever the operands are
    )


def _expand(
    name: str, site: SiteShape, held: Resident, tiles: Tensor, rows: int, shrink: ShrinkShape, kind: ExpandShape
) -> Call:
    from lamina_kernels.gpu.lora_expand import expand
    from lamina_kernels.oracles import lora_device as oracle

    splits = shrink.splits(site.in_features)
    planes = noise(splits, rows, held.max_rank, dtype=torch.float32)
    y = noise(rows, site.out_features, dtype=held.pool.dtype, seed=1)
    bias = noise(site.out_features, dtype=held.pool.dtype, seed=2)
    return Call(
        name=name,
        launch=expand,
        oracle=oracle.expand,
        arguments=(planes, held.pool, held.gains, held.table[0], tiles, y, bias),
        options={"shape": site, "splits": splits, "kind": kind},
        written=(5,),
    )


def _embedding(dtype: torch.dtype) -> Call:
    from lamina_kernels.gpu.lora_embed import embed_shrink
    from lamina_kernels.oracles import lora_device as oracle

    vocab = 32000 if ON_GPU else 50
    turned = [SiteShape(1, (64,))]  # only for the table's fields: A lies transposed here
    held = resident(turned, (8, 16), dtype)
    for slot, rank in enumerate((8, 16)):
        held.table[0, slot, 0], held.table[0, slot, 1] = slot * vocab * 8, rank
    pool = noise(vocab * (8 + 16), dtype=dtype)
    tiles, rows = _embedding_tiles()
    tokens = torch.arange(rows, device=DEVICE, dtype=torch.int64) * 7 % vocab
    tokens[3] = -1  # outside: zeros
    return Call(
        name=f"embed_shrink/{short(dtype)}",
        launch=embed_shrink,
        oracle=oracle.embed_shrink,
        arguments=(tokens, pool, held.table[0], tiles, poisoned(1, rows, 16, dtype=torch.float32)),
        options={"vocab": vocab, "tile_rows": LORA_SHRINK_DECODE.rows},
        written=(4,),
        tolerance=0.0,
    )


def _embedding_tiles() -> tuple[Tensor, int]:
    tiles = build_tiles([(1, 0, 2), (0, 2, 7)], LORA_SHRINK_DECODE.rows, 6)
    return torch.from_numpy(tiles).to(DEVICE), 8
