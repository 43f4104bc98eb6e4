"""FlashInfer's attention behind the signatures of `paged_decode` and `paged_prefill`. Optional; **never run here**.

The package could not be installed where this was written. The translation of arguments is tested against a stand-in,
and follows FlashInfer's published source: `BatchDecodeWithPagedKVCacheWrapper` and
`BatchPrefillWithPagedKVCacheWrapper` (flashinfer/decode.py, prefill.py), whose `fa2` back end takes one layer of our
block-first pool as it lies: `paged_kv_t` (include/flashinfer/page.cuh) has strides of its own for pages, tokens and
heads, the same for keys and values. The stride between pages is 32 bits wide there, in elements, and that is checked.

What differs from the Triton kernels:

- It plans on the host, per step, from host copies of tables and contexts: `begin_decode` and `begin_prefill` take them.
  So it cannot be captured in a CUDA graph; the launches themselves do not sync.
- Pages wholly before the window are left out, so that stale table entries are never followed. That it masks the rest of
  a last page in loads, as the Triton kernels do, is taken from its source and not proven.
- Splits have a fixed size, which its documentation calls batch-invariant. A row's bits may depend on the chunk.
- No fp8 pool: scales are host numbers there. No float32, no head dims but 64, 128 and 256.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lamina_kernels.gpu.attention_decode import DecodeScratch
from lamina_kernels.gpu.attention_pool import AttentionShape, check_attention

__all__ = ["FlashInfer", "available"]

_DECODE = "BatchDecodeWithPagedKVCacheWrapper"
_PREFILL = "BatchPrefillWithPagedKVCacheWrapper"
_HEAD_DIMS = (64, 128, 256)
_SPLIT_KEYS = 256  # as the least part in `tuned.decode_tile`
_WORKSPACE_BYTES = 128 << 20  # what its documentation recommends


def available() -> bool:
    """Whether the package and a CUDA device are there. Imports nothing."""
    if torch.version.hip is not None or not torch.cuda.is_available():
        return False
    return importlib.util.find_spec("flashinfer") is not None


@dataclass(frozen=True, slots=True)
class _Numbers:
    scale: float
    window: int | None
    softcap: float | None


@dataclass(slots=True)
class _Pages:
    """Host copies of one kind of rows: what FlashInfer plans by. Sequences without rows are left out."""

    tables: np.ndarray  # [n, max_blocks] int32
    contexts: np.ndarray  # [n]
    counts: np.ndarray  # [n] rows of q
    plans: dict[object, Any] = field(default_factory=dict)  # planned wrappers of this step

    def listed(self, window: int | None, block_size: int) -> tuple[Tensor, Tensor, Tensor]:
        """(indptr [n + 1], page indices, entries in the last page [n]), int32 on the host."""
        seen = np.zeros_like(self.contexts)
        if window is not None:
            seen = np.maximum(self.contexts - self.counts + 1 - window, 0)
        first, stop = seen // block_size, -(-self.contexts // block_size)
        indices = [table[a:b] for table, a, b in zip(self.tables, first, stop, strict=True)]
        indptr = np.concatenate([[0], np.cumsum(stop - first)])
        last = self.contexts - (stop - 1) * block_size
        return _int32(indptr), _int32(np.concatenate(indices)), _int32(last)


def _int32(numbers: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(numbers, dtype=np.int32))


class FlashInfer:
    """One step's attention. Not shared between threads or streams: the workspace is reused from launch to launch."""

    def __init__(self, device: torch.device, workspace_bytes: int = _WORKSPACE_BYTES) -> None:
        """Raises ImportError without the package."""
        self._library = importlib.import_module("flashinfer")
        self._device = device
        self._workspace = torch.empty(workspace_bytes, dtype=torch.uint8, device=device)
        self._decode: _Pages | None = None
        self._prefill: _Pages | None = None
        self._first_row = 0

    def begin_decode(self, tables: np.ndarray, contexts: np.ndarray) -> None:
        """The step's decode rows, host copies of what the launches get. Unused rows (context 0) come last."""
        used = int(np.count_nonzero(contexts))
        if np.any(contexts[:used] == 0):
            raise ValueError("unused decode rows must come after all used ones")
        self._decode = _Pages(tables[:used], contexts[:used].astype(np.int64), np.ones(used, dtype=np.int64))

    def begin_prefill(self, tables: np.ndarray, spans: Sequence[tuple[int, int, int, int]]) -> None:
        """The step's chunks, as given to `build_prefill_tiles`: in row order, without gaps."""
        spans = [span for span in spans if span[2]]
        for (_, first, count, _), (_, following, _, _) in itertools.pairwise(spans):
            if first + count != following:
                raise ValueError(f"chunks must follow each other; one ends at row {first + count}, then {following}")
        self._first_row = spans[0][1] if spans else 0
        sequences, _, counts, starts = np.array(spans, dtype=np.int64).reshape(-1, 4).T
        self._prefill = _Pages(tables[sequences], starts + counts, counts)

    def paged_decode(
        self,
        q: Tensor,
        pool: Tensor,
        layer: int,
        tables: Tensor,
        contexts: Tensor,
        out: Tensor,
        scratch: DecodeScratch | None = None,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        kv_scales: Tensor | None = None,
    ) -> None:
        """As `attention_decode.paged_decode`, after `begin_decode` of the same rows; the scratch is not used.

        Raises RuntimeError before it, ValueError for what FlashInfer cannot do.
        """
        shape = check_attention(
            q, pool, layer, tables, contexts, out, scale=scale, window=window, softcap=softcap, kv_scales=kv_scales
        )
        _check_supported(q, pool, out, kv_scales)
        pages = _begun(self._decode, "begin_decode")
        used = len(pages.contexts)
        out[used:].zero_()
        if used:
            wrapper = self._planned(_DECODE, pages, q.dtype, shape, _Numbers(scale, window, softcap))
            wrapper.run(q[:used], _layer(pool, layer), out=out[:used].unflatten(1, q.shape[1:]))

    def paged_prefill(
        self,
        q: Tensor,
        pool: Tensor,
        layer: int,
        tables: Tensor,
        tiles: Tensor,
        contexts: Tensor,
        out: Tensor,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        kv_scales: Tensor | None = None,
    ) -> None:
        """As `attention_prefill.paged_prefill`, after `begin_prefill` of the same chunks; the tiles are not used.

        Raises RuntimeError before it, ValueError for what FlashInfer cannot do.
        """
        shape = check_attention(
            q, pool, layer, tables, contexts, out, scale=scale, window=window, softcap=softcap, kv_scales=kv_scales
        )
        _check_supported(q, pool, out, kv_scales)
        pages = _begun(self._prefill, "begin_prefill")
        rows = slice(self._first_row, self._first_row + int(pages.counts.sum()))
        if len(pages.contexts):
            wrapper = self._planned(_PREFILL, pages, q.dtype, shape, _Numbers(scale, window, softcap))
            wrapper.run(q[rows], _layer(pool, layer), out=out[rows].unflatten(1, q.shape[1:]))

    def _planned(self, kind: str, pages: _Pages, dtype: torch.dtype, shape: AttentionShape, numbers: _Numbers) -> Any:
        """A planned wrapper, made once per step for all layers with the same numbers."""
        key = (shape, dtype, numbers)
        if key not in pages.plans:
            options: dict[str, object] = {
                "num_qo_heads": shape.heads,
                "num_kv_heads": shape.kv_heads,
                "page_size": shape.block_size,
                "sm_scale": numbers.scale,
                "window_left": -1 if numbers.window is None else numbers.window - 1,  # tokens before one's own
                "logits_soft_cap": numbers.softcap,
                "q_data_type": dtype,
                "kv_data_type": dtype,
                "fixed_split_size": _SPLIT_KEYS // shape.block_size,
            }
            indptr, indices, last = pages.listed(numbers.window, shape.block_size)
            listed = (indptr, indices.to(self._device), last)
            make = getattr(self._library, kind)
            if kind == _DECODE:
                plan = make(self._workspace, "NHD", use_tensor_cores=True, backend="fa2")
                plan.plan(*listed, head_dim=shape.head_dim, **options)
            else:
                plan = make(self._workspace, "NHD", backend="fa2")
                starts = _int32(np.concatenate([[0], np.cumsum(pages.counts)]))
                plan.plan(starts, *listed, head_dim_qk=shape.head_dim, causal=True, **options)
            pages.plans[key] = plan
        return pages.plans[key]


def _begun(pages: _Pages | None, method: str) -> _Pages:
    if pages is None:
        raise RuntimeError(f"{method}() must have the step's rows first")
    return pages


def _layer(pool: Tensor, layer: int) -> tuple[Tensor, Tensor]:
    """Keys and values of one layer, [blocks, block size, KV heads, dim] each: views of equal strides."""
    return pool[:, 0, layer], pool[:, 1, layer]


def _check_supported(q: Tensor, pool: Tensor, out: Tensor, kv_scales: Tensor | None) -> None:
    if q.shape[2] not in _HEAD_DIMS or q.dtype == torch.float32 or kv_scales is not None:
        raise ValueError(
            f"here FlashInfer takes float16 and bfloat16 with head dims {_HEAD_DIMS}, no float8 pool; got {q.dtype}, "
            f"{q.shape[2]}, pool {pool.dtype}"
        )
    if pool.stride(0) >= 2**32:
        raise ValueError(f"a block of {pool.stride(0)} elements: FlashInfer's stride between pages has 32 bits")
    if not out.is_contiguous():
        raise ValueError("FlashInfer writes contiguous outputs only")
