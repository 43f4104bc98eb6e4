"""The adapters in memory: reference-counted slots under a byte limit, least recently used leave first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from lamina_kernels.dispatch import lora_table
from lamina_kernels.lora import LoraTable, SlotTable
from lamina_lora.batch import LoraBatch, Segment
from lamina_lora.errors import OutOfAdapterMemory, OutOfAdapterSlots, SlotEmpty, SlotsCorrupt
from lamina_lora.weights import AdapterWeights, PreparedAdapter

__all__ = ["AdapterSlots", "SlotCounters"]

MakeTable = Callable[[int, torch.dtype, torch.device], SlotTable]


@dataclass(slots=True)
class SlotCounters:
    """What happened since the start; only grows."""

    hits: int = 0  # acquired and loaded already
    loads: int = 0
    loaded_bytes: int = 0
    evictions: int = 0  # dropped to make room
    unloads: int = 0  # dropped because asked for
    refusals: int = 0  # OutOfAdapterMemory


@dataclass(slots=True)
class _Resident:
    slot: int
    nbytes: int
    references: int = 0
    draining: bool = False


class AdapterSlots:
    """Every loaded adapter has a slot: a small number that batches name, free for reuse once the adapter is dropped.

    An adapter with references is never dropped. One without stays until its bytes are needed, or until `unload`.
    `loader(digest)` reads an adapter (blocking; its errors pass through). One thread at a time may use this object;
    to load without blocking it, load and prepare elsewhere (`weights.prepare_adapter`) and hand the result to `add`
    or let the loader return it.
    """

    def __init__(
        self,
        capacity_bytes: int,
        loader: Callable[[str], AdapterWeights | PreparedAdapter],
        *,
        max_slots: int | None = None,
        make_table: MakeTable = lambda sites, dtype, device: lora_table(sites, dtype=dtype, device=device),
    ) -> None:
        """`max_slots`: adapters at a time, however small; None: as many as have room."""
        if capacity_bytes < 0:
            raise ValueError(f"capacity_bytes is {capacity_bytes}; it cannot be negative")
        if max_slots is not None and max_slots < 1:
            raise ValueError(f"max_slots is {max_slots}; at least 1 is needed")
        self.capacity_bytes = capacity_bytes
        self.max_slots = max_slots
        self.counters = SlotCounters()
        self._loader = loader
        self._make_table = make_table
        self._table: SlotTable | None = None
        self._residents: OrderedDict[str, _Resident] = OrderedDict()  # least recently used first
        self._digests: list[str | None] = []  # by slot; None: free

    @property
    def used_bytes(self) -> int:
        return sum(resident.nbytes for resident in self._residents.values())

    @property
    def loaded(self) -> tuple[str, ...]:
        """Digests in memory, least recently used first."""
        return tuple(self._residents)

    def references(self, digest: str) -> int:
        """How often the adapter is acquired; 0 too if it is not loaded."""
        resident = self._residents.get(digest)
        return resident.references if resident else 0

    def acquire(self, digest: str) -> int:
        """The adapter's slot, loaded if need be, and kept until `release`.

        Raises OutOfAdapterMemory when it does not fit beside the adapters in use; nothing has changed then.
        """
        if digest in self._residents:
            self.counters.hits += 1
        else:
            self.add(self._loader(digest), digest)
        resident = self._residents[digest]
        resident.references += 1
        self._residents.move_to_end(digest)
        return resident.slot

    def release(self, digest: str) -> None:
        """Gives back one `acquire`; KeyError without one."""
        resident = self._residents[digest]
        if resident.references < 1:
            raise KeyError(digest)
        resident.references -= 1
        if resident.draining and not resident.references:
            self._drop(digest)
            self.counters.unloads += 1

    def add(self, adapter: AdapterWeights | PreparedAdapter, digest: str | None = None) -> None:
        """Takes in a loaded adapter, without a reference; evicts as `acquire` does. Nothing happens if it is here."""
        digest = digest or adapter.digest
        if digest in self._residents:
            return
        self._make_room(adapter.nbytes)
        table = self._table_for(adapter)
        lora = adapter.lora if isinstance(adapter, PreparedAdapter) else table.prepare(adapter.sites)
        slot = self._free_slot()
        table.put(slot, lora)
        self._digests[slot] = digest
        self._residents[digest] = _Resident(slot, adapter.nbytes)
        self.counters.loads += 1
        self.counters.loaded_bytes += adapter.nbytes

    def unload(self, digest: str) -> bool:
        """Drops the adapter now, or when its last user releases it. False if it is not loaded.

        Until then it can still be acquired, by requests that were accepted before.
        """
        resident = self._residents.get(digest)
        if resident is None:
            return False
        resident.draining = True
        if not resident.references:
            self._drop(digest)
            self.counters.unloads += 1
        return True

    def batch(self, segments: Sequence[Segment], num_tokens: int) -> LoraBatch:
        """One step's adapters: rows [start, stop) of x belong to the adapter in `slot`; the other rows are base rows.

        Raises SlotEmpty for a slot without an acquired adapter, ValueError for segments that are empty, overlap or
        exceed num_tokens, and TypeError if the table computes otherwise. Use the batch before the next release.
        """
        self.check(segments)
        if self._table is not None and not isinstance(self._table, LoraTable):
            raise TypeError(f"a {type(self._table).__name__} does not compute from segments")
        return LoraBatch(self._table, segments, num_tokens)

    def check(self, segments: Sequence[Segment]) -> None:
        """Raises SlotEmpty if a segment's slot has no acquired adapter."""
        for segment in segments:
            self._check_slot(segment.slot)

    def check_integrity(self) -> None:
        """Raises SlotsCorrupt unless slots, references and bytes agree with each other."""
        by_slot = {slot: digest for slot, digest in enumerate(self._digests) if digest is not None}
        if by_slot != {resident.slot: digest for digest, resident in self._residents.items()}:
            raise SlotsCorrupt("slots and loaded adapters do not match")
        if self.used_bytes > self.capacity_bytes:
            raise SlotsCorrupt(f"{self.used_bytes} bytes are used, the limit is {self.capacity_bytes}")
        for digest, resident in self._residents.items():
            if resident.references < 0 or (resident.draining and not resident.references):
                raise SlotsCorrupt(f"adapter {digest} has {resident.references} references and should be gone")
        gone = self.counters.evictions + self.counters.unloads
        if self.counters.loads - gone != len(self._residents):
            raise SlotsCorrupt("loads, evictions and unloads do not add up")

    def _check_slot(self, slot: int) -> None:
        digest = self._digests[slot] if 0 <= slot < len(self._digests) else None
        if digest is None or not self._residents[digest].references:
            raise SlotEmpty(slot)

    def _make_room(self, need: int) -> None:
        held = sum(resident.nbytes for resident in self._residents.values() if resident.references)
        if held + need > self.capacity_bytes:
            self.counters.refusals += 1
            raise OutOfAdapterMemory(need=need, have=self.capacity_bytes - held, limit=self.capacity_bytes)
        idle = [digest for digest, resident in self._residents.items() if not resident.references]
        if self.max_slots is not None and len(self._residents) - len(idle) >= self.max_slots:
            self.counters.refusals += 1
            raise OutOfAdapterSlots(need=need, have=0, limit=self.capacity_bytes, slots=self.max_slots)
        for digest in idle:
            if self.used_bytes + need <= self.capacity_bytes and not self._is_full():
                break
            self._drop(digest)
            self.counters.evictions += 1

    def _is_full(self) -> bool:
        return self.max_slots is not None and len(self._residents) >= self.max_slots

    def _drop(self, digest: str) -> None:
        slot = self._residents.pop(digest).slot
        self._digests[slot] = None
        if self._table is not None:
            self._table.drop(slot)

    def _free_slot(self) -> int:
        if None not in self._digests:
            self._digests.append(None)
        return self._digests.index(None)

    def _table_for(self, adapter: AdapterWeights | PreparedAdapter) -> SlotTable:
        if self._table is None:
            self._table = (
                adapter.table
                if isinstance(adapter, PreparedAdapter)
                else self._make_table(len(adapter.sites), adapter.dtype, adapter.device)
            )
        return self._table
