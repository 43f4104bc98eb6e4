"""Counter-based random numbers: a uniform is a pure function of (seed, choice, position).

Philox-4x32-10 of J. K. Salmon, M. A. Moraes, R. O. Dror and D. E. Shaw, "Parallel Random Numbers: As Easy as
1, 2, 3", SC11 (2011). There is no state to save, restore or share: a preempted choice continues with the
numbers it would have got, and a GPU kernel can compute the same ones in place.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["SEED_MASK", "philox", "uniforms"]

SEED_MASK = (1 << 64) - 1

_WORD = np.uint64(0xFFFF_FFFF)
_SHIFT = np.uint64(32)
_MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], dtype=np.uint64)
_KEY_STEPS = np.array([[0x9E3779B9], [0xBB67AE85]], dtype=np.uint64)
_ROUNDS = 10
_STREAM = 0  # the last counter word; other uses of the same seed must take another number


def philox(counters: NDArray[np.uint64], keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Philox-4x32-10 of many counters at once.

    Shapes: counters [4, N], keys [2, N], result [4, N]; each entry is a 32-bit word held in a uint64.
    """
    # Words 0 and 2 are multiplied, words 1 and 3 are mixed in: one array for each pair halves the calls.
    factors, mixed, key = counters[0::2], counters[1::2], keys
    for _ in range(_ROUNDS):
        products = factors * _MULTIPLIERS
        factors = (products >> _SHIFT)[::-1] ^ mixed ^ key
        mixed = (products & _WORD)[::-1]
        key = (key + _KEY_STEPS) & _WORD
    return np.stack((factors[0], mixed[0], factors[1], mixed[1]))


def uniforms(seeds: Sequence[int], indices: Sequence[int], positions: Sequence[int]) -> NDArray[np.float64]:
    """One uniform number in [0, 1) with 53 random bits for each (seed, choice index, position).

    Seeds are taken modulo 2**64, so a negative one means its two's complement.
    """
    seed = np.array([value & SEED_MASK for value in seeds], dtype=np.uint64)
    position = np.array(positions, dtype=np.uint64)
    choice = np.array(indices, dtype=np.uint64)
    stream = np.full_like(position, _STREAM)
    counters = np.stack((position & _WORD, position >> _SHIFT, choice & _WORD, stream))
    words = philox(counters, np.stack((seed & _WORD, seed >> _SHIFT)))
    bits = ((words[0] >> np.uint64(5)) << np.uint64(26)) | (words[1] >> np.uint64(6))
    fractions: NDArray[np.float64] = bits * 2.0**-53
    return fractions
