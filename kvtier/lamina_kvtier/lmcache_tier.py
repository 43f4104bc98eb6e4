"""A StoreTier over LMCache's StorageManager. The one module that calls LMCache, written for exactly version 0.5.6.

    put    value ──copy──▶ L1 slab ──store controller──▶ our L2 adapter ──▶ server        (keys: lmcache_wire)
    load   value ◀──copy── L1 slab ◀──prefetch controller── our L2 adapter ◀── server

The slab is a place to pass through: what was stored or read leaves it at once, since our own host memory is the tier
that keeps blocks. Deletions and look-ups do not pass through LMCache, which has no question without a load.

LMCache reports success for a whole task, or none; so our adapter tells each block's outcome to whoever moves it, past
LMCache. What LMCache's threads do late or never costs a deadline, not a hang (`staged_moves`).
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lamina_kvtier.errors import InvalidQuota, QuotaNotCoverable
from lamina_kvtier.identity import BlockId
from lamina_kvtier.lmcache_wire import LmcacheNames, LmcacheWire
from lamina_kvtier.operations import Ended
from lamina_kvtier.quota import Quota
from lamina_kvtier.redis_plane import PlaneConfig, RedisAddress
from lamina_kvtier.staged_moves import Move, Mover
from lamina_kvtier.staged_windows import GRACE_S, Window, Windows, places_of, settler_of
from lamina_kvtier.tier import BlockKey, Operation, Outcome, Tally, TierUsage

# LMCache reports its use to its makers unless told not to, when it is imported; and it logs each prefetch.
os.environ |= {"LMCACHE_TRACK_USAGE": "false", "DO_NOT_TRACK": "1"}
os.environ.setdefault("LMCACHE_LOG_LEVEL", "WARNING")

try:
    import torch
    from lmcache.lmcache_native import Bitmap
    from lmcache.v1.distributed.api import GroupedObjectKeys, MemoryLayoutDesc, ObjectKey, PrefetchTaskSpec
    from lmcache.v1.distributed.config import (
        EvictionConfig,
        L1ManagerConfig,
        L1MemoryManagerConfig,
        StorageManagerConfig,
    )
    from lmcache.v1.distributed.internal_api import L2StoreResult
    from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
    from lmcache.v1.distributed.l2_adapters.config import (
        L2AdapterConfigBase,
        L2AdaptersConfig,
        register_l2_adapter_type,
    )
    from lmcache.v1.distributed.l2_adapters.factory import register_l2_adapter_factory
    from lmcache.v1.distributed.storage_manager import StorageManager
    from lmcache.v1.platform import create_event_notifier
except ImportError as error:
    raise ImportError(f"LMCache 0.5.6 cannot be imported ({error}): pip install 'lamina[lmcache]'") from error

__all__ = ["LmcacheTier", "LmcacheTierConfig"]

_log = logging.getLogger(__name__)

_ALIGN = 4096  # bytes; LMCache rounds each object in the slab up to that
_SHARES = 4  # of the slab: one window being loaded, one being stored, one leaving, and one that is late
_UNLIMITED = 2**62  # bytes: what a quota has as its limit that has none
_PAUSE_S = 0.001  # until the slab has let go of what just left it
# LMCache's object groups. In the slab a block has one name for each direction: a load must not find there what a put is
# still taking to the server, for it may never arrive, nor a put what a load has brought, for LMCache would drop it.
_DOWN, _UP = 0, 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LmcacheTierConfig:
    """Raises ValueError. Seconds; each is the longest that an operation of its kind takes, whatever happens."""

    ttl_s: float | None = None  # a block expires so long after its last use; None: only eviction removes it
    lookup_s: float = 0.25
    load_s: float = 2.0
    put_s: float = 5.0
    delete_s: float = 2.0
    slab_bytes: int = 64 << 20  # LMCache's memory in this process; at least four blocks
    plane: PlaneConfig = field(default_factory=PlaneConfig)

    def __post_init__(self) -> None:
        for name in ("lookup_s", "load_s", "put_s", "delete_s", "ttl_s", "slab_bytes"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name} must be more than 0, not {value}")


class LmcacheTier:
    """A StoreTier. Holds threads, sockets and the slab until `close`, which takes LMCache up to three seconds."""

    def __init__(
        self,
        address: RedisAddress,
        names: LmcacheNames,
        block_bytes: int,
        config: LmcacheTierConfig | None = None,
        *,
        name: str = "lmcache",
    ) -> None:
        """Raises InvalidAddress if the address asks for TLS files that cannot be read."""
        self._config = config = config or LmcacheTierConfig()
        self._name, self._names, self._block_bytes = name, names, block_bytes
        self._wire = LmcacheWire(address, names, block_bytes, ttl_s=config.ttl_s, plane=config.plane, name=name)
        self._windows = Windows()
        room = -(-block_bytes // _ALIGN) * _ALIGN
        window = max(1, config.slab_bytes // _SHARES // room)
        self._manager = _manager(_SHARES * window * room, _AdapterConfig(self._wire, self._windows))
        self._layout = MemoryLayoutDesc([torch.Size([block_bytes])], [torch.uint8])
        self._late: list[tuple[Any, list[ObjectKey]]] = []  # prefetches that nobody waits for; the load mover's own
        self._lock = threading.Lock()  # guards what follows
        self._puts: Counter[Outcome] = Counter()
        self._loads: Counter[Outcome] = Counter()
        self._closed = False
        self._put_mover = Mover(f"lamina-{name}-put", window, self._put_window)
        self._load_mover = Mover(f"lamina-{name}-load", window, self._load_window)

    @property
    def name(self) -> str:
        return self._name

    @property
    def trouble(self) -> str:
        """The last thing that went wrong, for people; "" if nothing did."""
        return self._wire.trouble

    def put(self, keys: Sequence[BlockKey], values: Sequence[memoryview]) -> Operation[tuple[Outcome, ...]]:
        """See StoreTier."""
        views = self._views(len(keys), values, writable=False)
        return self._submit(self._put_mover, [key.id for key in keys], views, self._config.put_s, self._puts)

    def load(
        self, ids: Sequence[BlockId], into: Sequence[memoryview], *, adapter: bytes | None = None
    ) -> Operation[tuple[Outcome, ...]]:
        """See StoreTier. Of what was read only the length is checked: LMCache's values have no checksum."""
        views = self._views(len(ids), into, writable=True)
        return self._submit(self._load_mover, ids, views, self._config.load_s, self._loads)

    def lookup(self, ids: Sequence[BlockId]) -> Operation[Tally]:
        """See StoreTier."""
        return self._wire.lookup(ids, self._config.lookup_s)

    def delete(self, ids: Sequence[BlockId]) -> Operation[Tally]:
        """See StoreTier."""
        return self._wire.delete(ids, self._config.delete_s)

    def set_quotas(self, quotas: Mapping[str, Quota], *, capacity: int | None = None) -> None:
        """Nobody's: LMCache's blocks do not say who pays for them. Raises QuotaNotCoverable, InvalidQuota."""
        reserved = sum(quota.reserved for quota in quotas.values())
        if reserved:
            raise QuotaNotCoverable(None, limit=0, need=reserved, have=0)
        if capacity is not None or any(quota.limit < _UNLIMITED for quota in quotas.values()):
            raise InvalidQuota("A store of LMCache's knows no namespaces, so it can hold nobody to a limit.")

    def forget(self, namespace: str) -> Operation[Tally]:
        """See StoreTier. REFUSED: nothing in LMCache's names tells a namespace."""
        return Ended(Tally(0, Outcome.REFUSED))

    def usage(self) -> TierUsage:
        """`bytes` and `limit` are the whole server's: that is what its eviction goes by."""
        used, limit = self._wire.memory(self._config.lookup_s)
        with self._lock:
            puts, loads = dict(self._puts), dict(self._loads)
        return TierUsage(bytes=used, limit=limit, coverable=0, keeps_quotas=False, puts=puts, loads=loads)

    def close(self) -> None:
        """See StoreTier. First ours, then LMCache's: its threads wait for what our adapter has under way."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        movers = self._put_mover, self._load_mover
        for mover in movers:
            mover.close()
        self._wire.close()
        stuck = [mover for mover in movers if not mover.join(self._config.put_s + 2 * GRACE_S)]
        if stuck:  # they hold nobody's memory, but LMCache may not be taken from under them
            _log.error("LMCache does not answer; %d threads are left to it", len(stuck))
            return
        self._manager.close()

    def _submit(
        self, mover: Mover, ids: Sequence[BlockId], views: list[memoryview], limit_s: float, counter: Counter[Outcome]
    ) -> Move:
        def conclude(outcomes: Sequence[Outcome]) -> None:
            with self._lock:
                counter.update(outcomes)

        move = Move(ids, views, time.monotonic() + limit_s, conclude)
        mover.submit(move)
        return move

    def _views(self, count: int, views: Sequence[memoryview], *, writable: bool) -> list[memoryview]:
        """The same memory as plain bytes. Raises ValueError."""
        if len(views) != count:
            raise ValueError(f"{count} blocks, but {len(views)} pieces of memory")
        size = self._block_bytes
        for view in views:
            if view.nbytes != size or not view.c_contiguous or (writable and view.readonly):
                raise ValueError(f"a block needs {size} contiguous{' writable' if writable else ''} bytes")
        return [view.cast("B") for view in views]

    def _key(self, block: BlockId, way: int) -> ObjectKey:
        """What it is called in the slab. On the wire its name is the wire's."""
        return ObjectKey(block, self._names.model, self._names.kv_rank, way, self._names.salt)

    # Down. On the put mover's thread.

    def _put_window(self, move: Move, blocks: range) -> None:
        places = places_of(move, blocks)
        with self._windows.storing.open(move.deadline, settler_of(move, places)) as window:
            waiting = list(places)
            while waiting and not move.done():
                staged = self._stage(move, waiting, places, window)
                waiting = [block for block in waiting if block not in staged]
                if not staged:  # the slab is full, or still has these very blocks, from the window before
                    time.sleep(_PAUSE_S)
            window.wait()

    def _stage(
        self, move: Move, wanted: Sequence[BlockId], places: Mapping[BlockId, Sequence[int]], window: Window
    ) -> set[BlockId]:
        """Copies as many of the blocks into the slab as it takes, and lets LMCache store them; which."""
        with move.hold() as values:
            if values is None:
                return set()
            reserved = self._manager.reserve_write([self._key(block, _DOWN) for block in wanted], self._layout)
            for key, place in reserved.items():
                _bytes_of(place)[:] = values[places[key.chunk_hash][0]]
        window.expect(key.chunk_hash for key in reserved)
        self._manager.finish_write(list(reserved))
        return {key.chunk_hash for key in reserved}

    # Up. On the load mover's thread.

    def _load_window(self, move: Move, blocks: range) -> None:
        places = places_of(move, blocks)
        settle = settler_of(move, places)
        with self._windows.loading.open(move.deadline, lambda block, outcome: None) as window:
            while places and not move.done():
                self._release_late()
                window.expect(places)
                keys = [self._key(block, _UP) for block in places]
                found = self._prefetch(keys, window)
                if found is None:
                    return
                taken = self._take(move, found, places)
                for block in list(places):
                    # Neither found nor refused: the slab had no room for it just now.
                    outcome = Outcome.OK if block in taken else window.outcomes.get(block, Outcome.OK)
                    if block in taken or outcome is not Outcome.OK:
                        settle(block, outcome)
                        del places[block]
                if places:
                    time.sleep(_PAUSE_S)

    def _prefetch(self, keys: list[ObjectKey], window: Window) -> list[ObjectKey] | None:
        """Which of them lie in the slab now, locked for us; None: LMCache did not answer before the deadline."""
        spec = PrefetchTaskSpec([GroupedObjectKeys(keys, _UP, self._layout)], fetching_policy="full")
        handle = self._manager.submit_prefetch_task(spec)
        if not self._manager.wait_prefetch_status(handle, max(0.0, window.deadline - time.monotonic())):
            window.remind()
            if not self._manager.wait_prefetch_status(handle, GRACE_S):
                self._late.append((handle, keys))
                return None
        return self._hits(handle, keys)

    def _hits(self, handle: Any, keys: Sequence[ObjectKey]) -> list[ObjectKey]:
        result = self._manager.query_prefetch_status(handle)
        return [] if result is None else [key for at, key in enumerate(keys) if result.hit_cells[0].test(at)]

    def _take(self, move: Move, found: list[ObjectKey], places: Mapping[BlockId, Sequence[int]]) -> frozenset[BlockId]:
        """Copies blocks out of the slab, and lets it go of them; which."""
        if not found:
            return frozenset()
        with self._manager.read_prefetched_results(found) as objects:
            if objects is None:  # it has let go of them itself
                return frozenset()
            with move.hold() as into:
                if into is not None:
                    for key, place in zip(found, objects, strict=True):
                        for at in places[key.chunk_hash]:
                            into[at][:] = _bytes_of(place)
        self._manager.finish_read_prefetched(found)
        return frozenset(key.chunk_hash for key in found)

    def _release_late(self) -> None:
        """Lets go of what was prefetched after its deadline."""
        still: list[tuple[Any, list[ObjectKey]]] = []
        for handle, keys in self._late:
            if not self._manager.wait_prefetch_status(handle, 0):
                still.append((handle, keys))
            elif found := self._hits(handle, keys):
                self._manager.finish_read_prefetched(found)
        self._late = still


