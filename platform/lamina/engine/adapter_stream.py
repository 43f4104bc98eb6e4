"""Adapter weights on their way to the device, layer by layer, beside the steps that run.

A step that needs them waits on the device, and only for the layer that it is about to compute: prefill with a new
adapter begins when its first layer has arrived.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

import torch

from lamina_kernels.lora import LoraWeights, PreparedLora

__all__ = ["AdapterStream", "CudaLane", "InlineLane", "Lane", "LayeredTable", "Mark"]

Mark = Callable[[], None]
"""Makes what the caller launches next wait until the marked work is done."""


class Lane(Protocol):
    """Where copies run in order, beside everything else."""

    def open(self) -> None:
        """Copies that follow come after all that was launched so far."""
        ...

    def run(self, copy: Callable[[], object]) -> Mark: ...


class InlineLane:
    """At once: for devices without streams."""

    def open(self) -> None:
        """What was launched has run."""

    def run(self, copy: Callable[[], object]) -> Mark:
        copy()
        return lambda: None


class CudaLane:  # pragma: no cover - CUDA only
    """A side stream."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def open(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream())

    def run(self, copy: Callable[[], object]) -> Mark:
        with torch.cuda.stream(self._stream):
            copy()
            event = self._stream.record_event()
        return lambda: torch.cuda.current_stream().wait_event(event)


class LayeredTable(Protocol):
    """The part of a device table that fills slots."""

    def prepare(self, weights: Sequence[LoraWeights | None]) -> PreparedLora: ...

    def load_layers(self, slot: int, prepared: PreparedLora) -> Iterator[range]:
        """Copies one layer's sites whenever it is advanced, and gives them."""
        ...

    def drop(self, slot: int) -> None: ...


class AdapterStream:
    """`SlotTable` of `AdapterSlots`: fills slots in a lane and knows what is still on its way."""

    def __init__(self, table: LayeredTable, lane: Lane) -> None:
        self._table = table
        self._lane = lane
        self._arriving: dict[int, list[tuple[range, Mark]]] = {}  # by slot

    def prepare(self, weights: Sequence[LoraWeights | None]) -> PreparedLora:
        """In any thread."""
        return self._table.prepare(weights)

    def put(self, slot: int, prepared: PreparedLora) -> None:
        """Launches the copies of all layers; errors leave the slot empty."""
        layers = self._table.load_layers(slot, prepared)
        try:
            self._arriving[slot] = self._launch(layers)
        except BaseException:
            self._table.drop(slot)
            raise

    def _launch(self, layers: Iterator[range]) -> list[tuple[range, Mark]]:
        self._lane.open()
        marks: list[tuple[range, Mark]] = []
        sites: range | None = range(0)

        def advance() -> None:
            nonlocal sites
            sites = next(layers, None)

        while True:
            mark = self._lane.run(advance)
            if sites is None:
                return marks
            marks.append((sites, mark))

    def drop(self, slot: int) -> None:
        """The room may be given away at once: whatever is copied there later comes after this adapter's copies."""
        self.await_slots((slot,))
        self._table.drop(slot)

    def await_site(self, site: int, slots: Iterable[int]) -> None:
        """Lets what is launched next wait for the weights of these slots at one site."""
        for slot in slots:
            for sites, mark in self._arriving.get(slot, ()):
                if site in sites:
                    mark()

    def await_slots(self, slots: Iterable[int]) -> None:
        """Lets what is launched next wait for all of these slots' weights, which have arrived from then on."""
        for slot in slots:
            for _, mark in self._arriving.pop(slot, [])[-1:]:
                mark()
