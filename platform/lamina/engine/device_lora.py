"""One step's adapters on device kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from lamina.engine.adapter_stream import AdapterStream, Lane
from lamina.models.interface import Linear
from lamina_kernels.gpu.lora_tiles import LoraTiles
from lamina_lora.batch import Segment
from lamina_lora.geometry import SITES
from lamina_lora.slots import AdapterSlots
from lamina_lora.weights import site_index

__all__ = ["DeviceLora", "Overlapped", "Projections", "TiledTable", "TwoLaunches"]

_FIRST_SITE = next(iter(SITES))


class TiledTable(Protocol):
    """The part of a device table that a step uses."""

    def apply(self, site: int, tiles: LoraTiles, x: Tensor, y: Tensor, bias: Tensor | None = None) -> None: ...

    def shrink_decode(self, site: int, tiles: LoraTiles, x: Tensor) -> None: ...

    def expand_decode(self, site: int, tiles: LoraTiles, y: Tensor, bias: Tensor | None = None) -> None: ...


class Projections(Protocol):
    """One way to compute a step's projections with their adapters; a graph is captured for one of them."""

    name: str

    def covers(self, segments: Sequence[Segment], decode_rows: int) -> bool:
        """Whether it can do a step with these adapters, of which the first `decode_rows` rows are decode rows."""
        ...

    def project(self, site: int, tiles: LoraTiles, x: Tensor, linear: Linear) -> Tensor: ...


class TwoLaunches:
    """The base projection, then shrink and expand: any step."""

    name = "two-launch"

    def __init__(self, table: TiledTable) -> None:
        self._table = table

    def covers(self, segments: Sequence[Segment], decode_rows: int) -> bool:
        return True

    def project(self, site: int, tiles: LoraTiles, x: Tensor, linear: Linear) -> Tensor:
        y = linear(x)
        self._table.apply(site, tiles, x, y, linear.bias)
        return y


class Overlapped:
    """Shrink in a lane of its own while the base projection runs, then expand: steps of decode rows alone.

    Shrink reads few bytes and costs mostly its launch; beside a product that waits for the weights it costs next to
    nothing. In prefill both want the matrix units.
    """

    name = "overlapped"

    def __init__(self, table: TiledTable, lane: Lane) -> None:
        self._table = table
        self._lane = lane

    def covers(self, segments: Sequence[Segment], decode_rows: int) -> bool:
        return all(segment.stop <= decode_rows for segment in segments)

    def project(self, site: int, tiles: LoraTiles, x: Tensor, linear: Linear) -> Tensor:
        self._lane.open()
        shrunk = self._lane.run(lambda: self._table.shrink_decode(site, tiles, x))
        y = linear(x)
        shrunk()
        self._table.expand_decode(site, tiles, y, linear.bias)
        return y


class DeviceLora:
    """`LoraApply` for one step at a time, by the first of its plans that covers the step."""

    def __init__(self, plans: Sequence[Projections], stream: AdapterStream, slots: AdapterSlots) -> None:
        """The last of the plans covers everything."""
        self.plans = tuple(plans)
        self._stream = stream
        self._slots = slots
        self._tiles: LoraTiles | None = None
        self._plan = self.plans[-1]
        self._in_step: frozenset[int] = frozenset()

    @property
    def decode_plans(self) -> tuple[Projections, ...]:
        """Those that a step of decode rows alone can get: the last is for the others, unless it is the only one."""
        return self.plans[:-1] or self.plans

    def choose(self, segments: Sequence[Segment], decode_rows: int) -> Projections | None:
        """The plan for a step; None without adapters. Raises SlotEmpty for a slot without an acquired adapter."""
        self._slots.check(segments)  # kernels trust their slots
        if not segments:
            return None
        return next(plan for plan in self.plans if plan.covers(segments, decode_rows))

    def begin(self, tiles: LoraTiles, plan: Projections, slots: frozenset[int] = frozenset()) -> DeviceLora:
        """`slots`: those whose adapters may still be on their way while the step runs."""
        self._tiles, self._plan, self._in_step = tiles, plan, slots
        return self

    def wait(self, slots: frozenset[int]) -> None:
        """Lets all that follows wait for the adapters of a step: a captured graph cannot wait layer by layer."""
        self._stream.await_slots(slots)

    def project(self, layer: int, site: str, x: Tensor, linear: Linear) -> Tensor:
        """See `LoraApply`. Raises RuntimeError before `begin`."""
        if self._tiles is None:
            raise RuntimeError("begin() must set the step's tiles first")
        number = site_index(layer, site)
        if site == _FIRST_SITE:  # a layer's sites arrive together
            self._stream.await_site(number, self._in_step)
        return self._plan.project(number, self._tiles, x, linear)