class _AdapterConfig(L2AdapterConfigBase):
    """Made by a tier, for its own adapter."""

    def __init__(self, wire: LmcacheWire, windows: Windows) -> None:
        super().__init__()
        self.wire, self.windows = wire, windows

    @classmethod
    def from_dict(cls, d: dict[str, object]) -> _AdapterConfig:
        raise ValueError("the adapter 'lamina' is made by Lamina; a server reads the same blocks with 'resp'")

    @classmethod
    def help(cls) -> str:
        return "not for the command line"


class _Adapter(L2AdapterInterface):
    """LMCache's view of our wire. Called by its store and its prefetch thread."""

    def __init__(self, config: _AdapterConfig) -> None:
        super().__init__()
        self._wire, self._windows = config.wire, config.windows
        self._bells = {kind: create_event_notifier() for kind in ("store", "lookup", "load")}
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()  # guards what follows
        self._stored: dict[int, L2StoreResult] = {}
        self._found: dict[int, Bitmap] = {}
        self._loaded: dict[int, Bitmap] = {}

    def get_store_event_fd(self) -> int:
        return int(self._bells["store"].fileno())

    def get_lookup_and_lock_event_fd(self) -> int:
        return int(self._bells["lookup"].fileno())

    def get_load_event_fd(self) -> int:
        return int(self._bells["load"].fileno())

    def submit_store_task(self, keys: list[ObjectKey], objects: list[Any]) -> int:
        window, task = self._windows.storing.current, next(self._numbers)

        def conclude(outcomes: Sequence[Outcome]) -> None:
            for key, outcome in zip(keys, outcomes, strict=True):
                window.settle(key.chunk_hash, outcome)
            # "Done" in any case: then LMCache clears the slab. Whoever put the blocks knows better now.
            self._report(self._stored, task, L2StoreResult(True, self._wire.block_bytes * len(keys)), "store")

        window.carried_by(self._wire.store(_blocks(keys, objects), window.deadline, conclude))
        return task

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        with self._lock:
            done, self._stored = self._stored, {}
        return done

    def submit_lookup_and_lock_task(self, keys: list[ObjectKey], group_layout_descs: Mapping[int, Any]) -> int:
        """All there: to ask first would be one more round trip, and the answer old when the load comes."""
        task = next(self._numbers)
        self._report(self._found, task, Bitmap(len(keys), len(keys)), "lookup")
        return task

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        with self._lock:
            return self._found.pop(task_id, None)

    def submit_unlock(self, keys: list[ObjectKey]) -> None:
        """The server locks nothing."""

    def submit_load_task(self, keys: list[ObjectKey], objects: list[Any]) -> int:
        window, task = self._windows.loading.current, next(self._numbers)

        def conclude(outcomes: Sequence[Outcome]) -> None:
            came = Bitmap(len(keys))
            came.batched_set([at for at, outcome in enumerate(outcomes) if outcome is Outcome.OK])
            for key, outcome in zip(keys, outcomes, strict=True):
                window.settle(key.chunk_hash, outcome)
            self._report(self._loaded, task, came, "load")

        window.carried_by(self._wire.fetch(_blocks(keys, objects), window.deadline, conclude))
        return task

    def query_load_result(self, task_id: int) -> Bitmap | None:
        with self._lock:
            return self._loaded.pop(task_id, None)

    def report_status(self) -> dict[str, Any]:
        return {"is_healthy": True, "type": "lamina", "trouble": self._wire.trouble}

    def close(self) -> None:
        self._wire.close()
        for bell in self._bells.values():
            bell.close()

    def _report(self, results: dict[int, Any], task: int, result: Any, kind: str) -> None:
        with self._lock:
            results[task] = result
        self._bells[kind].notify()


def _manager(slab_bytes: int, adapter: _AdapterConfig) -> StorageManager:
    memory = L1MemoryManagerConfig(size_in_bytes=slab_bytes, use_lazy=False, shm_name="", align_bytes=_ALIGN)
    return StorageManager(
        StorageManagerConfig(
            L1ManagerConfig(memory),
            EvictionConfig("LRU"),  # for what nobody fetched; a salt without a quota would be evicted by IsolatedLRU
            L2AdaptersConfig([adapter]),
            store_policy="skip_l1",  # the slab lets go of what was stored
        )
    )


def _blocks(keys: Sequence[ObjectKey], objects: Sequence[Any]) -> list[tuple[BlockId, memoryview]]:
    return [(key.chunk_hash, _bytes_of(place)) for key, place in zip(keys, objects, strict=True)]


def _bytes_of(place: Any) -> memoryview:
    """An object's memory in the slab."""
    return memoryview(place.byte_array).cast("B")


register_l2_adapter_type("lamina", _AdapterConfig)
register_l2_adapter_factory("lamina", lambda config, l1: _Adapter(config))
