"""h = A[token] for adapters on the embedding: `shrink` by gathering, because a one-hot row times A^T is one row of A^T.

    planes[0, row, 0:r] = A[token of row, 0:r]

Layout of an embedding's site in the pool and table (`lora_layout`), where it differs: A lies transposed, [vocab, r], rows
padded(r) elements apart, so that a token's ranks are side by side; the field A is its offset and R its rank. The site has
one slice, SiteShape(vocab, (hidden,)), with h = 0; `expand(..., splits=1)` then does the rest.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lamina_kernels.gpu.compile_case import CompileCase
from lamina_kernels.gpu.lora_checks import check_pool
from lamina_kernels.gpu.lora_layout import ALIGN, FIELDS

__all__ = ["compile_cases", "embed_shrink"]


def embed_shrink(
    token_ids: Tensor, pool: Tensor, table: Tensor, tiles: Tensor, planes: Tensor, *, vocab: int, tile_rows: int
) -> None:
    """planes[0, row, 0:r] = A[token_ids[row]] for each row of each tile; the rest of `planes` is left as it is.

    token_ids int32 or int64 [T]; pool [N]; table int64 [slots, FIELDS], the embedding's rows, A stored [vocab, padded(r)];
    tiles int32 [n, 3] for `tile_rows`; planes float32 [>= 1, >= T, >= every r]. A token outside [0, vocab) gives zeros.
    Raises ValueError or TypeError for wrong shapes, dtypes or strides.
    """
    raise NotImplementedError
