"""Packed inputs: what the kernels read is what the batch says, made anew or refilled in place."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lamina.engine.batch import Batch, Span
from lamina.engine.device_inputs import FixedInputs, HostInputs, StepInputs, StepShape
from lamina_lora.batch import Segment

CPU = torch.device("cpu")
SHAPE = StepShape(block_size=4, prefill_rows=3)


def batch(spans: list[tuple[int, int, list[int]]], *, decode_rows: int, segments: list[Segment]) -> Batch:
    """spans: (start, count, table)."""
    built, row, positions = [], 0, []
    for start, count, table in spans:
        built.append(Span(row, start, count, np.array(table, dtype=np.int64)))
        positions += range(start, start + count)
        row += count
    ends = [span.row + span.count - 1 for span in built]
    return Batch(
        chunks=(),
        decode_rows=decode_rows,
        token_ids=np.arange(100, 100 + row),
        positions=np.array(positions),
        spans=tuple(built),
        segments=tuple(segments),
        copies=(),
        fresh=(),
        logit_rows=np.array(ends),
        sampled=(),
    )


MIXED = batch(
    [(6, 1, [9, 8]), (3, 1, [7]), (2, 4, [5, 6])],
    decode_rows=2,
    segments=[Segment(1, 1, 2), Segment(0, 2, 6)],
)


def test_a_mixed_step() -> None:
    """Decode rows by row, prefill by tile, slots of the cache by table, adapters by kind."""
    step = HostInputs(MIXED, SHAPE).to_device(CPU)
    assert step.decode_rows == 2
    assert step.token_ids.tolist() == [100, 101, 102, 103, 104, 105]
    assert step.positions.tolist() == [6, 3, 2, 3, 4, 5]
    assert step.kv_slots.tolist() == [8 * 4 + 2, 7 * 4 + 3, 5 * 4 + 2, 5 * 4 + 3, 6 * 4, 6 * 4 + 1]
    assert step.logit_rows.tolist() == [0, 1, 5]
    assert step.contexts.tolist() == [7, 4, 6]
    assert [row[:n] for row, n in zip(step.tables.tolist(), (2, 1, 2), strict=True)] == [[9, 8], [7], [5, 6]]
    assert step.prefill_tiles.tolist() == [[2, 3, 3, 3], [2, 2, 1, 2]]  # cut at multiples of 3, most keys first
    assert step.lora is not None
    assert step.lora.decode.tolist() == [[1, 1, 1]]
    assert step.lora.prefill.tolist() == [[0, 2, 4]]


def test_base_rows_alone_have_no_tiles() -> None:
    step = HostInputs(batch([(0, 1, [3])], decode_rows=1, segments=[]), SHAPE).to_device(CPU)
    assert step.lora is None


def decode_only(rows: int, *, lora: bool) -> Batch:
    segments = [Segment(row, row, row + 1) for row in range(rows)] if lora else []
    return batch([(4 + row, 1, [2 * row, 2 * row + 1]) for row in range(rows)], decode_rows=rows, segments=segments)


def pointers(step: StepInputs) -> list[int]:
    assert step.lora is not None
    parts = (step.token_ids, step.positions, step.kv_slots, step.logit_rows, step.contexts, step.tables)
    return [tensor.data_ptr() for tensor in (*parts, step.lora.decode)]


def test_fixed_inputs_are_refilled_in_place() -> None:
    """A smaller step behind a larger one leaves nothing of it: its rows are padding again."""
    fixed = FixedInputs(4, 8, lora=True, device=CPU)
    before = pointers(fixed.inputs)
    fixed.fill(HostInputs(decode_only(3, lora=True), SHAPE, 4))
    assert fixed.inputs.kv_slots.tolist() == [4, 13, 22, -1]
    fixed.fill(HostInputs(decode_only(1, lora=True), SHAPE, 4))
    step = fixed.inputs
    assert pointers(step) == before
    assert step.decode_rows == 4
    assert step.token_ids.tolist() == [100, 0, 0, 0]
    assert step.kv_slots.tolist() == [4, -1, -1, -1]
    assert step.contexts.tolist() == [5, 0, 0, 0]
    assert step.tables[0, :2].tolist() == [0, 1]
    assert step.lora is not None
    assert step.lora.decode.tolist() == [[0, 0, 1], [-1, 0, 0], [-1, 0, 0], [-1, 0, 0]]
    assert step.lora.prefill.shape == step.prefill_tiles[:, :3].shape == (0, 3)


def test_fresh_fixed_inputs_are_all_padding() -> None:
    """A capture runs them: nothing may be written or attended to."""
    step = FixedInputs(3, 8, lora=True, device=CPU).inputs
    assert step.kv_slots.tolist() == [-1] * 3
    assert step.contexts.tolist() == [0] * 3
    assert step.lora is not None
    assert step.lora.decode[:, 0].tolist() == [-1] * 3


def test_a_table_longer_than_the_graph_knows_is_refused() -> None:
    """Nothing is written beyond what was captured."""
    fixed = FixedInputs(2, 1, lora=False, device=CPU)
    with pytest.raises(RuntimeError):
        fixed.fill(HostInputs(decode_only(1, lora=False), SHAPE, 2))
