"""Rotary embedding of queries and keys, and the write of keys and values into the paged pool, in one launch.

    rotated = x * cos + roll(x, D / 2) * signed_sin          (a, b) -> (a cos - b sin, b cos + a sin)

q changes in place; k and v are only read. Row t's keys and values go to slot s = slots[t]:

    pool[s // block_size, 0 | 1, layer, s % block_size, head, :]            block first, see `lamina.engine.pool`

Rounding: float32 inside and one rounding at the end. Eager code in a 2-byte type rounds x * cos as well, so the two
differ by at most one unit in the last place of x * cos. Into a float8_e4m3fn pool goes round(x / scale), beyond 448
cut to 448.

Tiling: grid (T, tiles of query heads + tiles of KV heads). A program takes HEADS heads of one token as two half-head
tiles [HEADS, HALF], so that each lane holds both members of its pairs before it stores either: in place without a
barrier. Tiles follow from D alone. A KV program does keys and values of the same heads. Rows with slot -1 leave at
once: a captured launch can be longer than the batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lamina_kernels.gpu.compile_case import CompileCase
from lamina_kernels.gpu.fp8 import to_e4m3
from lamina_kernels.gpu.tuned import ROTATE_WRITE

__all__ = ["compile_cases", "rotate_write"]

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_FP8 = torch.float8_e4m3fn


@triton.jit
def _load_halves(x, o_head, i_col, mask, D: tl.constexpr):
    """Both halves of some heads of one token [HEADS, HALF], float32."""
    p_x = x + o_head + i_col
    a = tl.load(p_x, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(p_x + D // 2, mask=mask, other=0.0).to(tl.float32)
    return a, b


@triton.jit
def _rotate(a, b, cos, sin, i_token, i_col, D: tl.constexpr):
    o_angle = i_token * D + i_col
    m_col = i_col < D // 2
    cos_a = tl.load(cos + o_angle, mask=m_col, other=0.0).to(tl.float32)
    cos_b = tl.load(cos + o_angle + D // 2, mask=m_col, other=0.0).to(tl.float32)
    sin_a = tl.load(sin + o_angle, mask=m_col, other=0.0).to(tl.float32)
    sin_b = tl.load(sin + o_angle + D // 2, mask=m_col, other=0.0).to(tl.float32)
    return a * cos_a + b * sin_a, b * cos_b + a * sin_b


@triton.jit
def _store_halves(p_out, a, b, mask, D: tl.constexpr):
    tl.store(p_out, a.to(p_out.dtype.element_ty), mask=mask)
    tl.store(p_out + D // 2, b.to(p_out.dtype.element_ty), mask=mask)


@triton.jit
def _store_fp8(p_out, a, b, scale, mask, D: tl.constexpr):
    tl.store(p_out, to_e4m3(a / scale), mask=mask)
    tl.store(p_out + D // 2, to_e4m3(b / scale), mask=mask)


@triton.jit(do_not_specialize=["layer"])
def _rotate_write_kernel(
    q,  # [T, Q_HEADS, D], tokens stride_q apart; so k and v [T, KV_HEADS, D]
    k,
    v,
    cos,  # [T, D]
    sin,  # [T, D], first half negated
    pool,  # [blocks, 2, LAYERS, BLOCK_SIZE, KV_HEADS, D]; fp8 as uint8
    slots,  # [T] int64
    kv_scales,  # [LAYERS, 2] float32, or None
    layer,
    stride_q,
    stride_k,
    stride_v,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    LAYERS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
):
    i_token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + i_token)
    if slot < 0:
        return
    Q_TILES: tl.constexpr = (Q_HEADS + HEADS - 1) // HEADS
    i_tile = tl.program_id(1)
    i_col = tl.arange(0, HALF)[None, :]
    if i_tile < Q_TILES:
        i_head = i_tile * HEADS + tl.arange(0, HEADS)[:, None]
        m_q = (i_head < Q_HEADS) & (i_col < D // 2)
        a, b = _load_halves(q + i_token * stride_q, i_head * D, i_col, m_q, D)
        a, b = _rotate(a, b, cos, sin, i_token, i_col, D)
        _store_halves(q + i_token * stride_q + i_head * D + i_col, a, b, m_q, D)
    else:
        i_head = (i_tile - Q_TILES) * HEADS + tl.arange(0, HEADS)[:, None]
        m_kv = (i_head < KV_HEADS) & (i_col < D // 2)
        k_a, k_b = _load_halves(k + i_token * stride_k, i_head * D, i_col, m_kv, D)
        v_a, v_b = _load_halves(v + i_token * stride_v, i_head * D, i_col, m_kv, D)
        k_a, k_b = _rotate(k_a, k_b, cos, sin, i_token, i_col, D)
        i_page = (slot // BLOCK_SIZE) * (2 * LAYERS) + layer
        p_k = pool + (i_page * BLOCK_SIZE + slot % BLOCK_SIZE) * (KV_HEADS * D) + i_head * D + i_col
        p_v = p_k + LAYERS * BLOCK_SIZE * KV_HEADS * D
        if kv_scales is None:
            _store_halves(p_k, k_a, k_b, m_kv, D)
            _store_halves(p_v, v_a, v_b, m_kv, D)
        else:
            _store_fp8(p_k, k_a, k_b, tl.load(kv_scales + 2 * layer), m_kv, D)
            _store_fp8(p_v, v_a, v_b, tl.load(kv_scales + 2 * layer + 1), m_kv, D)


def rotate_write(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    signed_sin: Tensor,
    pool: Tensor,
    layer: int,
    slots: Tensor,
    kv_scales: Tensor | None,
) -> None:
    """Rotates q [T, Hq, D] in place, writes rotated k and plain v [T, Hkv, D] into `layer` of the pool.

    q, k and v of one dtype (fp16, bf16, fp32) may be views of one projection: heads side by side, tokens any stride
    apart. cos and signed_sin [T, 1, D] contiguous, of q's dtype. pool [blocks, 2, layers, block_size, Hkv, D]
    contiguous, of q's dtype, or float8_e4m3fn with kv_scales float32 [layers, 2]. slots int64 [T]: block * block_size
    + offset, no two the same; -1 is a padding row, of which q too stays as it is. Slots are not checked against the
    pool: that would wait for the device.

    Raises TypeError for dtypes, ValueError for shapes, strides, devices and the layer.
    """
    _check_dtypes(q, k, v, cos, signed_sin, pool, slots, kv_scales)
    _check_shapes(q, k, v, cos, signed_sin, pool, layer, slots, kv_scales)
    tokens, q_heads, dim = q.shape
    if tokens == 0:
        return
    kv_heads = k.shape[1]
    half, heads = _tile(dim)
    grid = (tokens, triton.cdiv(q_heads, heads) + triton.cdiv(kv_heads, heads))
    _rotate_write_kernel[grid](
        q,
        k,
        v,
        cos,
        signed_sin,
        pool if kv_scales is None else pool.view(torch.uint8),
        slots,
        kv_scales,
        layer,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        Q_HEADS=q_heads,
        KV_HEADS=kv_heads,
        D=dim,
        LAYERS=pool.shape[2],
        BLOCK_SIZE=pool.shape[3],
        HEADS=heads,
        HALF=half,
        num_warps=ROTATE_WRITE.warps,
    )


def _tile(dim: int) -> tuple[int, int]:
    """(HALF, HEADS) of a program."""
    half = triton.next_power_of_2(dim // 2)
    return half, max(1, ROTATE_WRITE.block // half)


def _check_dtypes(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    pool: Tensor,
    slots: Tensor,
    kv_scales: Tensor | None,
) -> None:
    if q.dtype not in _DTYPES or any(x.dtype != q.dtype for x in (k, v, cos, sin)):
        raise TypeError(f"q, k, v, cos and sin share one of {_DTYPES}, not {[x.dtype for x in (q, k, v, cos, sin)]}")
    if pool.dtype not in (q.dtype, _FP8):
        raise TypeError(f"the pool is {q.dtype} or {_FP8}, not {pool.dtype}")
    if slots.dtype != torch.int64:
        raise TypeError(f"slots are int64, not {slots.dtype}")
    if (pool.dtype == _FP8) != (kv_scales is not None):
        raise ValueError(f"kv_scales go with a {_FP8} pool, and only with it")
    if kv_scales is not None and kv_scales.dtype != torch.float32:
        raise TypeError(f"kv_scales are float32, not {kv_scales.dtype}")


def _check_shapes(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    pool: Tensor,
    layer: int,
    slots: Tensor,
    kv_scales: Tensor | None,
) -> None:
    if q.dim() != 3 or k.dim() != 3 or pool.dim() != 6:
        raise ValueError(f"q and k have 3 dimensions and pool 6, not {q.dim()}, {k.dim()} and {pool.dim()}")
    tokens, _, dim = q.shape
    kv_heads = k.shape[1]
    if k.shape != (tokens, kv_heads, dim) or v.shape != k.shape or min(q.shape[1], kv_heads, dim) < 1 or dim % 2:
        raise ValueError(f"q, k and v do not fit: {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}")
    if cos.shape != (tokens, 1, dim) or sin.shape != cos.shape or slots.shape != (tokens,):
        raise ValueError(
            f"cos and sin are {(tokens, 1, dim)} and slots {(tokens,)}, not "
            f"{tuple(cos.shape)}, {tuple(sin.shape)}, {tuple(slots.shape)}"
        )
    if pool.shape[1] != 2 or pool.shape[4:] != (kv_heads, dim) or not 0 <= layer < pool.shape[2]:
        raise ValueError(f"no layer {layer} for {kv_heads} heads of {dim} in a pool {tuple(pool.shape)}")
    if any(x.stride()[1:] != (dim, 1) for x in (q, k, v)):
        raise ValueError("the heads of a token must lie side by side in q, k and v")
    rest = (cos, sin, pool, slots) if kv_scales is None else (cos, sin, pool, slots, kv_scales)
    if not all(x.is_contiguous() for x in rest):
        raise ValueError("cos, sin, pool, slots and kv_scales must be contiguous")
    if kv_scales is not None and kv_scales.shape != (pool.shape[2], 2):
        raise ValueError(f"kv_scales are {(pool.shape[2], 2)}, not {tuple(kv_scales.shape)}")
    if any(x.device != q.device for x in (k, v, *rest)):
        raise ValueError("all tensors must be on one device")


def compile_cases() -> list[CompileCase]:
    """Llama-3-8B with each kind of pool; SmolLM2's odd number of heads; a head dim that is no power of two."""
    llama = {"heads": 32, "kv_heads": 8, "dim": 128, "layers": 32}
    return [
        _case("llama", "bf16", fp8=False, **llama),
        _case("llama", "fp16", fp8=False, **llama),
        _case("llama", "fp32", fp8=False, **llama),
        _case("llama_fp8", "bf16", fp8=True, **llama),
        _case("llama_fp8", "fp16", fp8=True, **llama),
        _case("smollm", "bf16", fp8=False, heads=9, kv_heads=3, dim=64, layers=30),
        _case("dim80", "bf16", fp8=False, heads=32, kv_heads=32, dim=80, layers=32),
    ]


