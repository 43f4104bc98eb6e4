"""y = x w^T for whole tiles: x [M, K], w [N, K], y [M, N]."""

from __future__ import annotations

import triton
import triton.language as tl

from lamina_kernels.gpu.compile_case import CompileCase


@triton.jit
def product(x, w, y, N, K, TILE: tl.constexpr, STEP: tl.constexpr):
    m = tl.program_id(0) * TILE + tl.arange(0, TILE)
    n = tl.program_id(1) * TILE + tl.arange(0, TILE)
    k = tl.arange(0, STEP)
    total = tl.zeros((TILE, TILE), tl.float32)
    for start in range(0, K, STEP):
        b_x = tl.load(x + m[:, None] * K + start + k[None, :])
        b_w = tl.load(w + n[:, None] * K + start + k[None, :])
        total = tl.dot(b_x, b_w.T, total)
    tl.store(y + m[:, None] * N + n[None, :], total.to(y.dtype.element_ty))


def case(name: str, dtype: str, tile: int, **more: object) -> CompileCase:
    pointer = f"*{dtype}"
    return CompileCase(
        **{
            "name": name,
            "kernel": product,
            "signature": {"x": pointer, "w": pointer, "y": pointer, "N": "i32", "K": "i32"}
            | {"TILE": "constexpr", "STEP": "constexpr"},
            "constants": {"TILE": tile, "STEP": 64},
            "divisible": ("x", "w", "y", "N", "K"),
            "tensor_cores": True,
            **more,
        }
    )


def compile_cases() -> list[CompileCase]:
    return [case("product/large", "bf16", 64), case("product/small", "fp16", 16, num_warps=1)]
