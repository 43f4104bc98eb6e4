"""The uniform number of a seat at its position: Philox-4x32-10, the same words as the host's `engine.sampling_random`.

Key = seed; counter = (position low, position high, choice index, stream 0). J. K. Salmon, M. A. Moraes, R. O. Dror and
D. E. Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3", SC11 (2011). The rounds are Triton's own `philox_impl`.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["uniform_fraction"]


@triton.jit
def uniform_fraction(seed, index, position):
    """Three int64 scalars in; out a fraction of 2^64, 53 bits of it drawn, as an int64 to be read unsigned."""
    zero = (position * 0).to(tl.uint32)
    word0, word1, _word2, _word3 = tl.philox_impl(
        _low(position), _low(position >> 32), _low(index), zero, _low(seed), _low(seed >> 32)
    )
    high = (word0 >> 5).to(tl.int64)
    return ((high << 26) | (word1 >> 6).to(tl.int64)) << 11


@triton.jit
def _low(word):
    return (word & 0xFFFFFFFF).to(tl.uint32)