def _case(model: str, dtype: str, *, fp8: bool, heads: int, kv_heads: int, dim: int, layers: int) -> CompileCase:
    half, tile_heads = _tile(dim)
    constants: dict[str, object] = {
        "Q_HEADS": heads,
        "KV_HEADS": kv_heads,
        "D": dim,
        "LAYERS": layers,
        "BLOCK_SIZE": 16,
        "HEADS": tile_heads,
        "HALF": half,
    }
    if not fp8:
        constants["kv_scales"] = None
    pointers = dict.fromkeys(("q", "k", "v", "cos", "sin"), f"*{dtype}")
    pointers |= {"pool": "*u8" if fp8 else f"*{dtype}", "slots": "*i64"}
    signature = pointers | {"kv_scales": "*fp32" if fp8 else "constexpr", "layer": "i32"}
    strides = dict.fromkeys(("stride_q", "stride_k", "stride_v"), "i32")
    return CompileCase(
        name=f"rotate_write/{model}/{dtype}",
        kernel=_rotate_write_kernel,
        signature=signature | strides | {name: "constexpr" for name in constants if name != "kv_scales"},
        constants=constants,
        divisible=(*pointers, *strides, *(("kv_scales",) if fp8 else ())),
        num_warps=ROTATE_WRITE.warps,
    )
