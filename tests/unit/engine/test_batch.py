"""From a plan to rows: order of rows, order of copies."""

from __future__ import annotations

import random
from typing import Any

import pytest

pytest.importorskip("triton")

from hypothesis import given
from hypothesis import strategies as st

from lamina.engine.batch import build_batch
from lamina.engine.device_runner import _independent
from lamina.engine.plan import Chunk, StepPlan
from lamina.engine.request import BlockTable, Choice
from lamina_kvtier.blocks import CopyOnWrite


class Stub:
    """The part of a choice that a batch looks at."""

    def __init__(self, tokens: list[int], prompt: int, blocks: int) -> None:
        self.tokens, self.prompt_len, self.table = tokens, prompt, BlockTable(range(blocks))


def chunk(start: int, count: int, slot: int | None, *, prompt: int, copy: CopyOnWrite | None = None) -> Chunk:
    choice: Any = Stub(list(range(start + count)), prompt, 1 + (start + count) // 16)
    assert not isinstance(choice, Choice)
    return Chunk(choice, start, count, slot, copy)


def test_decode_rows_come_first_and_adapters_together() -> None:
    """A prompt's last token is prefill although it is one; an adapter in both kinds has a segment in each."""
    plan = StepPlan(
        [
            chunk(0, 5, 1, prompt=9),
            chunk(12, 1, 1, prompt=3),
            chunk(8, 1, None, prompt=9),
            chunk(7, 1, 0, prompt=2),
            chunk(6, 1, 1, prompt=2),
        ]
    )
    batch = build_batch(plan)
    assert batch.decode_rows == 3
    assert batch.positions.tolist() == [7, 12, 6, 8, 0, 1, 2, 3, 4]
    assert [tuple(segment) for segment in batch.segments] == [(0, 0, 1), (1, 1, 3), (1, 4, 9)]


def test_copies_keep_the_plans_order() -> None:
    """Rows are sorted by adapter; a copy's source may be the target of a later one, so copies are not."""
    first, second = CopyOnWrite(source=4, target=3), CopyOnWrite(source=1, target=4)
    plan = StepPlan([chunk(5, 1, 7, prompt=2, copy=first), chunk(5, 1, None, prompt=2, copy=second)])
    batch = build_batch(plan)
    assert batch.chunks[0] is plan.chunks[1]
    assert batch.copies == (first, second)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)).filter(lambda pair: pair[0] != pair[1])), st.randoms())
def test_runs_of_copies_mean_the_same_as_one_by_one(pairs: list[tuple[int, int]], shuffle: random.Random) -> None:
    """Within a run any order does, all sources first or not; between runs the order stays."""
    copies = [CopyOnWrite(source=source, target=target) for source, target in pairs]
    wanted = list(range(6))
    for copy in copies:
        wanted[copy.target] = wanted[copy.source]
    got = list(range(6))
    for run in _independent(copies):
        shuffle.shuffle(run)
        for copy in run:
            got[copy.target] = got[copy.source]
    assert got == wanted
