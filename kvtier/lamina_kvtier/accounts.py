"""What a ledger writes down: each namespace's charges, and what its admitted requests may still take."""

from __future__ import annotations

from lamina_kvtier.quota import Quota

__all__ = ["Account", "Charge", "out_of_reach"]


class Account:
    """One namespace's charges. Read it, never change it.

    `committed` units are used, `idle` of them by nobody, `pending` ones are promised to admitted requests, and
    `ahead` are what requests within the reservation may come to use later.
    """

    __slots__ = ("ahead", "committed", "held", "idle", "namespace", "pending", "promised", "quota")

    def __init__(self, namespace: str, quota: Quota) -> None:
        self.namespace, self.quota = namespace, quota
        self.committed = self.idle = self.pending = self.ahead = 0
        self.held = self.promised = 0  # out of the others' reach: now, and once all pending is committed

    @property
    def firm(self) -> int:
        """Units in use or pinned: not even the namespace itself could reclaim them."""
        return self.committed - self.idle

    @property
    def spoken_for(self) -> int:
        """Units of the reservation that cannot be granted to another request."""
        return self.firm + self.pending + self.ahead

    @property
    def over_share(self) -> float:
        """How far beyond its reservation, in units per weight; negative within."""
        return (self.committed - self.quota.reserved) / self.quota.weight

    @property
    def reclaimable(self) -> int:
        """Units that others may take: idle, and beyond the reservation."""
        return self.committed - self.held


class Charge:
    """Units that an admitted request may still take. Settle it: `commit` what was taken, `refund` the rest.

    `pending` ones are out of the others' reach. An *assured* charge is of a request whose worst case is within its
    namespace's reservation; `ahead` are those of its units that others may use until it wants them.
    """

    __slots__ = ("ahead", "assured", "namespace", "pending")

    def __init__(self, namespace: str, pending: int, *, ahead: int = 0, assured: bool = False) -> None:
        self.namespace, self.pending, self.ahead, self.assured = namespace, pending, ahead, assured


def out_of_reach(account: Account) -> tuple[int, int]:
    """`held` and `promised`: what others cannot have, now and once all pending units are committed."""
    within = min(account.committed, account.quota.reserved)
    return max(account.firm, within), max(account.firm + account.pending, within)
