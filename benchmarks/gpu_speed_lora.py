"""What adapters cost beside the linear layers: adapters x ranks x rows, each in one captured graph, both LoRA plans.

The cost is the difference between the linear layers with and without adapters, of a few layers, scaled to all. The
percentage to read first is the one of the linear layers; "% of the roofline" counts one graph node per launch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from chips import Chip
from costs import Lora, fused_seconds, two_launch_seconds
from gpu_clock import graph_of, measure
from gpu_lora import Resident, resident, site_shapes, split_rows
from gpu_report import Figure, Item, Skipped
from gpu_scale import Scale
from gpu_setup import DEVICE, ON_GPU
from gpu_speed_base import Linears
from lamina_kernels.gpu.lora_expand import expand
from lamina_kernels.gpu.lora_fused import FusedSite
from lamina_kernels.gpu.lora_layout import SiteShape, padded
from lamina_kernels.gpu.lora_pack import PackedLora
from lamina_kernels.gpu.lora_shrink import shrink
from lamina_kernels.gpu.lora_tiles import build_tiles
from lamina_kernels.gpu.tuned import (
    LORA_EXPAND_DECODE,
    LORA_EXPAND_PREFILL,
    LORA_SHRINK_DECODE,
    LORA_SHRINK_PREFILL,
)
from lamina_kernels.lora import LoraWeights
from shapes import ranks

__all__ = ["items"]

Costs = Callable[..., float]


def items(scale: Scale, chip: Chip) -> Iterator[Item]:
    """Decode first, as the target is about it; the fused plan is for decode with few slots. Adapters and ranks outside,
    rows inside, so that each set of adapters is made once."""
    sweep = _Sweep(scale, chip)
    sets = [(adapters, rank) for rank in scale.ranks for adapters in scale.adapters]
    for adapters, rank in sets:
        for rows in scale.decode:
            yield _two_launch(sweep, adapters, rank, "decode", rows)
        for rows in scale.decode if adapters <= scale.fused_slots else ():
            name = f"LoRA fused, {adapters} x r{rank}, decode {rows}"
            yield name, partial(sweep.fused, name, adapters, rank, rows)
    for adapters, rank in sets:
        for rows in scale.prefill:
            yield _two_launch(sweep, adapters, rank, "prefill", rows)


def _two_launch(sweep: _Sweep, adapters: int, rank: str, phase: str, rows: int) -> Item:
    name = f"LoRA two-launch, {adapters} x r{rank}, {phase} {rows}"
    return name, partial(sweep.two_launch, name, adapters, rank, phase, rows)


class _Projection(Protocol):
    def __call__(self, number: int, x: Tensor, y: Tensor, weight: Tensor) -> None:
        """The base projection of site `number` with its adapters."""
        ...


def _plain(number: int, x: Tensor, y: Tensor, weight: Tensor) -> None:
    torch.mm(x, weight.t(), out=y)


class _Sweep:
    """Base weights of a few layers, their times by rows, and one set of adapters at a time."""

    def __init__(self, scale: Scale, chip: Chip) -> None:
        self.scale, self.chip = scale, chip
        self.linears = Linears(scale, scale.layers)
        self.sites = site_shapes(scale.shape, scale.layers)
        self._base: dict[int, float] = {}
        self._held: tuple[object, Resident | _Fused] | None = None

    def two_launch(self, name: str, adapters: int, rank: str, phase: str, rows: int) -> list[Figure]:
        held = self._kept(
            ("two", adapters, rank), lambda: resident(self.sites, self._ranks(adapters, rank), self._type)
        )
        assert isinstance(held, Resident)
        return self._figures(
            name, _TwoLaunch(self, held, adapters, phase, rows), adapters, rank, rows, two_launch_seconds
        )

    def fused(self, name: str, adapters: int, rank: str, rows: int) -> list[Figure]:
        held = self._kept(("fused", adapters, rank), lambda: _Fused(self, self._ranks(adapters, rank)))
        assert isinstance(held, _Fused)
        held.prepare(adapters, rows)
        return self._figures(name, held, adapters, rank, rows, fused_seconds)

    @property
    def _type(self) -> torch.dtype:
        return self.scale.dtype

    def _ranks(self, adapters: int, rank: str) -> tuple[int, ...]:
        return ranks(adapters, rank)

    def _kept(self, key: object, make: Callable[[], Resident | _Fused]) -> Resident | _Fused:
        if self._held is None or self._held[0] != key:
            self._held = None  # first free, then allocate
            self._held = (key, make())
        return self._held[1]

    def _figures(
        self, name: str, project: _Projection, adapters: int, rank: str, rows: int, cost: Costs
    ) -> list[Figure]:
        if rows not in self._base:
            self._base[rows] = self._seconds(rows, _plain)
        base = self._base[rows]
        taken = self._seconds(rows, project) - base
        lora = Lora(self._ranks(adapters, rank), rows, self._type.itemsize)
        shape = self.scale.shape
        device, floor = (cost(shape, lora, self.chip, how) for how in ("device", "graph"))
        note = f"{taken / base:.1%} of the linear layers; roofline without graph nodes {1e6 * device:.0f} us"
        return [Figure.of_time(name, max(taken, 1e-9) * shape.layers / self.scale.layers, floor, note)]

    def _seconds(self, rows: int, project: _Projection) -> float:
        x, y = self.linears.activations(rows)

        def run() -> None:
            number = 0
            for weights in self.linears.weights:
                for x_site, y_site, weight in zip(x, y, weights, strict=True):
                    project(number, x_site, y_site, weight)
                    number += 1

        return measure(graph_of(run), repetitions=1 if not ON_GPU else 12 if rows <= 256 else 5)


class _TwoLaunch:
    """shrink and expand behind each base projection."""

    def __init__(self, sweep: _Sweep, held: Resident, adapters: int, phase: str, rows: int) -> None:
        decoding = phase == "decode"
        self.shrink_kind = LORA_SHRINK_DECODE if decoding else LORA_SHRINK_PREFILL
        self.expand_kind = LORA_EXPAND_DECODE if decoding else LORA_EXPAND_PREFILL
        self.sites, self.held = sweep.sites, held
        tiles = build_tiles(split_rows(rows, range(adapters)), self.shrink_kind.rows)
        self.tiles = torch.from_numpy(tiles).to(DEVICE)
        splits = max(self.shrink_kind.splits(site.in_features) for site in self.sites)
        width = -(-held.max_rank // 16) * 16  # whole vectors, as the runner's table has them
        self.planes = torch.empty(splits, rows, width, dtype=torch.float32, device=DEVICE)

    def __call__(self, number: int, x: Tensor, y: Tensor, weight: Tensor) -> None:
        torch.mm(x, weight.t(), out=y)
        held, site = self.held, self.sites[number]
        shrink(x, held.pool, held.table[number], self.tiles, self.planes, kind=self.shrink_kind)
        expand(
            *(self.planes, held.pool, held.gains, held.table[number], self.tiles, y, None),
            shape=site,
            splits=self.shrink_kind.splits(site.in_features),
            kind=self.expand_kind,
        )


class _Fused:
    """[W; A of every slot] per site, and expand. Raises Skipped if the matrices do not fit beside the base weights."""

    def __init__(self, sweep: _Sweep, slot_ranks: tuple[int, ...]) -> None:
        self.sites: list[FusedSite] = []
        largest = max(slot_ranks)
        room = sum(padded(largest * len(s.widths)) * len(slot_ranks) * s.in_features for s in sweep.sites)
        base = sum(s.in_features * s.out_features for s in sweep.sites)
        if ON_GPU and (room + base) * 2 * 1.5 > torch.cuda.mem_get_info()[0]:
            raise Skipped("the matrices of the fused plan do not fit")
        packed: dict[
            tuple[SiteShape, int], PackedLora
        ] = {}  # the same numbers in every layer: only their place matters here
        for shape in sweep.sites:
            site = FusedSite(
                shape,
                slots=len(slot_ranks),
                ranks=padded(largest * len(shape.widths)),
                dtype=sweep.scale.dtype,
                device=DEVICE,
            )
            site.weight.normal_(0, 0.02)
            for slot, rank in enumerate(slot_ranks):
                if (shape, rank) not in packed:
                    packed[shape, rank] = site.prepare(_adapter(shape, rank, sweep.scale.dtype))
                site.put(slot, packed[shape, rank])
            self.sites.append(site)
        self.tiles = torch.empty(0, 3, dtype=torch.int32, device=DEVICE)

    def prepare(self, adapters: int, rows: int) -> None:
        """For a step of so many rows."""
        tiles = build_tiles(split_rows(rows, range(adapters)), LORA_SHRINK_DECODE.rows)
        self.tiles = torch.from_numpy(tiles).to(DEVICE)

    def __call__(self, number: int, x: Tensor, y: Tensor, weight: Tensor) -> None:
        self.sites[number].project(x, self.tiles)


def _adapter(shape: SiteShape, rank: int, dtype: torch.dtype) -> LoraWeights:
    widths, inputs, columns = shape.widths, shape.in_features, shape.columns
    return LoraWeights(
        a=torch.randn(rank * len(widths), inputs).mul_(0.02).to(dtype),
        b=tuple(torch.randn(rank, width).mul_(0.02).to(dtype) for width in widths),
        columns=columns,
    )
