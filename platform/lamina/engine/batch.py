"""From a step plan to the rows of one forward pass, as host arrays: what a runner needs to build its tensors from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lamina.engine.plan import Chunk, StepPlan
from lamina_kvtier.blocks import CopyOnWrite
from lamina_lora.batch import Segment

__all__ = ["Batch", "Span", "build_batch"]

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Span:
    """One choice's new tokens: rows [row, row + count) of the batch, at positions [start, start + count)."""

    row: int
    start: int
    count: int
    table: Ints  # [blocks]

    @property
    def context(self) -> int:
        return self.start + self.count


@dataclass(frozen=True, slots=True)
class Batch:
    """One forward pass over T rows, R of which are projected to logits.

    Decode rows come first: one token each, behind the whole prompt. What a row is depends on its own choice alone, so
    that device kernels may differ between the kinds and what one of them computes for a row still not depend on the
    row's neighbours. Within each kind the rows of one adapter are contiguous, base rows first.
    """

    chunks: tuple[Chunk, ...]  # in row order
    decode_rows: int
    token_ids: Ints  # [T]; negative: `StepSampler.placeholder` of a token that is still being drawn
    positions: Ints  # [T]
    spans: tuple[Span, ...]  # one per chunk
    segments: tuple[Segment, ...]  # rows by adapter slot; rows outside are base rows; none crosses `decode_rows`
    copies: tuple[CopyOnWrite, ...]  # in the plan's order: a source may be a later target
    fresh: tuple[int, ...]  # newly allocated blocks, to be cleared
    logit_rows: Ints  # [R] into the T rows
    sampled: tuple[Chunk, ...]  # the R chunks that those rows end

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


def build_batch(plan: StepPlan) -> Batch:
    """Orders the plan's chunks and lays out their rows; linear in rows and table lengths. The plan has chunks."""
    chunks = sorted(plan.chunks, key=_order)
    counts = np.array([chunk.count for chunk in chunks])
    ends = np.cumsum(counts)
    starts = ends - counts
    last = [int(end) - 1 for end, chunk in zip(ends, chunks, strict=True) if chunk.samples]
    return Batch(
        chunks=tuple(chunks),
        decode_rows=sum(chunk.decodes for chunk in chunks),
        token_ids=np.concatenate([chunk.choice.tokens[chunk.start : chunk.stop] for chunk in chunks]).astype(np.int64),
        positions=np.concatenate([np.arange(chunk.start, chunk.stop) for chunk in chunks]),
        spans=tuple(
            Span(int(first), chunk.start, chunk.count, chunk.choice.table.array())
            for first, chunk in zip(starts, chunks, strict=True)
        ),
        segments=tuple(_segments(chunks, starts, ends)),
        copies=tuple(chunk.copy for chunk in plan.chunks if chunk.copy is not None),
        fresh=tuple(block for chunk in chunks for block in chunk.fresh),
        logit_rows=np.array(last, dtype=np.int64),
        sampled=tuple(chunk for chunk in chunks if chunk.samples),
    )


def _order(chunk: Chunk) -> tuple[bool, int]:
    return not chunk.decodes, -1 if chunk.slot is None else chunk.slot


def _segments(chunks: Sequence[Chunk], starts: Ints, ends: Ints) -> list[Segment]:
    segments: list[Segment] = []
    joinable = None  # the kind and slot that the last segment may grow by
    for chunk, start, end in zip(chunks, starts, ends, strict=True):
        if chunk.slot is None:
            continue
        if joinable == (chunk.decodes, chunk.slot):
            segments[-1] = Segment(chunk.slot, segments[-1].start, int(end))
        else:
            segments.append(Segment(chunk.slot, int(start), int(end)))
        joinable = (chunk.decodes, chunk.slot)
    return segments
