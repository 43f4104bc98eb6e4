"""One step's adapters on device kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from lamina.engine.adapter_stream import AdapterStream
from lamina.models.interface import Linear
from lamina_kernels.gpu.lora_tiles import LoraTiles
from lamina_lora.batch import Segment
from lamina_lora.geometry import SITES
from lamina_lora.slots import AdapterSlots
from lamina_lora.weights import site_index

__all__ = ["DeviceLora", "TiledTable"]

_FIRST_SITE = next(iter(SITES))


class TiledTable(Protocol):
    """The part of a device table that a step uses."""

    def apply(self, site: int, tiles: LoraTiles, x: Tensor, y: Tensor, bias: Tensor | None = None) -> None: ...


class DeviceLora:
    """`LoraApply` for one step at a time."""

    def __init__(self, table: TiledTable, stream: AdapterStream, slots: AdapterSlots) -> None:
        self._table = table
        self._stream = stream
        self._slots = slots
        self._tiles: LoraTiles | None = None

    def check(self, segments: Sequence[Segment]) -> None:
        """Raises SlotEmpty for a slot without an acquired adapter: kernels trust their slots."""
        self._slots.check(segments)

    def begin(self, tiles: LoraTiles) -> DeviceLora:
        self._tiles = tiles
        return self

    def wait(self) -> None:
        """Lets all that follows wait for the adapters on their way: a captured graph cannot wait layer by layer."""
        self._stream.await_sites()

    def project(self, layer: int, site: str, x: Tensor, linear: Linear) -> Tensor:
        """See `LoraApply`. Raises RuntimeError before `begin`."""
        if self._tiles is None:
            raise RuntimeError("begin() must set the step's tiles first")
        number = site_index(layer, site)
        if site == _FIRST_SITE:  # a layer's sites arrive together
            self._stream.await_site(number)
        y = linear(x)
        self._table.apply(number, self._tiles, x, y, linear.bias)
        return y
