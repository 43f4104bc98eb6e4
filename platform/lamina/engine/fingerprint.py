"""A short checksum of a block in host memory, cheap enough to take of each one that arrives.

It reads 1 KiB spread evenly over the block, some microseconds: what writes into a slot that is not its own writes whole
blocks, and a whole block that differs, differs there. It is no protection against a single flipped bit; the store's
checksums are.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable

import numpy as np

from lamina_kernels.gpu.block_mover import HostBlocks

__all__ = ["fingerprint_of"]

_SAMPLES = 1024  # bytes


def fingerprint_of(arena: HostBlocks) -> Callable[[int], int]:
    """For `HostTier(seal=...)`: the fingerprint of what lies in a slot of this arena."""
    stride = max(1, arena.block_bytes // _SAMPLES) | 1  # odd, so that it meets every byte of a number

    def fingerprint(slot: int) -> int:
        return zlib.crc32(np.frombuffer(arena.bytes_of(slot), dtype=np.uint8)[::stride].tobytes())

    return fingerprint
