"""A short checksum of a block in host memory, cheap enough to take of each one that arrives.

It reads 64 places spread evenly over the block, some microseconds: what writes into a slot that is not its own writes
whole blocks, and a whole block that differs, differs there. It is no protection against a single flipped bit; the
store's checksums are.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from lamina_kernels.gpu.block_mover import HostBlocks

__all__ = ["fingerprint_of"]

_PLACES = 64  # more cost more cache misses, which are most of the time that it takes


def fingerprint_of(arena: HostBlocks) -> Callable[[int], int]:
    """For `HostTier(seal=...)`: the fingerprint of what lies in a slot of this arena, whose blocks have whole words."""
    stride = max(1, arena.block_bytes // 8 // _PLACES)
    places: dict[int, NDArray[np.uint64]] = {}  # views of the arena; making one takes longer than reading it

    def fingerprint(slot: int) -> int:
        if slot not in places:
            words = np.frombuffer(arena.bytes_of(slot), dtype=np.uint64, count=arena.block_bytes // 8)
            places[slot] = words[::stride]
        return zlib.crc32(places[slot].tobytes())

    return fingerprint
