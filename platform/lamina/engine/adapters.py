"""Adapter weights into slots without blocking a step: files are read in a background thread."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

from lamina.errors import EngineInternal, NotFound
from lamina_kernels.lora import SlotTable
from lamina_lora.errors import AdapterMissing, OutOfAdapterMemory
from lamina_lora.slots import AdapterSlots
from lamina_lora.store import AdapterStore
from lamina_lora.weights import PreparedAdapter

__all__ = ["AdapterLoads"]

_MAX_PENDING = 2  # loads under way or not yet taken: their memory is not counted by the slots


class AdapterLoads:
    """`AdapterGate` of the scheduler. The slots belong to the step loop; only `load` runs elsewhere."""

    def __init__(
        self,
        store: AdapterStore,
        load: Callable[[str], PreparedAdapter],
        table: SlotTable,
        *,
        capacity_bytes: int,
        max_adapters: int,
    ) -> None:
        """`load(digest)` reads and prepares weights; it may take seconds and must not touch the slots."""
        self._store = store
        self._load = load
        self._pending: dict[str, Future[PreparedAdapter]] = {}
        self._seconds: dict[str, float] = {}  # of loads that nobody was charged for yet
        self._threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix="adapter-load")
        self.slots = AdapterSlots(capacity_bytes, self._arrived, max_slots=max_adapters, make_table=lambda *_: table)

    def check(self, digest: str) -> None:
        """Raises NotFound unless the adapter is in the store or loaded."""
        if digest not in self.slots.loaded and not self._store.contains(digest):
            raise NotFound(f"No adapter with the digest {digest!r} is in the store; upload it again.", param="model")

    def try_acquire(self, digest: str) -> int | None:
        """The adapter's slot, held once more; None while it loads.

        Raises OutOfAdapterMemory while adapters in use leave no room for it, NotFound if it was deleted, and
        EngineInternal if it cannot be loaded or is larger than all adapter memory.
        """
        if digest not in self.slots.loaded and not self._has_arrived(digest):
            return None
        try:
            slot = self.slots.acquire(digest)
        except OutOfAdapterMemory as error:
            if error.need > error.limit:
                self._pending.pop(digest, None)
                raise EngineInternal(str(error)) from error
            raise
        except AdapterMissing as error:
            self._pending.pop(digest, None)
            raise NotFound("The adapter was deleted before the request could run.", param="model") from error
        except Exception as error:
            self._pending.pop(digest, None)
            raise EngineInternal(f"The adapter {digest[:12]} could not be loaded: {error}") from error
        self._pending.pop(digest, None)
        return slot

    def _has_arrived(self, digest: str) -> bool:
        """Starts loading if there is room among the loads under way; true once the weights are here."""
        if digest not in self._pending:
            if len(self._pending) >= _MAX_PENDING:
                self._forget_idle()
            if len(self._pending) >= _MAX_PENDING:
                return False
            self._pending[digest] = self._threads.submit(self._timed, digest)
        return self._pending[digest].done()

    def _timed(self, digest: str) -> PreparedAdapter:
        started = time.perf_counter()
        weights = self._load(digest)
        self._seconds[digest] = time.perf_counter() - started
        return weights

    def load_seconds(self, digest: str) -> float:
        return self._seconds.pop(digest, 0.0)

    def _forget_idle(self) -> None:
        """Drops loaded weights that nobody took: their request was cancelled, or memory is full. They load again."""
        for digest in [name for name, load in self._pending.items() if load.done()]:
            del self._pending[digest]

    def _arrived(self, digest: str) -> PreparedAdapter:
        return self._pending[digest].result()

    def release(self, digest: str) -> None:
        self.slots.release(digest)

    def unload(self, digest: str) -> None:
        """Forgets the adapter now, or as soon as nothing runs with it."""
        self._pending.pop(digest, None)
        self._seconds.pop(digest, None)
        self.slots.unload(digest)

    def loaded(self) -> list[str]:
        return list(self.slots.loaded)

    def wait(self, *, seconds: float) -> None:
        """Until something has loaded, at most `seconds`: for a loop that has nothing else to do."""
        loading = [load for load in self._pending.values() if not load.done()]
        if loading:
            wait(loading, timeout=seconds, return_when="FIRST_COMPLETED")
        else:
            time.sleep(seconds)

    def check_integrity(self) -> None:
        self.slots.check_integrity()

    def close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)
