"""Loaded adapters in slots: counted references, least recently used leave first, bounded in bytes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lamina_lora.batch import LoraBatch, Segment
from lamina_lora.errors import LoraError, OutOfAdapterMemory, SlotEmpty, SlotsCorrupt
from lamina_lora.weights import AdapterWeights

__all__ = ["AdapterSlots"]


@dataclass(slots=True)
class _Loaded:
    slot: int
    weights: AdapterWeights
    references: int = 0
    draining: bool = False  # unload as soon as nothing uses it


class AdapterSlots:
    """Invariant: used_bytes is the sum over loaded adapters and never exceeds the capacity; a slot number belongs
    to one adapter from its loading to its leaving. Not thread-safe: the step loop owns it."""

    def __init__(self, capacity_bytes: int, load: Callable[[str], AdapterWeights]) -> None:
        """`load(digest)` gives the weights of an adapter that is not loaded."""
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self.loads = 0  # counters, only grow
        self.evictions = 0
        self._load = load
        self._by_digest: OrderedDict[str, _Loaded] = OrderedDict()  # least recently acquired first
        self._digest_of: dict[int, str] = {}
        self._free_slots: list[int] = []

    def __contains__(self, digest: str) -> bool:
        return digest in self._by_digest

    def loaded(self) -> list[str]:
        """Digests, least recently acquired first."""
        return list(self._by_digest)

    def acquire(self, digest: str) -> int:
        """The adapter's slot, held once more; loads it if need be.

        Raises OutOfAdapterMemory if adapters in use leave too little room, and what `load` raises.
        """
        entry = self._by_digest.get(digest) or self._bring(digest)
        entry.references += 1
        entry.draining = False
        self._by_digest.move_to_end(digest)
        return entry.slot

    def _bring(self, digest: str) -> _Loaded:
        weights = self._load(digest)
        self._make_room(weights.nbytes)
        slot = self._free_slots.pop() if self._free_slots else len(self._by_digest)
        entry = self._by_digest[digest] = _Loaded(slot, weights)
        self._digest_of[slot] = digest
        self.used_bytes += weights.nbytes
        self.loads += 1
        return entry

    def _make_room(self, need: int) -> None:
        idle = [(name, entry) for name, entry in self._by_digest.items() if entry.references == 0]
        room = self.capacity_bytes - self.used_bytes + sum(entry.weights.nbytes for _, entry in idle)
        if need > room:
            raise OutOfAdapterMemory(need=need, have=room, limit=self.capacity_bytes)
        for name, _ in idle:
            if self.used_bytes + need <= self.capacity_bytes:
                return
            self._drop(name)
            self.evictions += 1

    def release(self, digest: str) -> None:
        """Gives back one reference. Raises LoraError if there is none."""
        entry = self._by_digest.get(digest)
        if entry is None or entry.references == 0:
            raise LoraError(f"adapter {digest[:12]} is released more often than it was acquired")
        entry.references -= 1
        if entry.draining and entry.references == 0:
            self._drop(digest)

    def unload(self, digest: str) -> None:
        """Drops the adapter now, or when the last reference goes. Unknown digests are ignored."""
        entry = self._by_digest.get(digest)
        if entry is None:
            return
        entry.draining = True
        if entry.references == 0:
            self._drop(digest)

    def _drop(self, digest: str) -> None:
        entry = self._by_digest.pop(digest)
        del self._digest_of[entry.slot]
        self._free_slots.append(entry.slot)
        self.used_bytes -= entry.weights.nbytes

    def batch(self, segments: Sequence[Segment], num_tokens: int) -> LoraBatch:
        """The adapters of one step over `num_tokens` rows. Raises SlotEmpty for a slot that nobody holds."""
        adapters = {}
        for segment in segments:
            digest = self._digest_of.get(segment.slot)
            if digest is None or self._by_digest[digest].references == 0:
                raise SlotEmpty(segment.slot)
            if not 0 <= segment.start < segment.stop <= num_tokens:
                raise ValueError(f"{segment} does not lie within {num_tokens} rows")
            adapters[segment.slot] = self._by_digest[digest].weights
        return LoraBatch(segments, adapters)

    def check_integrity(self) -> None:
        """Raises SlotsCorrupt if bytes, slots or references contradict each other."""
        slots = [entry.slot for entry in self._by_digest.values()]
        used = sum(entry.weights.nbytes for entry in self._by_digest.values())
        problems = {
            "bytes do not add up": used != self.used_bytes,
            "more bytes than the capacity": used > self.capacity_bytes,
            "a slot is used twice or both used and free": len({*slots, *self._free_slots})
            != len(slots) + len(self._free_slots),
            "slot numbers and adapters differ": self._digest_of != {e.slot: d for d, e in self._by_digest.items()},
            "a negative reference count": any(entry.references < 0 for entry in self._by_digest.values()),
            "a drained adapter is still here": any(e.draining and not e.references for e in self._by_digest.values()),
        }
        found = [what for what, wrong in problems.items() if wrong]
        if found:
            raise SlotsCorrupt("; ".join(found))
