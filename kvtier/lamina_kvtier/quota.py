"""What each namespace is promised of one tier, and what it may take beyond that.

    0          pin_limit        reserved                    limit                capacity
    ├──────────────┼────────────────┼─────────────────────────┼─────────────────────┤
    │ may be       │ never taken    │ taken while others      │ never had           │
    │ pinned       │ by others      │ leave it (by weight)    │                     │

Units are blocks or bytes; a book and its ledger agree on one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from lamina_kvtier.errors import InvalidQuota, PolicyNotLoaded, QuotaNotCoverable

__all__ = ["Quota", "QuotaBook"]

Watcher = Callable[[str | None], None]


@dataclass(frozen=True, slots=True)
class Quota:
    """A namespace's rights in one tier: `0 <= pin_limit <= reserved <= limit`, and a positive `weight`.

    `reserved` units are there whenever it wants them, `limit` is the most that it may have, `pin_limit` the most
    that it may pin (out of its reservation), and `weight` its share of what nobody reserved. Raises InvalidQuota.
    """

    reserved: int
    limit: int
    pin_limit: int = 0
    weight: float = 1.0

    def __post_init__(self) -> None:
        for name in ("reserved", "limit", "pin_limit"):
            if type(getattr(self, name)) is not int:
                raise InvalidQuota(f"Quota.{name} must be a whole number, not {getattr(self, name)!r}.")
        if not 0 <= self.pin_limit <= self.reserved <= self.limit:
            raise InvalidQuota(
                "A quota needs 0 <= pin_limit <= reserved <= limit, "
                f"not {self.pin_limit}, {self.reserved} and {self.limit}."
            )
        if isinstance(self.weight, bool) or not isinstance(self.weight, int | float):
            raise InvalidQuota(f"Quota.weight must be a number, not {self.weight!r}.")
        if not math.isfinite(self.weight) or self.weight <= 0:
            raise InvalidQuota(f"Quota.weight must be positive and finite, not {self.weight}.")

    def in_units(self, size: int) -> Quota:
        """The same rights, counted in units of `size`: what is reserved rounds up, the limits round down.

        So nobody gets less than was promised nor more than is allowed; a limit that ends within a unit cuts what is
        reserved with it.
        """
        limit = self.limit // size
        return Quota(min(-(-self.reserved // size), limit), limit, self.pin_limit // size, self.weight)


class QuotaBook:
    """The quotas of one tier. All reservations together never exceed `capacity - headroom`.

    A policy that breaks this is refused and nothing changes; no promise is ever scaled down to make room for
    another. A namespace without a quota has the default one: nothing reserved, the whole tier as its limit.

    Until `load` nothing is known: every namespace has the default, and whoever evicts must not do it because of
    a quota (`loaded` says so). A restart would otherwise cost tenants what they had been promised.
    """

    def __init__(self, capacity: int, headroom: int = 0) -> None:
        """`headroom` units are never promised, so that decoding finds room. Raises InvalidQuota."""
        if not 0 <= headroom <= capacity:
            raise InvalidQuota(f"headroom must be 0 ... {capacity} (the capacity), not {headroom}.")
        self.capacity, self.headroom = capacity, headroom
        self.default = Quota(reserved=0, limit=capacity)
        self.loaded = False
        self._quotas: dict[str, Quota] = {}
        self._reserved = 0
        self._watchers: list[Watcher] = []

    @property
    def coverable(self) -> int:
        """What can be promised to all namespaces together."""
        return self.capacity - self.headroom

    @property
    def reserved(self) -> int:
        """What is promised to all namespaces together."""
        return self._reserved

    def of(self, namespace: str) -> Quota:
        return self._quotas.get(namespace, self.default)

    def has(self, namespace: str) -> bool:
        """Whether a quota was set for it."""
        return namespace in self._quotas

    def policies(self) -> dict[str, Quota]:
        """A copy of all quotas that were set."""
        return dict(self._quotas)

    def ceiling(self, namespace: str) -> int:
        """The largest request that can always run some day: what neither others' reservations nor own pins can take.

        At least `reserved - pin_limit`. It does not depend on what is used or pinned now, only on policy.
        """
        quota = self.of(namespace)
        left = self.coverable - (self._reserved - quota.reserved)
        return max(0, min(quota.limit, left) - quota.pin_limit)

    def require_coverable(self, policies: Mapping[str, Quota]) -> None:
        """Raises QuotaNotCoverable if `load` would."""
        reserved = sum(quota.reserved for quota in policies.values())
        if reserved > self.coverable:
            raise QuotaNotCoverable(None, limit=self.coverable, need=reserved, have=self.coverable)

    def load(self, policies: Mapping[str, Quota]) -> None:
        """Replaces all quotas at once, or none. Raises QuotaNotCoverable."""
        self.require_coverable(policies)
        self._quotas, self.loaded = dict(policies), True
        self._reserved = sum(quota.reserved for quota in policies.values())
        self._tell(None)

    def set(self, namespace: str, quota: Quota) -> None:
        """Sets or changes one quota. Raises QuotaNotCoverable, PolicyNotLoaded."""
        if not self.loaded:
            raise PolicyNotLoaded
        others = self._reserved - self.of(namespace).reserved
        if others + quota.reserved > self.coverable:
            raise QuotaNotCoverable(namespace, limit=self.coverable, need=quota.reserved, have=self.coverable - others)
        self._quotas[namespace], self._reserved = quota, others + quota.reserved
        self._tell(namespace)

    def remove(self, namespace: str) -> None:
        """Back to the default; nothing happens if it has it already. Raises PolicyNotLoaded."""
        if not self.loaded:
            raise PolicyNotLoaded
        quota = self._quotas.pop(namespace, None)
        if quota is not None:
            self._reserved -= quota.reserved
            self._tell(namespace)

    def watch(self, watcher: Watcher) -> None:
        """From now on `watcher(namespace)` is called after each change; `watcher(None)`: all may have changed."""
        self._watchers.append(watcher)

    def _tell(self, namespace: str | None) -> None:
        for watcher in self._watchers:
            watcher(namespace)
