"""What is deleted leaves no blocks behind: those of a tenant, or those that an adapter computed, in every tier.

    erase ──▶ dropped everywhere, at once ──▶ once more, when its last request has ended, so that no transfer begins
              any more ──▶ and once more, when those under way have ended and nothing can bring any back ──▶ done

Active blocks lose their identity at once, so nobody finds them any more, and are free when their requests end. The
store drops what a tenant pays for; what a deleted adapter computed ages out there.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from lamina.engine.tier_quotas import TiersBelow
from lamina_kvtier.manager import KvManager
from lamina_kvtier.tier import BlockKey, adapter_bytes

__all__ = ["Erasure"]


@dataclass(frozen=True, slots=True)
class _Deleted:
    """One of the two."""

    namespace: str | None = None
    adapter: bytes | None = None

    def covers(self, key: BlockKey) -> bool:
        return key.namespace == self.namespace if self.adapter is None else key.adapter == self.adapter


class Erasure:
    """Of one engine. Owned by its thread."""

    def __init__(self, kv: KvManager, below: TiersBelow) -> None:
        self._kv, self._below = kv, below
        self._pending: dict[_Deleted, bool] = {}  # whether it was dropped since its last request ended

    @property
    def is_pending(self) -> bool:
        """Whether blocks of something deleted may still appear."""
        return bool(self._pending)

    def erase_namespace(self, namespace: str) -> None:
        """All that it pays for. O(blocks of all tiers here)."""
        self._begin(_Deleted(namespace=namespace))

    def erase_adapter(self, digest: str) -> None:
        """All that it computed, for whomever; `digest` in hex. O(blocks of all tiers here)."""
        self._begin(_Deleted(adapter=adapter_bytes(digest)))

    def go_on(self, namespaces: Collection[str], adapters: Collection[bytes]) -> None:
        """Finishes what no request needs any more; those that are under way use these namespaces and adapters."""
        for deleted, dropped in list(self._pending.items()):
            used = deleted.namespace in namespaces if deleted.adapter is None else deleted.adapter in adapters
            moves = used or self._below.moves(deleted.covers)
            if not moves or not (used or dropped):
                self._drop(deleted)
            if moves:
                self._pending[deleted] = not used
            else:
                del self._pending[deleted]

    def _begin(self, deleted: _Deleted) -> None:
        self._drop(deleted)
        self._pending[deleted] = False

    def _drop(self, deleted: _Deleted) -> None:
        self._kv.forget_where(owner=deleted.namespace, adapter=deleted.adapter)
        self._below.forget_where(deleted.covers)
        if deleted.namespace is not None:
            self._below.forget_in_store(deleted.namespace)
