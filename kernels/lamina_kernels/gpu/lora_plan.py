"""What a fused site with adapters costs at decode under either plan, from shapes alone, and which one to take.

    two-launch   y = x Wᵀ    h = x Aᵀ (adapters with rows)    y += h B     3 kernels
    fused        [y | h of every slot] = x [W; A_0; A_1; ..]ᵀ     y += h B     2, but A of idle slots is read, too

Bytes that a cache may keep (planes, h, y between two kernels) count as moved: the same for both plans, nearly. A kernel
takes the longer of its bytes over the bandwidth and its operations over the peak, and its launch on top.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lamina_kernels.gpu.lora_layout import SiteShape
from lamina_kernels.gpu.tuned import LORA_SHRINK_DECODE

__all__ = ["Kernel", "Plan", "PlanCost", "choose_plan", "fused_cost", "two_launch_cost"]

Plan = Literal["two-launch", "fused"]


@dataclass(frozen=True, slots=True)
class Kernel:
    bytes: int
    flops: int


@dataclass(frozen=True, slots=True)
class PlanCost:
    """A plan's kernels, the base projection included, one after the other."""

    kernels: tuple[Kernel, ...]

    @property
    def bytes(self) -> int:
        return sum(kernel.bytes for kernel in self.kernels)

    @property
    def flops(self) -> int:
        return sum(kernel.flops for kernel in self.kernels)

    @property
    def launches(self) -> int:
        return len(self.kernels)

    def seconds(self, *, bytes_per_s: float, flops_per_s: float, launch_s: float) -> float:
        """At the least, on a chip with these figures; `launch_s` is what one more kernel costs, in a graph or not."""
        return sum(max(k.bytes / bytes_per_s, k.flops / flops_per_s) + launch_s for k in self.kernels)


def two_launch_cost(shape: SiteShape, slots: int, rank: int, rows: int, *, itemsize: int = 2) -> PlanCost:
    """`rows` rows, adapters of `rank` on every slice in `slots` slots; as many of them have rows as can have any."""
    active = min(slots, rows)
    ranks = rank * len(shape.widths)
    x = rows * shape.in_features * itemsize
    planes = 4 * rows * ranks * LORA_SHRINK_DECODE.splits(shape.in_features)
    shrink = Kernel(
        x + active * ranks * shape.in_features * itemsize + planes,
        2 * rows * ranks * shape.in_features,
    )
    return PlanCost((_base(shape, rows, itemsize), shrink, _expand(shape, active, rank, rows, planes, itemsize)))


def fused_cost(shape: SiteShape, slots: int, rank: int, rows: int, *, itemsize: int = 2) -> PlanCost:
    """As `two_launch_cost`: every slot has room for `rank` on every slice, all of it multiplied with every row."""
    columns = slots * rank * len(shape.widths)
    base = _base(shape, rows, itemsize)
    wide = Kernel(
        base.bytes + (columns * shape.in_features + rows * columns) * itemsize,
        base.flops + 2 * rows * columns * shape.in_features,
    )
    h = rows * rank * len(shape.widths) * itemsize
    return PlanCost((wide, _expand(shape, min(slots, rows), rank, rows, h, itemsize)))


def choose_plan(
    shape: SiteShape,
    slots: int,
    rank: int,
    rows: int,
    *,
    bytes_per_s: float,
    flops_per_s: float,
    launch_s: float,
    itemsize: int = 2,
) -> Plan:
    """The plan that takes less time on a chip with these figures; for a tie the one that wastes nothing."""
    two, fused = (
        cost(shape, slots, rank, rows, itemsize=itemsize).seconds(
            bytes_per_s=bytes_per_s, flops_per_s=flops_per_s, launch_s=launch_s
        )
        for cost in (two_launch_cost, fused_cost)
    )
    return "fused" if fused < two else "two-launch"


def _base(shape: SiteShape, rows: int, itemsize: int) -> Kernel:
    inputs, outputs = shape.in_features, shape.out_features
    return Kernel((rows * inputs + inputs * outputs + rows * outputs) * itemsize, 2 * rows * inputs * outputs)


def _expand(shape: SiteShape, active: int, rank: int, rows: int, h_bytes: int, itemsize: int) -> Kernel:
    """Reads h and every active B, reads and writes y."""
    outputs = shape.out_features
    return Kernel(h_bytes + (active * rank * outputs + 2 * rows * outputs) * itemsize, 2 * rows * rank * outputs)
