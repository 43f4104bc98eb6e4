"""From a step plan to tensors: the rows of one forward pass, ordered so that each adapter's rows are contiguous."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lamina.engine.attention import AttentionPlan, Span, plan_attention
from lamina.engine.plan import Chunk, StepPlan
from lamina.engine.pool import BlockPool
from lamina_kvtier.blocks import CopyOnWrite
from lamina_lora.batch import Segment

__all__ = ["Batch", "Batcher"]


@dataclass(frozen=True, slots=True)
class Batch:
    """One forward pass over T rows, R of which are projected to logits."""

    chunks: tuple[Chunk, ...]  # in row order
    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    attention: AttentionPlan
    segments: tuple[Segment, ...]  # rows by adapter slot; rows outside are base rows
    copies: tuple[CopyOnWrite, ...]
    fresh: tuple[int, ...]  # newly allocated blocks, to be cleared
    logit_rows: Tensor  # [R] int64 into the T rows
    sampled: tuple[Chunk, ...]  # the R chunks that those rows end

    @property
    def num_tokens(self) -> int:
        return int(self.token_ids.shape[0])


class Batcher:
    """Builds batches for one block pool. Stateless otherwise; cost is linear in rows and table lengths."""

    def __init__(self, pool: BlockPool, device: torch.device) -> None:
        self._pool = pool
        self._device = device

    def build(self, plan: StepPlan) -> Batch:
        chunks = sorted(plan.chunks, key=lambda chunk: -1 if chunk.slot is None else chunk.slot)
        counts = np.array([chunk.count for chunk in chunks])
        ends = np.cumsum(counts)
        starts = ends - counts
        tables = [np.array(chunk.choice.table, dtype=np.int64) for chunk in chunks]
        positions = np.concatenate([np.arange(chunk.start, chunk.stop) for chunk in chunks])
        tokens = [chunk.choice.tokens[chunk.start : chunk.stop] for chunk in chunks]
        spans = [
            Span(int(first), chunk.start, chunk.count, table)
            for first, chunk, table in zip(starts, chunks, tables, strict=True)
        ]
        last = [int(end) - 1 for end, chunk in zip(ends, chunks, strict=True) if chunk.samples]
        return Batch(
            chunks=tuple(chunks),
            token_ids=self._tensor(np.concatenate(tokens)),
            positions=self._tensor(positions),
            attention=plan_attention(spans, self._pool),
            segments=tuple(_segments(chunks, starts, ends)),
            copies=tuple(chunk.copy for chunk in chunks if chunk.copy is not None),
            fresh=tuple(block for chunk in chunks for block in chunk.fresh),
            logit_rows=self._tensor(np.array(last, dtype=np.int64)),
            sampled=tuple(chunk for chunk in chunks if chunk.samples),
        )

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array.astype(np.int64, copy=False)).to(self._device, non_blocking=True)


def _segments(chunks: Sequence[Chunk], starts: np.ndarray, ends: np.ndarray) -> list[Segment]:
    segments: list[Segment] = []
    for chunk, start, end in zip(chunks, starts, ends, strict=True):
        if chunk.slot is None:
            continue
        if segments and segments[-1].slot == chunk.slot:
            segments[-1] = Segment(chunk.slot, segments[-1].start, int(end))
        else:
            segments.append(Segment(chunk.slot, int(start), int(end)))
    return segments
