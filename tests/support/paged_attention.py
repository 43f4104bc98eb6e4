"""Sequences in a pool whose every other number is NaN, for tests of the attention kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lamina_kernels.gpu.attention_decode import DecodeScratch, paged_decode
from lamina_kernels.gpu.attention_prefill import build_prefill_tiles, paged_prefill, prefill_tile_rows
from lamina_kernels.oracles import attention as oracle
from support.kernel_numbers import DEVICE

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3}  # absolute, of outputs of size 1: weights are rounded to dtype
LAYERS, LAYER = 3, 1


@dataclass
class Paged:
    """Keys and values of sequences, in shuffled blocks; NaN in all layers but one, and beyond what may be read."""

    pool: Tensor
    tables: Tensor
    contexts: Tensor
    kv_scales: Tensor | None = None

    @classmethod
    def of(
        cls,
        ranges: Sequence[tuple[int, int]],
        *,
        kv_heads: int,
        dim: int,
        dtype: torch.dtype,
        block_size: int = 16,
        seed: int = 0,
    ) -> Paged:
        """ranges: (first readable position, context) of each sequence."""
        generator = torch.Generator().manual_seed(seed)
        width = max((-(-stop // block_size) for _, stop in ranges), default=0) + 1
        blocks = len(ranges) * width + 2
        shuffled = torch.randperm(blocks, generator=generator)[: len(ranges) * width]
        tables = shuffled.view(len(ranges), width).to(torch.int32)
        pool = torch.full((blocks, 2, LAYERS, block_size, kv_heads, dim), torch.nan)
        for table, (low, stop) in zip(tables, ranges, strict=True):
            # Of its own generator: a sequence is the same wherever it stands and however much of it may be read.
            own = torch.Generator().manual_seed(1000 + stop)
            values = torch.randn((stop, 2, kv_heads, dim), generator=own)
            for n in range(low, stop):
                pool[table[n // block_size], :, LAYER, n % block_size] = values[n]
            table[-(-stop // block_size) :] = 2**30  # never to be followed
            table[: low // block_size] = -(2**30)
        contexts = torch.tensor([stop for _, stop in ranges], dtype=torch.int32)
        return cls(pool.to(dtype).to(DEVICE), tables.to(DEVICE), contexts.to(DEVICE))

    def in_fp8(self) -> Paged:
        """Stored as x / scale."""
        scales = 0.05 + 0.01 * torch.arange(LAYERS * 2, dtype=torch.float32).view(LAYERS, 2)
        stored = self.pool.float().cpu() / scales.t().reshape(1, 2, LAYERS, 1, 1, 1)
        return Paged(stored.to(torch.float8_e4m3fn).to(DEVICE), self.tables, self.contexts, scales.to(DEVICE))


def queries(rows: int, heads: int, dim: int, dtype: torch.dtype, seed: int = 7) -> Tensor:
    """[rows, heads, dim], a view of a fused projection with keys and values beside it."""
    generator = torch.Generator().manual_seed(seed)
    fused = torch.randn((rows, heads * dim + 2 * dim), generator=generator).to(dtype)
    return fused.to(DEVICE)[:, : heads * dim].unflatten(1, (heads, dim))


def decode(paged: Paged, q: Tensor, **numbers: float | int | None) -> Tensor:
    """The kernel's result, into NaN."""
    rows, heads, dim = q.shape
    scratch = DecodeScratch.allocate(rows + 1, heads, dim, q.device)
    scratch.partial.fill_(torch.nan)
    scratch.stats.fill_(torch.nan)
    out = torch.full((rows, heads * dim), torch.nan, dtype=q.dtype, device=q.device)
    numbers = {"scale": dim**-0.5} | numbers
    paged_decode(q, paged.pool, LAYER, paged.tables, paged.contexts, out, scratch, **numbers, kv_scales=paged.kv_scales)
    return out


def decode_reference(paged: Paged, q: Tensor, **numbers: float | int | None) -> Tensor:
    out = torch.full((q.shape[0], q[0].numel()), torch.nan, dtype=torch.float64, device=q.device)
    numbers = {"scale": q.shape[2] ** -0.5} | numbers
    args = (q, paged.pool, LAYER, paged.tables, paged.contexts, out)
    oracle.paged_decode(*args, **numbers, kv_scales=paged.kv_scales)
    return out


def tiles_of(
    paged: Paged, q: Tensor, spans: Sequence[tuple[int, int, int, int]], capacity: int | None = None
) -> Tensor:
    rows = prefill_tile_rows(q.shape[1], paged.pool.shape[4], q.shape[2], q.dtype)
    return torch.from_numpy(build_prefill_tiles(spans, rows, capacity)).to(q.device)


def prefill(paged: Paged, q: Tensor, tiles: Tensor, **numbers: float | int | None) -> Tensor:
    """The kernel's result, into NaN."""
    rows, heads, dim = q.shape
    out = torch.full((rows, heads * dim), torch.nan, dtype=q.dtype, device=q.device)
    numbers = {"scale": dim**-0.5} | numbers
    args = (q, paged.pool, LAYER, paged.tables, tiles, paged.contexts, out)
    paged_prefill(*args, **numbers, kv_scales=paged.kv_scales)
    return out


def prefill_reference(paged: Paged, q: Tensor, tiles: Tensor, **numbers: float | int | None) -> Tensor:
    out = torch.full((q.shape[0], q[0].numel()), torch.nan, dtype=torch.float64, device=q.device)
    numbers = {"scale": q.shape[2] ** -0.5} | numbers
    args = (q, paged.pool, LAYER, paged.tables, tiles, paged.contexts, out)
    oracle.paged_prefill(*args, **numbers, kv_scales=paged.kv_scales)
    return out


def assert_near(got: Tensor, wanted: Tensor, factor: float = 1) -> None:
    """NaN counts as equal to NaN: rows that nobody wrote."""
    atol = TOLERANCE[got.dtype] * factor
    torch.testing.assert_close(got.double(), wanted, rtol=atol, atol=atol, equal_nan=True)
