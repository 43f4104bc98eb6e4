"""Rounding to float8_e4m3fn in integer arithmetic.

Triton converts to this type only where the chip does (sm_89 and later; gfx942 has another fp8), and its interpreter
not at all reliably. This runs everywhere, gives the same bits everywhere, and costs some ten instructions a value,
which kernels that wait for memory do not notice.

    e4m3fn: 1 sign, 4 exponent (bias 7), 3 mantissa bits; normal from 2^-6, subnormal steps of 2^-9, largest 448, no
    infinity, NaN is 0x7F. See "FP8 formats for deep learning", arXiv 2209.05433.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["E4M3_MAX", "to_e4m3"]

E4M3_MAX = 448.0


@triton.jit
def to_e4m3(x):
    """x float32 -> uint8: the nearest float8_e4m3fn, ties to even, beyond 448 (infinity too) 448; NaN stays NaN."""
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    is_nan = size > 0x7F800000
    size = tl.minimum(size, 0x43E00000)  # 448
    # Normal: keep 3 of 23 mantissa bits. A carry out of the mantissa lands in the exponent, where it belongs.
    odd = (size >> 20) & 1
    normal = ((size + 0x7FFFF + odd) >> 20) - ((127 - 7) << 3)
    # Subnormal: at 2^14 floats are 2^-9 apart, so this sum rounds as wanted and ends with the count of steps.
    stepped = size.to(tl.float32, bitcast=True) + 16384.0
    subnormal = stepped.to(tl.int32, bitcast=True) & 0xF
    code = tl.where(size < 0x3C800000, subnormal, normal)  # 2^-6
    code = tl.where(is_nan, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)
