"""One step's adapters, as the model's layers see them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from lamina_kernels.lora import LoraSegments, LoraTable
from lamina_lora.weights import site_index

__all__ = ["Linear", "LoraBatch", "Segment"]


class Linear(Protocol):
    """A base projection."""

    @property
    def bias(self) -> Tensor | None: ...

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, in] -> a new tensor [T, out] that the caller may change in place."""
        ...


class Segment(NamedTuple):
    """Rows [start, stop) of the step's tokens belong to the adapter in `slot`."""

    slot: int
    start: int
    stop: int


class LoraBatch:
    """Built once per step by `AdapterSlots.batch`; the layers only call `project`.

    `table` is None where no adapter is loaded, so that there are no segments either.
    """

    def __init__(self, table: LoraTable | None, segments: Sequence[Segment], num_tokens: int) -> None:
        self._table = table
        self._segments = LoraSegments(segments)
        if self._segments.stop > num_tokens:
            raise ValueError(f"segments end at row {self._segments.stop}, the step has {num_tokens} tokens")

    def project(self, layer: int, site: str, x: Tensor, linear: Linear) -> Tensor:
        """linear(x) [T, out] with every adapter's change at this site; x [T, in] is the site's input."""
        y = linear(x)
        self.apply(layer, site, x, y, linear.bias)
        return y

    def apply(self, layer: int, site: str, x: Tensor, y: Tensor, bias: Tensor | None = None) -> None:
        """Adds every adapter's change at this site to y [T, out] in place, given the site's input x [T, in].

        `site` is "qkv", "o", "gate_up" or "down"; `bias` [out] is what the base projection added to y. Inference
        only: autograd does not see the change.
        """
        if self._table is not None:
            self._table.apply(site_index(layer, site), self._segments, x, y, bias)
