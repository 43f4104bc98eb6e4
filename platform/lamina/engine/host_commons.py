"""Host memory as the tenants share it: whose slots are whose, and what pins with floor `host` keep there. No tensors.

Quotas of host memory are wanted in bytes and kept in slots, one block each: what is reserved rounds up, limits and pin
limits round down. An eighth of the slots is never promised, so that what is under way finds some.
"""

from __future__ import annotations

from collections.abc import Callable

from lamina.types import TierQuota, TierSize
from lamina_kvtier.errors import IntegrityError
from lamina_kvtier.host_pins import HostPins
from lamina_kvtier.host_tier import HostTier
from lamina_kvtier.ledger import Ledger
from lamina_kvtier.manager import KvManager
from lamina_kvtier.pins import PinTier
from lamina_kvtier.quota import Quota, QuotaBook
from lamina_kvtier.quota_policy import QuotaPolicy
from lamina_kvtier.reclaim import ReclaimOrder

__all__ = ["HostCommons"]

_HEADROOM_PART = 8


class HostCommons:
    """A host tier under quotas. `tier` is the slots, `book` what is promised of them, `pins` what is kept in them."""

    def __init__(self, kv: KvManager, tier: HostTier, ledger: Ledger) -> None:
        """`ledger`: of the tier's slots, by the tier's own policy. See `of_slots`."""
        self.tier, self.ledger, self.book = tier, ledger, ledger.book
        self.pins = HostPins(kv, tier)

    @classmethod
    def of_slots(
        cls, kv: KvManager, num_slots: int, block_bytes: int, *, seal: Callable[[int], int] | None = None
    ) -> HostCommons:
        """A tier of so many slots below `kv`. `seal`: see HostTier. Raises BlockMisuse."""
        ledger = Ledger(QuotaBook(num_slots, headroom=num_slots // _HEADROOM_PART))
        policy = QuotaPolicy(ReclaimOrder(num_slots, ledger))
        return cls(kv, HostTier(num_slots, block_bytes, policy=policy, seal=seal), ledger)

    @property
    def pin_tier(self) -> PinTier:
        """For a book of pins; a slot is a block."""
        return PinTier(self.book, self.pins)

    @property
    def size(self) -> TierSize:
        return TierSize(
            capacity=self.book.capacity * self.tier.block_bytes, coverable=self.book.coverable * self.tier.block_bytes
        )

    def quota(self, wanted: TierQuota, weight: float) -> Quota:
        """Bytes to slots. Raises InvalidQuota."""
        unit = self.tier.block_bytes
        whole = max(self.book.capacity, -(-wanted.reserved // unit)) * unit  # more than there is, is not coverable
        limit = whole if wanted.limit is None else wanted.limit
        return Quota(wanted.reserved, limit, wanted.pin_limit, weight).in_units(unit)

    def check_integrity(self) -> None:
        """Raises IntegrityError unless slots, charges and guards agree."""
        self.tier.check_integrity()
        self.ledger.check_integrity({name: self.tier.slots_of(name) for name in self.ledger.accounts})
        evictable = self.tier.evictable_slots_of
        strays = [name for name, account in self.ledger.accounts.items() if account.idle != evictable(name)]
        if strays:
            raise IntegrityError([f"host memory: {name!r} is charged for other idle slots" for name in strays])
        self.pins.check_integrity()
