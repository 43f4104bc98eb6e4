"""The extent pool against a list of cells, each owned by one extent or nobody, under any order of calls."""

from __future__ import annotations

from itertools import groupby

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lamina_kernels.gpu.extent_pool import ExtentPool
from lamina_kernels.gpu.lora_layout import ALIGN

UNITS = 12


class Pool(RuleBasedStateMachine):
    """`cells[i]` is the owner of unit i; owners are numbered as they come, so a cell also says what is stored there."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = ExtentPool(UNITS * ALIGN + 3)  # three elements that nobody can use
        self.cells: list[int | None] = [None] * UNITS
        self.starts: dict[int, int] = {}
        self.next = 0

    def holes(self) -> list[int]:
        return [len(list(run)) for owner, run in groupby(self.cells) if owner is None]

    @rule(elements=st.integers(1, 6 * ALIGN))
    def allocate(self, elements: int) -> None:
        units = -(-elements // ALIGN)
        fitting = [hole for hole in self.holes() if hole >= units]
        start = self.pool.allocate(elements)
        assert (start is None) == (not fitting)
        if start is None:
            return
        first = start // ALIGN
        assert start % ALIGN == 0
        assert self.cells[first : first + units] == [None] * units
        hole = next(len(list(run)) for owner, run in groupby(self.cells[first:]) if owner is None)
        assert hole == min(fitting)
        assert first == 0 or self.cells[first - 1] is not None
        self.cells[first : first + units] = [self.next] * units
        self.starts[self.next] = start
        self.next += 1

    @precondition(lambda self: self.starts)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from(sorted(self.starts)))
        self.pool.free(self.starts.pop(owner))
        self.cells = [None if cell == owner else cell for cell in self.cells]

    @rule(limit=st.integers(1, 3 * ALIGN))
    def compact(self, limit: int) -> None:
        """The moves, carried out in their order and in pieces, leave every extent's contents whole and in order."""
        memory = [cell for cell in self.cells for _ in range(ALIGN)]
        want = [cell for cell in self.cells if cell is not None]
        moves = self.pool.compaction()
        for move in moves:
            for piece in move.pieces(limit):
                memory[piece.target : piece.target + piece.length] = memory[piece.source : piece.source + piece.length]
        self.cells = [*want, *[None] * (UNITS - len(want))]
        assert memory[: len(want) * ALIGN] == [cell for cell in want for _ in range(ALIGN)]
        targets = {move.source: move.target for move in moves}
        self.starts = {owner: targets.get(start, start) for owner, start in self.starts.items()}
        assert len(self.holes()) <= 1

    @invariant()
    def holds_together(self) -> None:
        self.pool.check_integrity()
        assert self.pool.unused == self.cells.count(None) * ALIGN
        assert self.pool.used + self.pool.unused == self.pool.capacity == UNITS * ALIGN


Pool.TestCase.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
TestExtentPool = Pool.TestCase
