"""Pins with floor `host`: the block may leave the device, but only once it is in host memory, and never that.

computed ──▶ on the device, guarded ──saved──▶ in host memory, never evicted; the device may lose its copy
                      ▲                                    │
                      └───────────── forgotten ────────────┘
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lamina_kvtier.errors import IntegrityError
from lamina_kvtier.host_tier import HostTier
from lamina_kvtier.identity import BlockId
from lamina_kvtier.manager import KvManager
from lamina_kvtier.tier import BlockKey

__all__ = ["HostPins"]


class HostPins:
    """A PinTarget over host memory, and the device pool above it.

    A pinned identity that host memory does not store is guarded on the device, whether it has a block there yet or not:
    so a block that is computed later is kept from the moment of its publication. Whoever copies blocks asks `due` which
    of them have to be saved, and the guard ends when one is. It ends soon, because pins come out of a reservation of
    host memory: there is always room for them, once what is under way has ended.

    As in every tier, only what the pin's namespace pays for is kept.
    """

    def __init__(self, kv: KvManager, host: HostTier) -> None:
        """Watches both; each has one watcher."""
        self._kv, self._host = kv, host
        self._guarded: dict[BlockId, str] = {}  # by whom: pinned, and not stored in host memory
        self._due: dict[BlockId, None] = {}  # of those, the ones that may have a block on the device, oldest first
        kv.watch_kept(self._appeared)
        host.watch_pinned(self)

    def pin(self, ids: Iterable[BlockId], namespace: str) -> None:
        """See PinTarget."""
        ids = list(ids)
        fresh = [identity for identity in ids if not self._host.is_leased(identity, namespace)]
        self._host.pin(ids, namespace)
        for identity in fresh:
            if not self._host.stores(identity):
                self._guard(identity, namespace)

    def unpin(self, ids: Sequence[BlockId], namespace: str) -> None:
        """See PinTarget."""
        self._host.unpin(ids, namespace)
        for identity in reversed(ids):
            if not self._host.is_leased(identity, namespace):
                self._unguard(identity)

    def due(self, limit: int) -> list[tuple[int, BlockKey]]:
        """Up to `limit` blocks on the device that have to be saved, in the order in which they came. O(those and
        what is being saved)."""
        found: list[tuple[int, BlockKey]] = []
        for identity in list(self._due):
            if len(found) >= limit:
                break
            block = self._kv.find(identity)
            if block is None or not self._is_mine(block, identity):
                del self._due[identity]  # forgotten; if it is computed again it comes back
            elif not self._host.knows(identity):
                found.append((block, BlockKey(identity, self._guarded[identity], self._kv.adapter_of(block))))
        return found

    def resident(self, ids: Iterable[BlockId]) -> int:
        """Length of the longest prefix of `ids` of which every block is on the device or in host memory."""
        length = 0
        for identity in ids:
            if self._kv.find(identity) is None and not self._host.knows(identity):
                break
            length += 1
        return length

    def check_integrity(self) -> None:
        """Proves that exactly what is pinned and not stored is guarded. Raises IntegrityError. O(pinned blocks)."""
        missing = {identity: name for name, identity in self._host.leases() if not self._host.stores(identity)}
        found: list[str] = []
        if missing != self._guarded:
            found.append(f"host pins: {len(self._guarded)} blocks are guarded, but {len(missing)} have to be saved")
        for identity in self._guarded:
            block = self._kv.find(identity)
            if block is None or not self._is_mine(block, identity):
                continue
            if identity not in self._due or not self._kv.is_pinned(block):
                found.append(f"host pins: block {block} is pinned, but neither kept nor to be saved")
        if found:
            raise IntegrityError(found)

    # --- what the tiers tell ------------------------------------------------------------------------------

    def arrived(self, key: BlockKey) -> None:
        """See PinWatcher."""
        self._unguard(key.id)

    def lost(self, key: BlockKey) -> None:
        """See PinWatcher."""
        self._guard(key.id, key.namespace)

    def _appeared(self, identity: BlockId) -> None:
        if identity in self._guarded:
            self._due[identity] = None

    # --- guards -------------------------------------------------------------------------------------------

    def _is_mine(self, block: int, identity: BlockId) -> bool:
        return self._kv.owner_of(block) in (None, self._guarded[identity])

    def _guard(self, identity: BlockId, namespace: str) -> None:
        self._guarded[identity] = namespace
        self._kv.guard(identity, namespace)
        if self._kv.find(identity) is not None:
            self._due[identity] = None

    def _unguard(self, identity: BlockId) -> None:
        namespace = self._guarded.pop(identity, None)
        if namespace is not None:
            self._due.pop(identity, None)
            self._kv.unguard(identity, namespace)
