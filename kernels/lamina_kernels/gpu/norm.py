"""RMS norm, alone and fused with the residual sum before it.

    y = x / sqrt(mean(x²) + eps) * w

over the last dimension: float32 inside, one rounding at the end. Both kernels read each row once, keep it in registers
and write once, so they cost their bytes: 2 * T * D elements for `rms_norm`, 4 * T * D for `add_rms_norm`, where sum
and norm apart would move 5 * T * D and launch twice.

Tiling: a program owns a tile [ROWS, BLOCK] with BLOCK the next power of two above D. A wide row (a hidden state) has a
program of its own; narrow rows (heads, D <= 512) share one, only so that every lane loads 16 bytes. ROWS, BLOCK and
the number of warps follow from D alone, and rows of a tile never meet in a sum: a row's result is the same bits in
every batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lamina_kernels.gpu.compile_case import CompileCase
from lamina_kernels.gpu.tuned import NormTile, norm_tile

__all__ = ["MAX_DIM", "add_rms_norm", "compile_cases", "rms_norm"]

MAX_DIM = 16384  # a row is held in the registers of one program

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@triton.jit
def _normed(x, weight, eps, D: tl.constexpr):
    """x [ROWS, BLOCK] float32, zero beyond D; weight broadcasts against it."""
    mean = tl.sum(x * x, axis=1) * (1.0 / D)
    return x * tl.rsqrt(mean + eps)[:, None] * weight


@triton.jit(do_not_specialize=["rows"])
def _rms_norm_kernel(
    x,  # [rows / HEADS, HEADS, D] with the two strides below
    weight,  # [WEIGHT_HEADS, D] float32
    out,  # [rows, D]
    rows,
    eps,
    stride_token,
    stride_head,
    HEADS: tl.constexpr,
    WEIGHT_HEADS: tl.constexpr,  # HEADS, or 1: all share it
    D: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i_row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    i_col = tl.arange(0, BLOCK)
    m_col = i_col[None, :] < D
    mask = (i_row < rows)[:, None] & m_col
    i_head = i_row % HEADS
    o_row = (i_row // HEADS).to(tl.int64) * stride_token + i_head.to(tl.int64) * stride_head
    o_weight = (i_head % WEIGHT_HEADS) * D
    b_x = tl.load(x + o_row[:, None] + i_col[None, :], mask=mask, other=0.0).to(tl.float32)
    b_weight = tl.load(weight + o_weight[:, None] + i_col[None, :], mask=m_col, other=0.0)
    y = _normed(b_x, b_weight, eps, D)
    tl.store(out + i_row.to(tl.int64)[:, None] * D + i_col[None, :], y.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def _add_rms_norm_kernel(
    h,  # [rows, D], changed
    delta,  # [rows, D]
    weight,  # [D] float32
    out,  # [rows, D]
    rows,
    eps,
    stride_h,
    stride_delta,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i_row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    i_col = tl.arange(0, BLOCK)[None, :]
    m_col = i_col < D
    mask = (i_row < rows) & m_col
    p_h = h + i_row * stride_h + i_col
    b_h = tl.load(p_h, mask=mask, other=0.0).to(tl.float32)
    b_delta = tl.load(delta + i_row * stride_delta + i_col, mask=mask, other=0.0).to(tl.float32)
    b_weight = tl.load(weight + i_col, mask=m_col, other=0.0)
    # The norm sees the residual stream as later layers will: rounded.
    b_sum = (b_h + b_delta).to(h.dtype.element_ty)
    tl.store(p_h, b_sum, mask=mask)
    y = _normed(b_sum.to(tl.float32), b_weight, eps, D)
    tl.store(out + i_row * D + i_col, y.to(out.dtype.element_ty), mask=mask)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The norm of each row of x: a new contiguous tensor of x's shape and dtype.

    x [D], [T, D] or [T, heads, D] in fp16, bf16 or fp32; only its last dimension must be contiguous. weight float32
    [D], or [heads, D] for an x of three dimensions. Raises TypeError for dtypes, ValueError for shapes, strides and
    devices.
    """
    _check_rows(x, weight, "x")
    if not 1 <= x.dim() <= 3:
        raise ValueError(f"x has 1 to 3 dimensions, not {x.dim()}")
    heads = x.shape[-2] if x.dim() == 3 else 1
    if weight.dim() > 1 and weight.shape[0] not in (1, heads):
        raise ValueError(f"weights of {weight.shape[0]} heads for an x of {heads}")
    dim = x.shape[-1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows = out.numel() // dim
    if rows == 0:
        return out
    tile = norm_tile(dim)
    _rms_norm_kernel[(triton.cdiv(rows, tile.rows),)](
        x,
        weight,
        out,
        rows,
        eps,
        x.stride(0) if x.dim() > 1 else 0,
        x.stride(1) if x.dim() == 3 else 0,
        HEADS=heads,
        WEIGHT_HEADS=weight.numel() // dim,
        D=dim,
        ROWS=tile.rows,
        BLOCK=tile.block,
        num_warps=tile.warps,
    )
    return out


def add_rms_norm(h: Tensor, delta: Tensor, weight: Tensor, eps: float) -> Tensor:
    """h += delta, rounded to h's dtype; returns the norm of the rounded sum, new and contiguous.

    h and delta [T, D] of one dtype (fp16, bf16, fp32), rows contiguous, not overlapping; weight float32 [D]. Raises
    TypeError for dtypes, ValueError for shapes, strides and devices.
    """
    _check_rows(h, weight, "h")
    _check_rows(delta, weight, "delta")
    if h.dim() != 2 or h.shape != delta.shape or weight.dim() != 1:
        raise ValueError(
            f"h and delta are [T, D] and weight [D], not {tuple(h.shape)}, {tuple(delta.shape)}, {tuple(weight.shape)}"
        )
    if h.dtype != delta.dtype:
        raise TypeError(f"h is {h.dtype} but delta {delta.dtype}")
    rows, dim = h.shape
    out = torch.empty((rows, dim), dtype=h.dtype, device=h.device)
    if rows == 0:
        return out
    tile = norm_tile(dim)
    _add_rms_norm_kernel[(triton.cdiv(rows, tile.rows),)](
        h,
        delta,
        weight,
        out,
        rows,
        eps,
        h.stride(0),
        delta.stride(0),
        D=dim,
        ROWS=tile.rows,
        BLOCK=tile.block,
        num_warps=tile.warps,
    )
    return out


def _check_rows(x: Tensor, weight: Tensor, name: str) -> None:
    if x.dtype not in _DTYPES or weight.dtype != torch.float32:
        raise TypeError(f"{name} is fp16, bf16 or fp32 and weight fp32, not {x.dtype} and {weight.dtype}")
    if x.dim() == 0 or weight.dim() not in (1, 2) or not 1 <= x.shape[-1] == weight.shape[-1] <= MAX_DIM:
        raise ValueError(
            f"{name} {tuple(x.shape)} and weight {tuple(weight.shape)} do not end with one D of 1 to {MAX_DIM}"
        )
    if x.stride(-1) != 1 or not weight.is_contiguous():
        raise ValueError(f"the last dimension of {name}, and weight, must be contiguous")
    if x.device != weight.device:
        raise ValueError(f"{name} is on {x.device} but weight on {weight.device}")


def compile_cases() -> list[CompileCase]:
    """Hidden states of Llama-3-8B, head norms of Qwen3-8B, and the widest row, which needs the most registers."""
    cases = [_norm_case("hidden", dtype, 1, 4096) for dtype in ("bf16", "fp16", "fp32")]
    cases += [_norm_case("heads", dtype, 40, 128) for dtype in ("bf16", "fp16")]
    cases += [_norm_case("widest", "bf16", 1, MAX_DIM), _add_case("widest", "bf16", MAX_DIM)]
    return cases + [_add_case("hidden", dtype, 4096) for dtype in ("bf16", "fp16", "fp32")]


def _norm_case(shape: str, dtype: str, heads: int, dim: int) -> CompileCase:
    tile = norm_tile(dim)
    constants = {"HEADS": heads, "WEIGHT_HEADS": heads, "D": dim, "ROWS": tile.rows, "BLOCK": tile.block}
    return CompileCase(
        name=f"rms_norm/{shape}/{dtype}",
        kernel=_rms_norm_kernel,
        signature={
            "x": f"*{dtype}",
            "weight": "*fp32",
            "out": f"*{dtype}",
            "rows": "i32",
            "eps": "fp32",
            "stride_token": "i32",
            "stride_head": "i32",
        }
        | dict.fromkeys(constants, "constexpr"),
        constants=constants,
        divisible=("x", "weight", "out", "stride_token", "stride_head"),
        num_warps=tile.warps,
    )


def _add_case(shape: str, dtype: str, dim: int) -> CompileCase:
    tile: NormTile = norm_tile(dim)
    constants = {"D": dim, "ROWS": tile.rows, "BLOCK": tile.block}
    return CompileCase(
        name=f"add_rms_norm/{shape}/{dtype}",
        kernel=_add_rms_norm_kernel,
        signature={
            "h": f"*{dtype}",
            "delta": f"*{dtype}",
            "weight": "*fp32",
            "out": f"*{dtype}",
            "rows": "i32",
            "eps": "fp32",
            "stride_h": "i32",
            "stride_delta": "i32",
        }
        | dict.fromkeys(constants, "constexpr"),
        constants=constants,
        divisible=("h", "delta", "weight", "out", "stride_h", "stride_delta"),
        num_warps=tile.warps,
    )
