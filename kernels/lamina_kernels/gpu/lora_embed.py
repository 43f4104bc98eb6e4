"""h = A[token] for adapters on the embedding: `shrink` by gathering, because a one-hot row times A^T is one row of A^T.

    planes[0, row, 0:r] = A[token of row, 0:r]

Layout of an embedding's site in the pool and table (`lora_layout`), where it differs: A lies transposed, [vocab, r],
rows padded(r) elements apart, so that a token's ranks are side by side; the field A is its offset and R its rank. The
site has one slice, SiteShape(vocab, (hidden,)), with h = 0; `expand(..., splits=1)` then does the rest.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lamina_kernels.gpu.compile_case import CompileCase
from lamina_kernels.gpu.lora_checks import check_pool
from lamina_kernels.gpu.lora_layout import ALIGN, FIELDS
from lamina_kernels.gpu.tuned import DECODE_ROWS, LORA_EMBED_RANK, PREFILL_ROWS, lora_embed_warps

__all__ = ["compile_cases", "embed_shrink"]


@triton.jit
def _embed_kernel(
    token_ids,  # [T]
    pool,  # [N]
    table,  # [slots, FIELDS]
    tiles,  # [n, 3]
    planes,  # [>= 1, T, ranks], rows row_stride apart
    vocab,
    row_stride,
    FIELDS: tl.constexpr,
    ALIGN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
):
    i_tile = tl.program_id(0)
    slot = tl.load(tiles + i_tile * 3)
    if slot < 0:
        return
    first, count = tl.load(tiles + i_tile * 3 + 1), tl.load(tiles + i_tile * 3 + 2)
    entry = table + slot.to(tl.int64) * FIELDS
    p_a = pool + tl.multiple_of(tl.load(entry), ALIGN)
    rank = tl.load(entry + 1).to(tl.int32)

    o_row = tl.arange(0, ROWS)
    m_row = o_row < count
    row = (first + o_row).to(tl.int64)
    token = tl.load(token_ids + row, mask=m_row, other=0).to(tl.int64)
    m_token = m_row & (token >= 0) & (token < vocab)
    stride = (rank + ALIGN - 1) // ALIGN * ALIGN
    for rank_start in range(0, rank, BLOCK_RANK):
        o_rank = rank_start + tl.arange(0, BLOCK_RANK)
        m_whole = (o_rank < stride)[None, :]  # rows are padded: whole vectors
        h = tl.load(p_a + token[:, None] * stride + o_rank[None, :], mask=m_token[:, None] & m_whole, other=0.0)
        p_h = planes + row[:, None] * row_stride + o_rank[None, :]
        tl.store(p_h, h.to(tl.float32), mask=m_row[:, None] & (o_rank < rank)[None, :])


def embed_shrink(
    token_ids: Tensor, pool: Tensor, table: Tensor, tiles: Tensor, planes: Tensor, *, vocab: int, tile_rows: int
) -> None:
    """planes[0, row, 0:r] = A[token_ids[row]] for each row of each tile; the rest of `planes` is left as it is.

    token_ids int32 or int64 [T]; pool [N]; table int64 [slots, FIELDS], the embedding's rows, A stored [vocab,
    padded(r)]; tiles int32 [n, 3] for `tile_rows`; planes float32 [>= 1, >= T, >= every r]. A token outside [0, vocab)
    gives zeros. Raises ValueError or TypeError for wrong shapes, dtypes or strides.
    """
    check_pool(pool, table, tiles, planes)
    if token_ids.dtype not in (torch.int32, torch.int64) or token_ids.dim() != 1 or not token_ids.is_contiguous():
        raise ValueError(f"token ids are a flat int32 or int64 tensor, not {token_ids.dtype} {tuple(token_ids.shape)}")
    if not planes.shape[0] or planes.shape[1] < token_ids.shape[0]:
        raise ValueError(f"planes {tuple(planes.shape)} hold less than {token_ids.shape[0]} rows")
    if not tiles.shape[0]:
        return
    _embed_kernel[(tiles.shape[0],)](
        token_ids,
        pool,
        table,
        tiles,
        planes,
        vocab,
        planes.stride(1),
        **_constants(tile_rows),
        num_warps=lora_embed_warps(tile_rows),
    )


def _constants(tile_rows: int) -> dict[str, int]:
    return {"FIELDS": FIELDS, "ALIGN": ALIGN, "ROWS": tile_rows, "BLOCK_RANK": LORA_EMBED_RANK}


def compile_cases() -> list[CompileCase]:
    """Tiles of both heights."""
    return [
        _case(f"lora_embed/{name}/{dtype}", dtype, rows)
        for name, rows in (("decode", DECODE_ROWS), ("prefill", PREFILL_ROWS))
        for dtype in ("bf16", "fp16", "fp32")
    ]


def _case(name: str, dtype: str, rows: int) -> CompileCase:
    pointers = {"token_ids": "*i64", "pool": f"*{dtype}", "table": "*i64", "tiles": "*i32", "planes": "*fp32"}
    constants = _constants(rows)
    return CompileCase(
        name=name,
        kernel=_embed_kernel,
        signature={**pointers, "vocab": "i32", "row_stride": "i32", **dict.fromkeys(constants, "constexpr")},
        constants=constants,
        divisible=(*pointers, "vocab", "row_stride"),
        num_warps=lora_embed_warps(rows),
    )
