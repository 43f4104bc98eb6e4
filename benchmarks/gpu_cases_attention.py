"""Calls of paged attention: decode rows and prompt chunks, windows, soft caps, fp8 keys, unused rows, padding tiles."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from gpu_case import Call, noise, poisoned, short
from gpu_setup import DEVICE, ON_GPU

__all__ = ["calls"]

HEADS, KV_HEADS, DIM = (16, 4, 128) if ON_GPU else (2, 1, 64)
CONTEXTS = (700, 1, 0, 16, 17, 333, 64, 1023) if ON_GPU else (18, 0, 1)  # 0: an unused row
CHUNKS = ((70, 0), (9, 300), (1, 64)) if ON_GPU else ((5, 14),)  # (rows, positions before them)
LAYERS, BLOCK_SIZE = 2, 16
FP8 = torch.float8_e4m3fn
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 40 if ON_GPU else 7},
    "softcap": {"softcap": 20.0},
    "fp8": {},
}


def calls(dtype: torch.dtype) -> Iterator[Call]:
    for way, options in WAYS.items() if ON_GPU else [("plain", {}), ("window", WAYS["window"])]:
        scales = torch.tensor([[0.02, 0.01]] * LAYERS, device=DEVICE) if way == "fp8" else None
        given = {"scale": DIM**-0.5, "kv_scales": scales} | options
        yield _decode(f"paged_decode/{way}/{short(dtype)}", dtype, given)
        yield _prefill(f"paged_prefill/{way}/{short(dtype)}", dtype, given)


def _pool(sequences: int, longest: int, dtype: torch.dtype, scales: Tensor | None) -> tuple[Tensor, Tensor]:
    """The pool and tables [sequences, blocks] int32 of blocks out of order."""
    blocks = -(-longest // BLOCK_SIZE)
    pool = noise(sequences * blocks, 2, LAYERS, BLOCK_SIZE, KV_HEADS, DIM, dtype=dtype, seed=1)
    if scales is not None:
        pool = (pool.float() / scales[0, 0]).to(FP8)
    order = torch.randperm(sequences * blocks, generator=torch.Generator().manual_seed(2))
    return pool, order.to(torch.int32).view(sequences, blocks).to(DEVICE)


def _decode(name: str, dtype: torch.dtype, options: dict[str, Any]) -> Call:
    from lamina_kernels.gpu.attention_decode import DecodeScratch, paged_decode
    from lamina_kernels.oracles import attention as oracle

    rows = len(CONTEXTS)
    pool, tables = _pool(rows, max(CONTEXTS), dtype, options["kv_scales"])
    contexts = torch.tensor(CONTEXTS, dtype=torch.int32, device=DEVICE)
    scratch = DecodeScratch.allocate(rows, HEADS, DIM, DEVICE)
    scratch.partial.fill_(float("nan"))
    q = noise(rows, HEADS + KV_HEADS, DIM, dtype=dtype)[:, :HEADS]  # rows apart, as in a fused projection
    out = poisoned(rows, HEADS * DIM, dtype=dtype)
    return Call(
        name=name,
        launch=paged_decode,
        oracle=oracle.paged_decode,
        arguments=(q, pool, 1, tables, contexts, out, scratch),
        options=options,
        written=(5,),
    )


def _prefill(name: str, dtype: torch.dtype, options: dict[str, Any]) -> Call:
    from lamina_kernels.gpu.attention_prefill import build_prefill_tiles, paged_prefill, prefill_tile_rows
    from lamina_kernels.oracles import attention as oracle

    spans, row = [], 1  # row 0 is in no tile: it stays NaN
    for number, (count, before) in enumerate(CHUNKS):
        spans.append((number, row, count, before))
        row += count
    lengths = [count + before for count, before in CHUNKS]
    pool, tables = _pool(len(CHUNKS), max(lengths), dtype, options["kv_scales"])
    tile_rows = prefill_tile_rows(HEADS, KV_HEADS, DIM, dtype)
    used = build_prefill_tiles(spans, tile_rows)
    tiles = torch.from_numpy(build_prefill_tiles(spans, tile_rows, len(used) + 2)).to(DEVICE)
    contexts = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    q = noise(row, HEADS + KV_HEADS, DIM, dtype=dtype)[:, :HEADS]
    out = poisoned(row, HEADS * DIM, dtype=dtype)
    return Call(
        name=name,
        launch=paged_prefill,
        oracle=oracle.paged_prefill,
        arguments=(q, pool, 1, tables, tiles, contexts, out),
        options=options,
        written=(6,),
    )
