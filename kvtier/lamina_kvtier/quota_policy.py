"""The host tier under quotas: its slots are units of a ledger, and the ledger's order says whose block goes."""

from __future__ import annotations

from collections.abc import Mapping

from lamina_kvtier.reclaim import ReclaimOrder
from lamina_kvtier.victims import VictimsView

__all__ = ["QuotaPolicy"]


class QuotaPolicy:
    """A ReclaimPolicy over a ReclaimOrder of as many blocks as the tier has slots, in a ledger of its own.

    Until quotas are loaded nobody loses a block because of one: then the least recently used block goes. Within a
    namespace it is the tier that knows which block is the oldest.
    """

    def __init__(self, order: ReclaimOrder) -> None:
        self._order = order

    def may_grow(self, namespace: str, used: Mapping[str, int]) -> bool:
        """See ReclaimPolicy."""
        return not (self._order.rules_apply and self._order.ledger.is_at_limit(namespace))

    def victim(self, requester: str, used: Mapping[str, int], victims: VictimsView) -> str | None:
        """See ReclaimPolicy. O(log namespaces), amortised."""
        if not self._order.rules_apply:
            return victims.oldest_namespace()
        found = self._order.victim(requester)
        return None if found is None else self._order.owner_of(found[0])

    def promises(self, namespace: str) -> bool:
        """See ReclaimPolicy."""
        return self._order.ledger.book.has(namespace)

    def took(self, slot: int, namespace: str) -> None:
        """See ReclaimPolicy."""
        self._order.take(slot, namespace, None)

    def rested(self, slot: int) -> None:
        """See ReclaimPolicy."""
        self._order.rest(slot)

    def woke(self, slot: int) -> None:
        """See ReclaimPolicy."""
        self._order.wake(slot)

    def freed(self, slot: int) -> None:
        """See ReclaimPolicy."""
        self._order.free(slot, idle=False)
