"""The adapters of one step: which rows run with which adapter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from lamina_kernels.lora import SiteWeights, add_lora
from lamina_lora.weights import AdapterWeights

__all__ = ["LoraBatch", "Segment"]


class Segment(NamedTuple):
    """Rows [start, stop) of a batch run with the adapter in `slot`."""

    slot: int
    start: int
    stop: int


class LoraBatch:
    """Built once per step, applied at every site of every layer."""

    def __init__(self, segments: Sequence[Segment], adapters: Mapping[int, AdapterWeights]) -> None:
        """`adapters` by slot; segments do not overlap."""
        self._by_site: dict[tuple[int, str], list[tuple[int, int, SiteWeights]]] = {}
        for slot, start, stop in segments:
            for key, weights in adapters[slot].sites.items():
                self._by_site.setdefault(key, []).append((start, stop, weights))

    def apply(self, layer: int, site: str, x: Tensor, y: Tensor) -> None:
        """Adds the adapters' part to y [T, out] in place; x [T, in]. Rows outside every segment stay."""
        segments = self._by_site.get((layer, site))
        if segments:
            add_lora(x, y, segments)
