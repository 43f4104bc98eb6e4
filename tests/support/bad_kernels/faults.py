from __future__ import annotations

import triton
import triton.language as tl

from lamina_kernels.gpu.compile_case import CompileCase
from support.toy_kernels.product import case


@triton.jit
def softmax(x, SIZE: tl.constexpr):
    """Needs a whole row at once: too much for the registers of one warp."""
    at = x + tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    row = tl.load(at)
    row = tl.exp(row - tl.max(row, axis=0))
    tl.store(at, row / tl.sum(row, axis=0))


@triton.jit
def nonsense(x):
    tl.store(x, tl.arange(0, 3))


def compile_cases() -> list[CompileCase]:
    return [
        case("bad/narrow", "bf16", 16, divisible=(), num_warps=1),
        case("bad/scalar", "bf16", 16, divisible=(), num_warps=1, vector_loads=False),  # says so: no fault
        case("bad/shared", "bf16", 128, num_stages=9, num_warps=8),
        case("bad/tf32", "fp32", 16, num_warps=1),
        CompileCase(
            name="bad/spills",
            kernel=softmax,
            signature={"x": "*fp32", "SIZE": "constexpr"},
            constants={"SIZE": 16384},
            divisible=("x",),
            num_warps=1,
            tensor_cores=True,
        ),
        CompileCase(name="bad/nonsense", kernel=nonsense, signature={"x": "*i32"}, constants={}),
    ]
