"""Moves whole KV blocks between the device pool and host memory, beside the step, each time the cheaper way.

    spill     pool[ids[i]] ──▶ host[slots[i]]        kernel: gather ▶ staging ▶ one copy per run of neighbouring slots
    promote   host[slots[i]] ──▶ pool[ids[i]]        kernel: one copy per run ▶ staging ▶ scatter
                                                     dma:    one copy per block

Each direction has its lane (a side stream on a GPU, a thread elsewhere), so that both directions of the bus work at
once. A transfer
starts after what was queued on the current stream when it was asked for: a spill reads what the last step wrote, a
promotion overwrites what no step still reads. What the caller owes in return, until the transfer is done: spilled
blocks and promoted slots are not written; promoted blocks and spilled slots are not touched, by another transfer
neither. After that host memory may be read by anyone; the device's next step sees promoted blocks once `Transfer.gate`
was called.

One thread uses a mover.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lamina_kernels.gpu.host_blocks import HostBlocks
from lamina_kernels.gpu.lanes import Transfer, copy_beside, lane_for
from lamina_kernels.gpu.mover_costs import BlockKernels, MoverCosts, Way, WayCosts, calibrate

__all__ = ["BlockKernels", "BlockMover", "HostBlocks", "MoverCosts", "Transfer", "Way", "WayCosts", "calibrate"]

_STAGING_BYTES = 32 * 2**20  # per direction: enough to keep the bus busy, and small beside a pool
_VECTOR = 16  # bytes; the kernels take no block that is not a multiple


class BlockMover:
    """Between a pool [num_blocks, ...], contiguous and of any dtype, and an arena of slots as large as its blocks."""

    def __init__(
        self,
        pool: Tensor,
        host: HostBlocks,
        *,
        costs: MoverCosts,
        kernels: BlockKernels,
        staging_bytes: int = _STAGING_BYTES,
    ) -> None:
        """kernels: `lamina_kernels.gpu.blocks` on a GPU, its oracle elsewhere. Raises ValueError for an unfit pool."""
        if pool.dim() < 2 or not pool.is_contiguous() or pool.numel() == 0:
            raise ValueError(f"the pool is [num_blocks, ...] and contiguous, not {tuple(pool.shape)}")
        self._blocks = pool.view(len(pool), -1).view(torch.uint8)
        if self._blocks.shape[1] != host.block_bytes:
            raise ValueError(f"blocks of {self._blocks.shape[1]} bytes for slots of {host.block_bytes}")
        self._host = host
        self._kernels = kernels
        self._spills = _Direction(self._blocks, costs.spill, staging_bytes)
        self._promotions = _Direction(self._blocks, costs.promote, staging_bytes)

    def spill(self, ids: Sequence[int], host_slots: Sequence[int]) -> Transfer:
        """host[host_slots[i]] = pool[ids[i]]. No slot twice. Raises ValueError, before anything moves."""
        self._check(ids, host_slots, host_slots)
        pairs = _by_slot(ids, host_slots)
        return self._spills.lane.submit(lambda: self._spill(*pairs))

    def promote(self, host_slots: Sequence[int], ids: Sequence[int]) -> Transfer:
        """pool[ids[i]] = host[host_slots[i]]. No block twice. Raises ValueError, before anything moves."""
        self._check(ids, host_slots, ids)
        pairs = _by_slot(ids, host_slots)
        return self._promotions.lane.submit(lambda: self._promote(*pairs))

    def _spill(self, ids: list[int], slots: list[int]) -> None:
        for batch in self._spills.batches(self._host, ids, slots):
            if batch.staged is None:
                for block, slot in zip(batch.ids, batch.slots, strict=True):
                    copy_beside(self._host.slots(slot)[0], self._blocks[block])
                continue
            self._kernels.gather_blocks(self._blocks, _on_device(batch.ids, self._blocks), batch.staged)
            for start, stop in batch.runs:
                self._host.slots(batch.slots[start], stop - start).copy_(batch.staged[start:stop], non_blocking=True)

    def _promote(self, ids: list[int], slots: list[int]) -> None:
        for batch in self._promotions.batches(self._host, ids, slots):
            if batch.staged is None:
                for block, slot in zip(batch.ids, batch.slots, strict=True):
                    copy_beside(self._blocks[block], self._host.slots(slot)[0])
                continue
            for start, stop in batch.runs:
                batch.staged[start:stop].copy_(self._host.slots(batch.slots[start], stop - start), non_blocking=True)
            self._kernels.scatter_blocks(batch.staged, _on_device(batch.ids, self._blocks), self._blocks)

    def _check(self, ids: Sequence[int], slots: Sequence[int], written: Sequence[int]) -> None:
        if len(ids) != len(slots):
            raise ValueError(f"{len(ids)} blocks for {len(slots)} slots")
        if any(not 0 <= block < len(self._blocks) for block in ids):
            raise ValueError(f"blocks are 0 to {len(self._blocks) - 1}, not {min(ids)} to {max(ids)}")
        if any(not 0 <= slot < self._host.num for slot in slots):
            raise ValueError(f"slots are 0 to {self._host.num - 1}, not {min(slots)} to {max(slots)}")
        if len(set(written)) != len(written):
            raise ValueError(f"something would be written twice: {sorted(written)}")


@dataclass(frozen=True, slots=True)
class _Batch:
    """Pairs in the order of their slots, no more than staging memory holds."""

    ids: list[int]
    slots: list[int]
    runs: list[tuple[int, int]]  # stretches of the lists whose slots are neighbours
    staged: Tensor | None  # [len(ids), block bytes]: the kernel's way; None: dma


class _Direction:
    """Lane, costs and staging memory of one direction. Staging is reused batch by batch: the lane keeps the order."""

    def __init__(self, blocks: Tensor, costs: WayCosts, staging_bytes: int) -> None:
        self.lane = lane_for(blocks.device)
        self._costs = costs
        self._block_bytes = blocks.shape[1]
        self._capacity = max(1, staging_bytes // self._block_bytes)
        self._staging: Tensor | None = None
        # Large blocks never go the kernel's way: then the memory is better spent on the pool.
        if self._block_bytes % _VECTOR == 0 and costs.choose(self._block_bytes, self._capacity) == "kernel":
            self._staging = torch.empty((self._capacity, self._block_bytes), dtype=torch.uint8, device=blocks.device)

    def batches(self, host: HostBlocks, ids: list[int], slots: list[int]) -> Iterator[_Batch]:
        for start in range(0, len(ids), self._capacity):
            some = slice(start, start + self._capacity)
            runs = list(host.runs(slots[some]))
            yield _Batch(ids[some], slots[some], runs, self._staged(len(ids[some]), len(runs)))

    def _staged(self, blocks: int, runs: int) -> Tensor | None:
        if self._staging is None or self._costs.choose(self._block_bytes, blocks, runs) == "dma":
            return None
        return self._staging[:blocks]


def _by_slot(ids: Sequence[int], slots: Sequence[int]) -> tuple[list[int], list[int]]:
    """Both lists in the order of the slots, so that neighbours meet."""
    order = sorted(range(len(slots)), key=slots.__getitem__)
    return [ids[i] for i in order], [slots[i] for i in order]


def _on_device(ids: list[int], blocks: Tensor) -> Tensor:
    on_gpu = blocks.device.type == "cuda"  # from pageable memory the copy would make the host wait
    return torch.tensor(ids, dtype=torch.int32, pin_memory=on_gpu).to(blocks.device, non_blocking=True)
