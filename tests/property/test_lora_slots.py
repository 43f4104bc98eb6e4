"""The adapter slots against a simple model, under any order of calls."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lamina_kernels.lora import LoraWeights, TorchLoraTable
from lamina_lora.batch import Segment
from lamina_lora.errors import OutOfAdapterMemory
from lamina_lora.slots import AdapterSlots
from lamina_lora.weights import AdapterWeights

NAMES = [f"adapter-{number}" for number in range(6)]
UNIT = 4 * 2
CAPACITY = 7 * UNIT


def load(digest: str) -> AdapterWeights:
    """Adapter n has rank n % 3 + 1 and adds n + 1 for an input of ones."""
    number = NAMES.index(digest)
    rank = number % 3 + 1
    lora = LoraWeights(torch.ones(rank, 1), (torch.full((rank, 1), (number + 1) / rank),), (0,))
    return AdapterWeights(digest, (lora, None, None, None), torch.float32, torch.device("cpu"))


def size(digest: str) -> int:
    return (NAMES.index(digest) % 3 + 1) * UNIT


class Slots(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.slots = AdapterSlots(CAPACITY, load, make_table=lambda sites, dtype, device: TorchLoraTable(sites))
        self.held: dict[str, int] = {}  # references
        self.slot_of: dict[str, int] = {}

    @rule(name=st.sampled_from(NAMES))
    def acquire(self, name: str) -> None:
        fits = sum(map(size, self.held.keys() | {name})) <= CAPACITY
        if not fits:
            with pytest.raises(OutOfAdapterMemory):
                self.slots.acquire(name)
            return
        slot = self.slots.acquire(name)
        assert self.held.get(name, 0) == 0 or self.slot_of[name] == slot
        self.slot_of[name] = slot
        self.held[name] = self.held.get(name, 0) + 1

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.held)))
        self.slots.release(name)
        self.held[name] -= 1
        if not self.held[name]:
            del self.held[name]

    @rule(name=st.sampled_from(NAMES))
    def unload(self, name: str) -> None:
        self.slots.unload(name)
        assert (name in self.slots.loaded) == (name in self.held)

    @precondition(lambda self: self.held)
    @rule()
    def run(self) -> None:
        """Every adapter in use answers with its own weights."""
        names = sorted(self.held)
        segments = [Segment(self.slot_of[name], row, row + 1) for row, name in enumerate(names)]
        y = torch.zeros(len(names) + 1, 1)
        self.slots.batch(segments, len(names) + 1).apply(0, "qkv", torch.ones(len(names) + 1, 1), y)
        torch.testing.assert_close(y[:, 0], torch.tensor([float(NAMES.index(n) + 1) for n in names] + [0.0]))

    @invariant()
    def holds_together(self) -> None:
        self.slots.check_integrity()
        assert set(self.held) <= set(self.slots.loaded)
        assert all(self.slots.references(name) == self.held.get(name, 0) for name in NAMES)


TestSlots = Slots.TestCase
TestSlots.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
