"""Host memory for KV blocks: slots of one size, pinned in chunks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

__all__ = ["CHUNK_BYTES", "HostBlocks"]

# One huge pinned allocation holds the driver's locks for seconds, and torch rounds each up to a power of two: so chunks
# of one, filled with as many slots as fit.
CHUNK_BYTES = 256 * 2**20


class HostBlocks:
    """`num` slots of `block_bytes` bytes. Slots of one chunk lie side by side: neighbours can move in one copy.

    It only holds memory; who uses which slot, and when, is its owner's knowledge. Contents are undefined at first.
    """

    __slots__ = ("_chunks", "_per_chunk", "block_bytes", "num")

    def __init__(self, num: int, block_bytes: int, pin: bool, *, chunk_bytes: int = CHUNK_BYTES) -> None:
        """pin: page-locked, which asynchronous copies from and to a GPU need, and which only works beside one."""
        if num < 0 or block_bytes < 1 or chunk_bytes < 1:
            raise ValueError(f"no arena of {num} slots of {block_bytes} bytes in chunks of {chunk_bytes}")
        self.num = num
        self.block_bytes = block_bytes
        self._per_chunk = max(1, chunk_bytes // block_bytes)
        self._chunks = [
            torch.empty((min(self._per_chunk, num - first), block_bytes), dtype=torch.uint8, pin_memory=pin)
            for first in range(0, num, self._per_chunk)
        ]

    def slots(self, first: int, count: int = 1) -> Tensor:
        """[count, block_bytes] uint8, the memory itself. Raises IndexError if they are not slots of one chunk."""
        chunk, row = divmod(first, self._per_chunk)
        if not 0 <= first < self.num or count < 1 or row + count > len(self._chunks[chunk]):
            raise IndexError(f"slots {first} to {first + count - 1} are not in one chunk of an arena of {self.num}")
        return self._chunks[chunk][row : row + count]

    def bytes_of(self, slot: int) -> memoryview:
        """The slot's memory, writable: for sockets and checksums."""
        return self.slots(slot)[0].numpy().data

    def runs(self, slots: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Cuts a list of slots into stretches [start, stop) of the list that lie side by side in memory."""
        start = 0
        for stop in range(1, len(slots) + 1):
            if stop < len(slots) and slots[stop] == slots[stop - 1] + 1 and slots[stop] % self._per_chunk:
                continue
            yield start, stop
            start = stop
