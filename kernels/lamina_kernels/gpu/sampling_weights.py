"""How logits are ordered and weighed. Inlined into every sampling kernel, so that all of them agree to the last bit.

**Order.** Tokens are ordered by (logit descending, id ascending). `order_key` maps float32 to uint32 so that the
integers compare as the floats do (-0 equals 0); `pack` puts key and id into one positive int64 that compares in that
order.

**Weight.** w = trunc(2^44 * 2^((x - peak) * scale)) as an int64, scale = log2(e) / temperature. Integer sums are exact
and associative: however a row is cut, whichever kernel sums, the total is the same number, so that neither tiles nor
neighbours can move a draw. A token less likely than the most likely one by 2^-44 counts as impossible. Truncation takes
at most V * 2^-44 of the total, float32 arithmetic up to |x - peak| / temperature * 2^-23 of a weight.

**Place.** A uniform number is a fraction U of 2^64 (53 bits drawn); its place in a total T is floor(U * T / 2^64) < T.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lamina_kernels.gpu.sampling_seats import UNIT

__all__ = ["key_float", "order_key", "pack", "packed_id", "packed_key", "share", "weigh"]

_UNIT: tl.constexpr = tl.constexpr(float(UNIT))
_ID_BITS: tl.constexpr = tl.constexpr(24)
_ID_MASK: tl.constexpr = tl.constexpr((1 << 24) - 1)


@triton.jit
def order_key(x):
    """uint32 of x float32; 0 is below every number. NaN has no place: the caller has refused it."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    flip = (bits >> 31).to(tl.uint32, bitcast=True) | 0x80000000
    return bits.to(tl.uint32, bitcast=True) ^ flip


@triton.jit
def key_float(key):
    """The float32 whose `order_key` is key."""
    bits = tl.where(key >= 0x80000000, key ^ 0x80000000, key ^ 0xFFFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def weigh(x, peak, scale):
    """int64 weights of x float32, of which peak is the largest."""
    return (tl.exp2((x - peak) * scale) * _UNIT).to(tl.int64)


@triton.jit
def pack(key, i_token):
    return (key.to(tl.int64) << _ID_BITS) | (_ID_MASK - i_token)


@triton.jit
def packed_key(packed):
    """Of a packed that is not negative."""
    return (packed >> _ID_BITS).to(tl.uint32)


@triton.jit
def packed_id(packed):
    return _ID_MASK - (packed & _ID_MASK)


@triton.jit
def share(fraction, total):
    """floor(fraction * total / 2^64): both int64, read as unsigned."""
    return tl.umulhi(fraction.to(tl.uint64, bitcast=True), total.to(tl.uint64, bitcast=True)).to(tl.int64, bitcast=True)
