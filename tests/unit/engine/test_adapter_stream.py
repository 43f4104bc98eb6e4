"""Adapters that arrive layer by layer: who waits for what."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from torch import Tensor

from lamina.engine.adapter_stream import AdapterStream, InlineLane, Mark
from lamina.engine.device_lora import DeviceLora, Overlapped, TwoLaunches
from lamina_kernels.gpu.lora_tiles import LoraTiles
from lamina_kernels.lora import LoraWeights, PreparedLora
from lamina_lora.batch import Segment
from lamina_lora.errors import SlotEmpty
from lamina_lora.slots import AdapterSlots
from lamina_lora.weights import AdapterWeights, site_index


class Log(list[str]):
    """What was launched, in order."""


class Lane:
    def __init__(self, log: Log) -> None:
        self.log, self.copies = log, 0

    def open(self) -> None:
        self.log.append("open")

    def run(self, copy: Callable[[], object]) -> Mark:
        copy()
        number = self.copies
        self.copies += 1
        return lambda: self.log.append(f"wait {number}")


class Table:
    """Two layers of four sites."""

    def __init__(self, log: Log) -> None:
        self.log = log

    def prepare(self, weights: Sequence[LoraWeights | None]) -> PreparedLora:
        raise NotImplementedError

    def load_layers(self, slot: int, prepared: PreparedLora) -> Iterator[range]:
        for first in (0, 4):
            self.log.append(f"copy {slot}:{first}")
            yield range(first, first + 4)

    def drop(self, slot: int) -> None:
        self.log.append(f"drop {slot}")

    def apply(self, site: int, tiles: LoraTiles, x: Tensor, y: Tensor, bias: Tensor | None = None) -> None:
        self.log.append(f"apply {site}")

    def shrink_decode(self, site: int, tiles: LoraTiles, x: Tensor) -> None:
        self.log.append(f"shrink {site}")

    def expand_decode(self, site: int, tiles: LoraTiles, y: Tensor, bias: Tensor | None = None) -> None:
        self.log.append(f"expand {site}")


class Identity:
    bias = None

    def __call__(self, x: Tensor) -> Tensor:
        return x.clone()


class Weights:
    nbytes = 1


@pytest.fixture
def log() -> Log:
    return Log()


@pytest.fixture
def table(log: Log) -> Table:
    return Table(log)


@pytest.fixture
def stream(log: Log, table: Table) -> AdapterStream:
    return AdapterStream(table, Lane(log))


def test_a_layer_waits_for_its_own_weights_only(log: Log, table: Table, stream: AdapterStream) -> None:
    """Layer 0 is computed while layer 1 is still being copied."""
    slots = AdapterSlots(9, lambda digest: AdapterWeights(digest, (), torch.float32, torch.device("cpu")))
    lora = DeviceLora([TwoLaunches(table)], stream, slots)
    stream.put(3, Weights())
    none = torch.zeros(0, 3, dtype=torch.int32)
    step = lora.begin(LoraTiles(none, none), lora.plans[0], frozenset({3, 4}))
    for layer in (0, 1):
        for site in ("qkv", "o"):
            step.project(layer, site, torch.ones(1, 1), Identity())
    assert log == [
        *("open", "copy 3:0", "copy 3:4"),
        *("wait 0", f"apply {site_index(0, 'qkv')}", f"apply {site_index(0, 'o')}"),
        *("wait 1", f"apply {site_index(1, 'qkv')}", f"apply {site_index(1, 'o')}"),
    ]


def test_a_graph_waits_once_and_only_for_its_adapters(log: Log, stream: AdapterStream) -> None:
    """The last layer's mark covers those before it; others' copies are not waited for, nor the same ones again."""
    stream.put(0, Weights())
    stream.put(1, Weights())
    log.clear()
    stream.await_slots([1, 7])
    assert log == ["wait 4"]  # copies 2 and 5 only found the end
    stream.await_slots([1])
    stream.await_site(0, [1])
    assert log == ["wait 4"]
    stream.await_slots([0, 1])
    assert log == ["wait 4", "wait 1"]


def test_a_slot_is_dropped_behind_its_copies(log: Log, stream: AdapterStream) -> None:
    """Its room may go to others at once."""
    stream.put(0, Weights())
    log.clear()
    stream.drop(0)
    assert log == ["wait 1", "drop 0"]


def test_without_streams_all_is_there_at_once(log: Log, table: Table) -> None:
    stream = AdapterStream(table, InlineLane())
    stream.put(0, Weights())
    stream.await_slots([0])
    assert log == ["copy 0:0", "copy 0:4"]


def test_a_table_that_refuses_leaves_nothing_arriving(log: Log) -> None:
    """The error passes, and no step waits for what never comes."""

    class Full(Table):
        def load_layers(self, slot: int, prepared: PreparedLora) -> Iterator[range]:
            raise MemoryError

    stream = AdapterStream(Full(log), Lane(log))
    with pytest.raises(MemoryError):
        stream.put(0, Weights())
    stream.await_slots([0])
    assert log == []


def test_a_copy_that_fails_gives_the_room_back(log: Log) -> None:
    """Half an adapter is none."""

    class Torn(Table):
        def load_layers(self, slot: int, prepared: PreparedLora) -> Iterator[range]:
            yield range(4)
            raise RuntimeError("the bus is on fire")

    stream = AdapterStream(Torn(log), Lane(log))
    with pytest.raises(RuntimeError, match="fire"):
        stream.put(2, Weights())
    assert log == ["open", "drop 2"]


def test_shrink_runs_beside_the_base_projection(log: Log, table: Table) -> None:
    """It starts behind all that came before, and expand waits for both. Prefill rows are another plan's."""

    class Logged(Identity):
        def __call__(self, x: Tensor) -> Tensor:
            log.append("linear")
            return x.clone()

    plan = Overlapped(table, Lane(log))
    none = torch.zeros(0, 3, dtype=torch.int32)
    plan.project(5, LoraTiles(none, none), torch.ones(1, 1), Logged())
    assert log == ["open", "shrink 5", "linear", "wait 0", "expand 5"]
    assert plan.covers([Segment(0, 0, 2)], 2)
    assert not plan.covers([Segment(0, 0, 2), Segment(0, 2, 3)], 2)


def test_steps_need_tiles_and_slots_need_adapters(table: Table, stream: AdapterStream) -> None:
    slots = AdapterSlots(9, lambda digest: AdapterWeights(digest, (), torch.float32, torch.device("cpu")))
    lora = DeviceLora([TwoLaunches(table)], stream, slots)
    with pytest.raises(RuntimeError, match="begin"):
        lora.project(0, "qkv", torch.ones(1, 1), Identity())
    with pytest.raises(SlotEmpty):
        lora.choose([Segment(0, 0, 1)], 1)
