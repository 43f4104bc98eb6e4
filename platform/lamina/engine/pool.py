"""The device block pool: one tensor, block first."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lamina_kvtier.blocks import CopyOnWrite

__all__ = ["BlockPool"]


class BlockPool:
    """Keys and values of all blocks: [num_blocks, 2 (k, v), layers, block_size, kv_heads, head_dim].

    Block first, so that one block is one contiguous piece over all layers (a tier copies it whole). Seen from one
    layer it is a set of *rows* (one token's keys or values, kv_heads * head_dim wide) and *pages* (block_size
    rows); both views are plain reshapes, so reading and writing a layer is an index operation without copies.
    """

    def __init__(
        self,
        num_blocks: int,
        *,
        layers: int,
        block_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_blocks = num_blocks
        self.layers = layers
        self.block_size = block_size
        self.kv_heads = kv_heads
        self.head_dim = head_dim
        self.data = torch.zeros((num_blocks, 2, layers, block_size, kv_heads, head_dim), dtype=dtype, device=device)
        self.rows = self.data.view(num_blocks * 2 * layers * block_size, kv_heads * head_dim)
        self.pages = self.data.view(num_blocks * 2 * layers, block_size * kv_heads * head_dim)

    @property
    def block_bytes(self) -> int:
        return self.data[0].numel() * self.data.element_size()

    def clear(self, blocks: Sequence[int]) -> None:
        """Zeroes whole blocks. Attention reads the unwritten rest of a block behind a mask, and a NaN that another
        tenant's adapter left there would survive the mask."""
        if blocks:
            self.data.index_fill_(0, torch.tensor(blocks, device=self.data.device), 0)

    def copy(self, copies: Sequence[CopyOnWrite]) -> None:
        """Copies whole blocks. Sources are read before any target is written."""
        if copies:
            sources = torch.tensor([copy.source for copy in copies], device=self.data.device)
            targets = torch.tensor([copy.target for copy in copies], device=self.data.device)
            self.data.index_copy_(0, targets, self.data.index_select(0, sources))
