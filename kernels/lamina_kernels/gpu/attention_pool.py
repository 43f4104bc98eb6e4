"""What both attention kernels ask of their arguments, and how the KV pool lies in memory.

    pool [num_blocks, 2 (k, v), layers, block_size, kv_heads, head_dim], contiguous

Position n of a sequence is row n % block_size of block tables[sequence, n // block_size]. One head's keys of one block
are block_size pieces of head_dim elements, kv_heads * head_dim elements apart.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["BLOCK_SIZES", "HEAD_DIMS", "NO_WINDOW", "AttentionShape", "check_attention", "kv_pointer", "logit_factors"]

HEAD_DIMS = (64, 80, 96, 128, 256)
BLOCK_SIZES = (16, 32)
NO_WINDOW = 2**31 - 1  # a window that hides nothing: positions are int32
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_FP8 = torch.float8_e4m3fn
_LOG2_E = math.log2(math.e)


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The sizes that a launch is compiled for."""

    heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    layers: int

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.heads // self.kv_heads


def logit_factors(scale: float, softcap: float | None) -> tuple[float, float]:
    """`factor` and `cap` of `attention_tile.logits`."""
    if softcap is None:
        return scale * _LOG2_E, 0.0
    return 2 * scale * _LOG2_E / softcap, softcap * _LOG2_E


def kv_pointer(pool: Tensor) -> Tensor:
    """The pool as the kernels take it: float8 as bytes, to be widened by hand, where no instruction does it."""
    if pool.dtype == _FP8 and not _widens_fp8(pool.device):
        return pool.view(torch.uint8)
    return pool


@functools.cache
def _widens_fp8(device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    return torch.version.hip is not None or torch.cuda.get_device_capability(device) >= (8, 9)


def check_attention(
    q: Tensor,
    pool: Tensor,
    layer: int,
    tables: Tensor,
    contexts: Tensor,
    out: Tensor,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    kv_scales: Tensor | None,
) -> AttentionShape:
    """Refuses what the kernels would read or write wrongly: they trust their pointers. Touches no device memory.

    Raises TypeError for dtypes, ValueError for shapes, strides, devices and numbers.
    """
    if q.dim() != 3 or pool.dim() != 6 or pool.shape[1] != 2:
        raise ValueError(f"q is [rows, heads, dim] and pool [blocks, 2, layers, block size, KV heads, dim], not "
                         f"{tuple(q.shape)} and {tuple(pool.shape)}")  # fmt: skip
    rows, heads, dim = q.shape
    _, _, layers, block_size, kv_heads, pool_dim = pool.shape
    if dim not in HEAD_DIMS or pool_dim != dim or block_size not in BLOCK_SIZES or heads < 1 or heads % kv_heads:
        raise ValueError(
            f"head dim must be one of {HEAD_DIMS}, block size one of {BLOCK_SIZES}, heads a multiple of KV heads; got "
            f"q {tuple(q.shape)} and pool {tuple(pool.shape)}"
        )
    if not 0 <= layer < layers:
        raise ValueError(f"layer {layer} is not one of the pool's {layers}")
    if out.shape != (rows, heads * dim) or tables.dim() != 2 or contexts.shape != tables.shape[:1]:
        raise ValueError(
            f"out is [rows, heads * dim], tables [sequences, blocks], contexts [sequences]; got "
            f"{tuple(out.shape)}, {tuple(tables.shape)}, {tuple(contexts.shape)} for q {tuple(q.shape)}"
        )
    _check_strides(q, pool, tables, contexts, out)
    _check_dtypes(q, pool, tables, contexts, out, kv_scales, layers)
    _check_numbers(scale, window, softcap)
    return AttentionShape(heads, kv_heads, dim, block_size, layers)


def _check_strides(q: Tensor, pool: Tensor, tables: Tensor, contexts: Tensor, out: Tensor) -> None:
    if q.stride()[1:] != (q.shape[2], 1) or out.stride(1) != 1 or tables.stride(1) != 1:
        raise ValueError("the rows of q, out and tables must be contiguous; only the stride between rows is free")
    if not pool.is_contiguous() or not contexts.is_contiguous():
        raise ValueError("pool and contexts must be contiguous")
    if len({tensor.device for tensor in (q, pool, tables, contexts, out)}) > 1:
        raise ValueError("all tensors must be on one device")


def _check_dtypes(
    q: Tensor, pool: Tensor, tables: Tensor, contexts: Tensor, out: Tensor, kv_scales: Tensor | None, layers: int
) -> None:
    if q.dtype not in _DTYPES or out.dtype != q.dtype or pool.dtype not in (q.dtype, _FP8):
        raise TypeError(
            f"q and out share one of {_DTYPES}, pool has it too or {_FP8}; got {q.dtype}, {out.dtype}, {pool.dtype}"
        )
    if tables.dtype != torch.int32 or contexts.dtype != torch.int32:
        raise TypeError(f"tables and contexts are int32, not {tables.dtype} and {contexts.dtype}")
    if (pool.dtype == _FP8) != (kv_scales is not None):
        raise ValueError(f"kv_scales go with a {_FP8} pool, and only with it")
    if kv_scales is None:
        return
    if kv_scales.dtype != torch.float32:
        raise TypeError(f"kv_scales are float32, not {kv_scales.dtype}")
    if kv_scales.shape != (layers, 2) or not kv_scales.is_contiguous() or kv_scales.device != q.device:
        raise ValueError(f"kv_scales are contiguous [{layers}, 2] beside the pool, not {tuple(kv_scales.shape)}")


def _check_numbers(scale: float, window: int | None, softcap: float | None) -> None:
    if not math.isfinite(scale):
        raise ValueError(f"scale must be finite, not {scale}")
    if window is not None and window < 1:
        raise ValueError(f"window counts the tokens seen, the own one among them, so it is at least 1, not {window}")
    if softcap is not None and not (math.isfinite(softcap) and softcap > 0):
        raise ValueError(f"softcap must be finite and above 0, not {softcap}")
