"""The Triton LoRA table against a dictionary of weights, under any order of loads, drops and moves."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lamina_kernels.gpu.lora_layout import SiteShape
from lamina_kernels.gpu.lora_pool import OutOfPool
from lamina_kernels.gpu.lora_table import TritonLoraTable
from lamina_kernels.lora import LoraWeights
from support.triton_lora import adapter, changed, tiles

SITES = (SiteShape(5, (9, 3)), SiteShape(12, (5,)))
SLOTS = 4
RANKS = [(1, 1), (2, 0), (0, 3), (4, 4), (0, 0)]
SLOT = st.integers(0, SLOTS - 1)


class Table(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.table = TritonLoraTable(
            SITES,
            dtype=torch.float32,
            device=torch.device("cpu"),
            capacity_bytes=9 * 4 * (8 + 16 + 8 + 16 + 8),  # nine ranks over all slices and sites, more or less
            max_slots=SLOTS,
            max_rank=4,
            max_tokens=SLOTS,
            decode_rows=SLOTS,
            load_order=[range(1), range(1, 2)],
        )
        self.capacity = self.table.free_bytes
        self.loaded: dict[int, list[LoraWeights | None]] = {}
        self.sizes: dict[int, int] = {}
        self.loading: dict[int, tuple[list[LoraWeights | None], Iterator[range]]] = {}

    @rule(slot=SLOT, ranks=st.sampled_from(RANKS), seed=st.integers(0, 99), dora=st.booleans(), at_once=st.booleans())
    def load(self, slot: int, ranks: tuple[int, ...], seed: int, dora: bool, at_once: bool) -> None:
        weights = adapter(seed, ranks, dora=dora, sites=SITES)
        packed = self.table.prepare(weights)
        others = sum(size for other, size in self.sizes.items() if other != slot)
        if others + packed.nbytes > self.capacity:
            with pytest.raises(OutOfPool):
                self.table.put(slot, packed)
            return
        self.loading.pop(slot, None)
        self.sizes[slot] = packed.nbytes
        if at_once:
            self.table.put(slot, packed)
            self.loaded[slot] = weights
        else:
            self.loading[slot] = weights, self.table.load_layers(slot, packed)
            self.loaded[slot] = [None, None]

    @precondition(lambda self: self.loading)
    @rule(data=st.data())
    def copy_a_layer(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.loading)))
        weights, steps = self.loading[slot]
        sites = next(steps, None)
        if sites is None:
            del self.loading[slot]
            return
        for site in sites:
            self.loaded[slot][site] = weights[site]

    @rule(slot=SLOT)
    def drop(self, slot: int) -> None:
        self.table.drop(slot)
        for known in (self.loaded, self.sizes, self.loading):
            known.pop(slot, None)

    @rule()
    def compact(self) -> None:
        self.table.compact()

    @rule(site=st.integers(0, 1), slots=st.permutations(range(SLOTS)), rows=st.integers(1, SLOTS))
    def apply(self, site: int, slots: list[int], rows: int) -> None:
        """Every slot answers with its own weights, or not at all."""
        generator = torch.Generator().manual_seed(rows)
        x = torch.randn(rows, SITES[site].in_features, generator=generator)
        y = torch.randn(rows, SITES[site].out_features, generator=generator)
        segments = [(slots[row], row, row + 1) for row in range(rows)]
        want = changed({slot: weights[site] for slot, weights in self.loaded.items()}, segments, x, y)
        self.table.apply(site, tiles(segments, padding=0), x, y)
        torch.testing.assert_close(y.double(), want, rtol=1e-5, atol=1e-5)

    @invariant()
    def holds_together(self) -> None:
        self.table.check_integrity()
        assert self.table.free_bytes == self.capacity - sum(self.sizes.values())


Table.TestCase.settings = settings(max_examples=12, stateful_step_count=20, deadline=None)
TestLoraTable = Table.TestCase
