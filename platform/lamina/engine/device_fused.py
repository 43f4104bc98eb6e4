"""The fused LoRA plan in an engine: base projections whose own product computes the shrink of the first few slots.

A step takes it if only decode rows are in it and every adapter of theirs lies in the fused matrices; any other step
takes the two-launch plan, so both hold the weights. Adapters beyond the slots or ranks of the matrices are served all
the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from lamina.models.interface import Linear
from lamina_kernels.gpu.lora_fused import FusedSite
from lamina_kernels.gpu.lora_pack import PackedLora
from lamina_kernels.gpu.lora_table import TritonLoraTable
from lamina_kernels.gpu.lora_tiles import LoraTiles
from lamina_kernels.lora import LoraWeights, PreparedLora
from lamina_lora.batch import Segment

__all__ = ["FusedTable"]


@dataclass(frozen=True, slots=True)
class _FusedLora:
    """One adapter for both plans; `sites` is None if it has too many ranks for the matrices."""

    packed: PackedLora
    sites: tuple[PackedLora | None, ...] | None

    @property
    def nbytes(self) -> int:
        """Of the pool; the matrices are paid for once."""
        return self.packed.nbytes


class FusedTable:
    """Fills the slots of both plans (`LayeredTable`), and is itself the fused one (`Projections`)."""

    name = "fused"

    def __init__(self, table: TritonLoraTable, sites: Sequence[FusedSite]) -> None:
        """`sites[i].weight` is the base weight of site i already."""
        self._table = table
        self._sites = tuple(sites)
        self._fused: set[int] = set()  # slots that are in the matrices

    def prepare(self, weights: Sequence[LoraWeights | None]) -> _FusedLora:
        """In any thread."""
        fits = all(lora is None or lora.rank <= site.ranks for lora, site in zip(weights, self._sites, strict=True))
        sites = None
        if fits:
            pairs = zip(weights, self._sites, strict=True)
            sites = tuple(None if lora is None else site.prepare(lora) for lora, site in pairs)
        return _FusedLora(self._table.prepare(weights), sites)

    def load_layers(self, slot: int, prepared: PreparedLora) -> Iterator[range]:
        """Both plans' weights, a layer whenever it is advanced. TypeError for weights prepared by another table."""
        if not isinstance(prepared, _FusedLora):
            raise TypeError(f"{type(prepared).__name__} was prepared for another kernel")
        layers = self._table.load_layers(slot, prepared.packed)
        self._fused.discard(slot)
        if prepared.sites is None or slot >= self._sites[0].slots:
            return layers
        self._fused.add(slot)
        return self._with_matrices(slot, prepared.sites, layers)

    def _with_matrices(
        self, slot: int, packed: Sequence[PackedLora | None], layers: Iterator[range]
    ) -> Iterator[range]:
        for numbers in layers:
            for number in numbers:
                site, lora = self._sites[number], packed[number]
                if lora is None:
                    site.drop(slot)
                else:
                    site.put(slot, lora)
            yield numbers

    def drop(self, slot: int) -> None:
        self._table.drop(slot)
        if slot in self._fused:
            self._fused.remove(slot)
            for site in self._sites:
                site.drop(slot)

    def covers(self, segments: Sequence[Segment], decode_rows: int) -> bool:
        """Whether the fused plan can do a step with these adapters."""
        return all(segment.slot in self._fused and segment.stop <= decode_rows for segment in segments)

    def project(self, site: int, tiles: LoraTiles, x: Tensor, linear: Linear) -> Tensor:
        """[T, out], rows further apart than that. `linear` is part of the matrix."""
        return self._sites[site].project(x, tiles.decode)
