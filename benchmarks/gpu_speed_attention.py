"""Paged attention: decode against the bandwidth that a copy reaches here, prefill against the arithmetic peak."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from chips import Chip
from costs import attention_work, decode, prefill
from gpu_case import noise
from gpu_clock import copy_gb_s, measure
from gpu_report import Figure, Item
from gpu_scale import Scale
from gpu_setup import DEVICE

__all__ = ["items", "paged"]

BLOCK_SIZE = 16


def paged(scale: Scale, sequences: int, context: int) -> tuple[Tensor, Tensor, Tensor]:
    """A pool [blocks, 2, 1, 16, KV heads, dim] of random keys and values, tables and contexts; blocks out of order."""
    blocks = -(-context // BLOCK_SIZE)
    shape = scale.shape
    pool = noise(sequences * blocks, 2, 1, BLOCK_SIZE, shape.kv_heads, shape.head_dim, dtype=scale.dtype)
    order = torch.randperm(sequences * blocks, generator=torch.Generator().manual_seed(0))
    tables = order.to(torch.int32).view(sequences, blocks).to(DEVICE)
    return pool, tables, torch.full((sequences,), context, dtype=torch.int32, device=DEVICE)


def items(scale: Scale, chip: Chip) -> Iterator[Item]:
    for sequences, context in scale.attention:
        yield f"decode {sequences} x {context}", partial(_decode, scale, chip, sequences, context)
    for tokens, prefix in scale.prompts:
        yield f"prefill {tokens} behind {prefix}", partial(_prefill, scale, chip, tokens, prefix)


def _decode(scale: Scale, chip: Chip, sequences: int, context: int) -> list[Figure]:
    from lamina_kernels.gpu.attention_decode import DecodeScratch, paged_decode

    shape = scale.shape
    pool, tables, contexts = paged(scale, sequences, context)
    q = noise(sequences, shape.heads, shape.head_dim, dtype=scale.dtype)
    out = torch.empty(sequences, shape.heads * shape.head_dim, dtype=scale.dtype, device=DEVICE)
    scratch = DecodeScratch.allocate(sequences, shape.heads, shape.head_dim, DEVICE)
    options = {"scale": shape.head_dim**-0.5}
    taken = measure(lambda: paged_decode(q, pool, 0, tables, contexts, out, scratch, **options), cold=True)
    batch = decode(sequences, context, itemsize=scale.dtype.itemsize, kv_itemsize=scale.dtype.itemsize)
    work = attention_work(shape, batch, chip)
    name = f"attention, decode {sequences} x {context}"
    ceiling = copy_gb_s(max(int(work.bytes), 1 << 16))
    return [
        Figure.of_time(name, taken, work.seconds(chip)),
        Figure.of_rate(f"{name}, against a copy of as many bytes", work.bytes / taken / 1e9, ceiling),
    ]


def _prefill(scale: Scale, chip: Chip, tokens: int, prefix: int) -> list[Figure]:
    from lamina_kernels.gpu.attention_prefill import build_prefill_tiles, paged_prefill, prefill_tile_rows

    shape = scale.shape
    pool, tables, contexts = paged(scale, 1, prefix + tokens)
    q = noise(tokens, shape.heads, shape.head_dim, dtype=scale.dtype)
    out = torch.empty(tokens, shape.heads * shape.head_dim, dtype=scale.dtype, device=DEVICE)
    rows = prefill_tile_rows(shape.heads, shape.kv_heads, shape.head_dim, scale.dtype)
    tiles = torch.from_numpy(build_prefill_tiles([(0, 0, tokens, prefix)], rows)).to(DEVICE)
    options = {"scale": shape.head_dim**-0.5}
    taken = measure(lambda: paged_prefill(q, pool, 0, tables, tiles, contexts, out, **options), cold=True)
    batch = prefill(tokens, prefix, itemsize=scale.dtype.itemsize, kv_itemsize=scale.dtype.itemsize)
    return [
        Figure.of_time(
            f"attention, prefill {tokens} behind {prefix}", taken, attention_work(shape, batch, chip).seconds(chip)
        )
    ]
