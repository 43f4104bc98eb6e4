"""The adapters in device memory: one flat pool, the table that kernels find them by, and the copies in between.

    packed adapter, pinned --one copy, or one per layer--> weights [ adapter 2 | adapter 0 |  free  | adapter 7 | free ]
                                                           table[:, slot] = where its A, B and gains lie, site by site

Filling a slot is a copy and a few numbers; moving an adapter is a copy and the same numbers anew. A captured CUDA graph
reads the table whenever it is replayed, and so stays valid.

Streams: each change waits for the change before it, whatever stream either is on. `begin`, `drop` and `compact` belong
on the stream that runs the kernels, because they overwrite memory that earlier kernels there still read. `copy` may run
on another; whoever calls it there makes the steps that use the slot wait for an event of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lamina_kernels.gpu.extent_pool import ExtentPool, Move, PoolCorrupt
from lamina_kernels.gpu.lora_layout import FIELDS, padded
from lamina_kernels.gpu.lora_pack import PackedLora, Placement, PoolLayout

__all__ = ["LoraPool", "OutOfPool"]

_BOUNCE_BYTES = 16 << 20  # reasoned, not measured: long enough for full speed, nothing beside a pool


class OutOfPool(Exception):
    """The adapter does not fit beside those in the pool; nothing has changed. `need`, `have` and `limit` are bytes."""

    def __init__(self, *, need: int, have: int, limit: int) -> None:
        self.need, self.have, self.limit = need, have, limit
        super().__init__(f"the adapter needs {need} bytes; {have} of the pool's {limit} are free")


@dataclass
class _Resident:
    """An adapter in the pool, with the sites that were copied so far. `start` is None if it has no weights at all."""

    placement: Placement
    start: int | None
    copied: list[range] = field(default_factory=list)

    def column(self) -> Tensor:
        """int64 [sites, FIELDS] for the table; zeros, thus rank 0, where nothing was copied yet."""
        rows = self.placement.rows_at(self.start or 0)
        column = torch.zeros_like(rows)
        for sites in self.copied:
            column[sites.start : sites.stop] = rows[sites.start : sites.stop]
        return column


class LoraPool:
    """`weights` [N] of the layout's dtype, `gains` the same memory as float32, `table` int64 [sites, slots, FIELDS].

    A slot without an adapter has rank 0 everywhere. Not safe for concurrent use.
    """

    def __init__(self, layout: PoolLayout, *, slots: int, capacity_bytes: int, device: torch.device) -> None:
        if slots < 1:
            raise ValueError(f"there must be at least 1 slot, not {slots}")
        self.layout = layout
        self.slots = slots
        # Rounded up, so that adapters of capacity_bytes together always fit.
        self._extents = ExtentPool(padded(-(-capacity_bytes // layout.dtype.itemsize)))
        self.weights = torch.empty(self._extents.capacity, dtype=layout.dtype, device=device)
        self.gains = self.weights.view(torch.float32)
        self.table = torch.zeros(len(layout.sites), slots, FIELDS, dtype=torch.int64, device=device)
        self._residents: dict[int, _Resident] = {}
        self._bounce = self.weights.new_empty(min(self.weights.numel(), _BOUNCE_BYTES // layout.dtype.itemsize))
        self._order = _Order(device)

    @property
    def free_bytes(self) -> int:
        """One adapter can have them all."""
        return self._extents.unused * self.weights.element_size()

    def begin(self, slot: int, packed: PackedLora) -> None:
        """Gives the slot room for this adapter, none of it copied yet; drops what the slot held.

        Moves other adapters together where only that makes room. Raises ValueError for a slot that does not exist,
        TypeError for an adapter packed for another layout, and OutOfPool; nothing has changed then.
        """
        self._check_slot(slot)
        if packed.layout != self.layout:
            raise TypeError("the adapter was packed for other sites, another dtype or another limit of ranks")
        old = self._residents.get(slot)
        have = self.free_bytes + (old.placement.nbytes if old else 0)
        if packed.nbytes > have:
            raise OutOfPool(need=packed.nbytes, have=have, limit=self.weights.nbytes)
        self.drop(slot)
        self._residents[slot] = _Resident(packed.placement, self._allocate(packed.placement.elements))

    def copy(self, slot: int, packed: PackedLora, sites: range) -> None:
        """Copies these sites of the adapter that `begin` made room for, then lets the table point to them.

        LookupError if the slot does not expect this adapter, because it was dropped, say.
        """
        resident = self._residents.get(slot)
        if resident is None or resident.placement is not packed.placement:
            raise LookupError(f"slot {slot} does not wait for this adapter")
        start, stop = packed.placement.starts[sites.start], packed.placement.starts[sites.stop]
        with self._order.change():
            if resident.start is not None:
                target = self.weights[resident.start + start : resident.start + stop]
                target.copy_(packed.host[start:stop], non_blocking=True)
            resident.copied.append(sites)
            self._publish(slot, resident, sites)

    def drop(self, slot: int) -> None:
        """Empties the slot: its ranks become 0, then its memory is free. Nothing happens if it is empty."""
        self._check_slot(slot)
        resident = self._residents.pop(slot, None)
        if resident is None:
            return
        with self._order.change():
            self.table[:, slot].zero_()
        if resident.start is not None:
            self._extents.free(resident.start)

    def compact(self) -> None:
        """Moves the adapters together, so that all free memory is one piece."""
        with self._order.change():
            moves = self._extents.compaction()
            for move in moves:
                self._carry_out(move)
            targets = {move.source: move.target for move in moves}
            for slot, resident in self._residents.items():
                if resident.start in targets:
                    resident.start = targets[resident.start]
                    for sites in resident.copied:
                        self._publish(slot, resident, sites)

    def check_integrity(self) -> None:
        """Raises PoolCorrupt unless extents, slots and table agree. Waits for the device: for tests and idle times."""
        self._extents.check_integrity()
        starts = tuple(sorted(r.start for r in self._residents.values() if r.start is not None))
        if starts != self._extents.starts:
            raise PoolCorrupt(f"adapters lie at {starts}, extents at {self._extents.starts}")
        want = torch.zeros(self.table.shape, dtype=torch.int64)
        for slot, resident in self._residents.items():
            want[:, slot] = resident.column()
        if not torch.equal(self.table.cpu(), want):
            raise PoolCorrupt("the table does not say where the adapters lie")

    def _check_slot(self, slot: int) -> None:
        if not 0 <= slot < self.slots:
            raise ValueError(f"there is no slot {slot}, only 0 to {self.slots - 1}")

    def _allocate(self, elements: int) -> int | None:
        """Where the adapter goes, or None for one without weights; the caller saw that there is room."""
        if not elements:
            return None
        start = self._extents.allocate(elements)
        if start is None:
            self.compact()
            start = self._extents.allocate(elements)
        assert start is not None
        return start

    def _carry_out(self, move: Move) -> None:
        for piece in move.pieces(self._bounce.numel()):
            source = self.weights[piece.source : piece.source + piece.length]
            if piece.overlaps:  # a copy onto itself has no defined order
                source = self._bounce[: piece.length].copy_(source)
            self.weights[piece.target : piece.target + piece.length].copy_(source)

    def _publish(self, slot: int, resident: _Resident, sites: range) -> None:
        """Sends these sites' rows of the slot, which are copied, to the device's table."""
        rows = resident.placement.rows_at(resident.start or 0, slice(sites.start, sites.stop))
        # Pinned memory comes from torch's pool, which does not hand it out again before the copy is done.
        source = rows.pin_memory() if self.table.is_cuda else rows
        self.table[sites.start : sites.stop, slot].copy_(source, non_blocking=True)


class _Order:
    """Lets changes from several CUDA streams happen one after the other. On the CPU they do so anyway."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last: torch.cuda.Event | None = None

    @contextmanager
    def change(self) -> Iterator[None]:
        """Work inside starts on the device when the change before it is done."""
        if self._device.type != "cuda":
            yield
            return
        stream = torch.cuda.current_stream(self._device)
        if self._last is not None:
            stream.wait_event(self._last)
        try:
            yield
        finally:
            self._last = stream.record_event()
