"""Pins: leases that namespaces take on prefixes, out of what is reserved for them.

    pin ──▶ granted | clipped(n) | denied(reason)
             │
             ├─ hit:                    expires = min(now + ttl, created + hard maximum)
             ├─ its pin limit shrinks:  the newest pins lose their tails first
             └─ unpin, or expired:      its blocks are ordinary cached blocks again

A pin is on identities, not on blocks: a block that gets one of them later is pinned then, so that a pin outlives
eviction below its floor, a restart, and blocks that are still to be computed.
"""

from __future__ import annotations

import heapq
import math
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from lamina_kvtier.errors import IntegrityError, UnknownPin
from lamina_kvtier.identity import BlockId
from lamina_kvtier.pin_types import Denial, Floor, Granting, Pin, PinCount, PinGrant
from lamina_kvtier.quota import QuotaBook

__all__ = ["PinBook", "PinTarget", "PinTier"]

_POLICY_RETRY_S = 1.0


class PinTarget(Protocol):
    """What keeps pinned identities from being evicted: `KvManager` for the device, something alike for host memory."""

    def pin(self, ids: Iterable[BlockId], namespace: str) -> None:
        """One more lease on each identity."""
        ...

    def unpin(self, ids: Sequence[BlockId], namespace: str) -> None:
        """One lease less on each identity."""
        ...


@dataclass(frozen=True, slots=True)
class PinTier:
    """A tier in which blocks can be pinned: its quotas, what one block costs of them, and who keeps the blocks."""

    book: QuotaBook
    target: PinTarget
    units_per_block: int = 1


@dataclass(slots=True)
class _Holding:
    """A namespace's pins in one tier. Pins that share blocks pay for them once."""

    leases: Counter[BlockId] = field(default_factory=Counter)
    pins: dict[str, Pin] = field(default_factory=dict)  # oldest first


class PinBook:
    """All pins of all namespaces. Each namespace's pinned blocks never cost more than its pin limit of the tier.

    A pin limit is at most the reservation, and admission never counts on reserved units of others nor on what its
    own namespace may pin (`QuotaBook.ceiling`): so no sequence of pins can make an admissible request impossible.

    A pin is prefix-closed: it always covers ids[0:n]. Expired pins end whenever any method is called, and by
    `expire()`. Times are seconds of a wall clock, since pins outlive the process. Not thread-safe.
    """

    def __init__(self, tiers: Mapping[Floor, PinTier], *, clock: Callable[[], float] = time.time) -> None:
        self._tiers = dict(tiers)
        self._clock = clock
        self._pins: dict[str, Pin] = {}
        self._holdings: dict[tuple[Floor, str], _Holding] = {}
        self._tails: dict[tuple[str, BlockId], list[str]] = {}  # by namespace and last identity
        self._due: list[tuple[float, str]] = []  # no later than the pin's expiry; looked at again when it comes
        for floor, tier in self._tiers.items():
            tier.book.watch(partial(self._policy_changed, floor))

    # --- a pin's life -------------------------------------------------------------------------------------

    def pin(self, namespace: str, ids: Sequence[BlockId], *, floor: Floor, ttl_s: float, hard_max_s: float) -> PinGrant:
        """Leases the prefix `ids`, or as much of its head as the namespace's pin limit allows.

        Raises ValueError for times that are not 0 < ttl_s <= hard_max_s < infinity, and for repeated identities.
        """
        _require_times(ttl_s, hard_max_s)
        if len(set(ids)) != len(ids):
            raise ValueError("The identities of a prefix are all different.")
        self.expire()
        tier = self._tiers.get(floor)
        if tier is None:
            return _no_such_tier(len(ids))
        if not ids:
            return self._denied(namespace, ids, floor, Denial.NO_FULL_BLOCK)
        if not tier.book.loaded:
            return self._denied(namespace, ids, floor, Denial.POLICY_NOT_LOADED)
        length = self._affordable(namespace, ids, floor)
        if length == 0:
            return self._denied(namespace, ids, floor, Denial.PIN_LIMIT)
        return self._granted(namespace, ids, floor, length, ttl_s=ttl_s, hard_max_s=hard_max_s)

    def _granted(
        self, namespace: str, ids: Sequence[BlockId], floor: Floor, length: int, *, ttl_s: float, hard_max_s: float
    ) -> PinGrant:
        now = self._clock()
        pin = Pin(
            pin_id=f"pin_{secrets.token_hex(12)}",
            namespace=namespace,
            floor=floor,
            ids=tuple(ids[:length]),
            ttl_s=ttl_s,
            hard_max_s=hard_max_s,
            created_at=now,
            expires_at=now + ttl_s,
            clipped_blocks=len(ids) - length,
        )
        before, need = self.count(namespace, floor), self._cost(namespace, ids, floor)
        retry = None if length == len(ids) else self._next_expiry_s(namespace, floor)
        self._insert(pin)
        return PinGrant(
            granting=Granting.GRANTED if length == len(ids) else Granting.CLIPPED,
            reason=None if length == len(ids) else Denial.PIN_LIMIT,
            pin=pin,
            blocks=length,
            limit=before.limit,
            need=need,
            have=before.limit - before.units,
            retry_after_s=retry,
        )

    def renew(self, namespace: str, pin_id: str, *, ttl_s: float) -> Pin:
        """Gives a pin another time to live, from now, up to its hard maximum. Raises UnknownPin, ValueError."""
        self.expire()
        pin = self._find(namespace, pin_id)
        ttl_s = min(ttl_s, pin.hard_max_s)
        _require_times(ttl_s, pin.hard_max_s)
        return self._replace(pin, pin.renewed(ttl_s, self._clock()))

    def unpin(self, namespace: str, pin_id: str) -> Pin:
        """Ends a pin. Raises UnknownPin."""
        self.expire()
        pin = self._find(namespace, pin_id)
        self._remove(pin)
        return pin

    def hit(self, namespace: str, ids: Iterable[BlockId]) -> list[Pin]:
        """A request used the prefix `ids`: refreshes the pins that lie wholly within it, and returns them.

        O(1) per identity.
        """
        self.expire()
        now = self._clock()
        return [
            self._replace(pin, pin.used(now))
            for identity in ids
            for pin in [self._pins[pin_id] for pin_id in self._tails.get((namespace, identity), ())]
        ]

    def expire(self) -> list[Pin]:
        """Ends the pins whose time has come, and returns them. O(log pins) each."""
        now = self._clock()
        ended: list[Pin] = []
        while self._due and self._due[0][0] <= now:
            _, pin_id = heapq.heappop(self._due)
            pin = self._pins.get(pin_id)
            if pin is None:
                continue
            if pin.expires_at <= now:
                self._remove(pin)
                ended.append(pin)
            else:
                heapq.heappush(self._due, (pin.expires_at, pin_id))
        return ended

    # --- what there is ------------------------------------------------------------------------------------

    def get(self, namespace: str, pin_id: str) -> Pin:
        """Raises UnknownPin; another namespace's pin is as unknown as none."""
        self.expire()
        return self._find(namespace, pin_id)

    def listing(self, namespace: str | None = None) -> list[Pin]:
        """A namespace's pins, or everybody's (None), oldest first; of one moment, in the order they were granted."""
        self.expire()
        pins = (pin for pin in self._pins.values() if namespace in (None, pin.namespace))
        return sorted(pins, key=lambda pin: pin.created_at)

    def count(self, namespace: str, floor: Floor) -> PinCount:
        """What a namespace has pinned in a tier, in distinct blocks and in the tier's units, and its limit in units."""
        tier = self._tiers[floor]
        holding = self._holdings.get((floor, namespace), _Holding())
        blocks = len(holding.leases)
        return PinCount(
            pins=len(holding.pins),
            blocks=blocks,
            units=blocks * tier.units_per_block,
            limit=tier.book.of(namespace).pin_limit,
        )

    def counts(self) -> dict[tuple[str, Floor], PinCount]:
        """The counts of all namespaces that have pins."""
        self.expire()
        return {(name, floor): self.count(name, floor) for floor, name in self._holdings}

    # --- a durable store ----------------------------------------------------------------------------------

    def to_records(self) -> list[dict[str, Any]]:
        """All pins as values that JSON can hold, oldest first."""
        return [pin.to_record() for pin in self.listing()]

    def restore(self, records: Iterable[Mapping[str, Any]]) -> list[Pin]:
        """Takes pins back after a restart and returns those that are alive; known ids and expired ones are skipped.

        May be called before policy is loaded. What a policy, loaded before or later, does not allow is clipped.
        Raises ValueError for a record that is none, before any is taken.
        """
        pins = sorted(map(Pin.from_record, records), key=lambda pin: pin.created_at)
        now = self._clock()
        fresh = {pin.pin_id: pin for pin in pins if pin.expires_at > now and pin.floor in self._tiers}
        for pin in fresh.values():
            if pin.pin_id not in self._pins:
                self._insert(pin)
        for floor in self._tiers:
            self._policy_changed(floor, None)
        return [self._pins[pin_id] for pin_id in fresh if pin_id in self._pins]

    # --- proof --------------------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Proves that leases are those of the pins and within the limits. Raises IntegrityError. O(pinned blocks)."""
        found: list[str] = []
        leases: dict[tuple[Floor, str], Counter[BlockId]] = {}
        for pin in self._pins.values():
            leases.setdefault((pin.floor, pin.namespace), Counter()).update(pin.ids)
            if not pin.ids or pin.pin_id not in self._tails.get((pin.namespace, pin.ids[-1]), ()):
                found.append(f"pin {pin.pin_id}: not found by its last identity")
            if pin.expires_at > pin.created_at + pin.hard_max_s:
                found.append(f"pin {pin.pin_id}: lives beyond its hard maximum")
        if sum(map(len, self._tails.values())) != len(self._pins):
            found.append("pins: the number of tails is not the number of pins")
        if {key: holding.leases for key, holding in self._holdings.items()} != leases:
            found.append("pins: the leases are not those of the pins")
        for floor, name in self._holdings:
            count = self.count(name, floor)
            if self._tiers[floor].book.loaded and count.units > count.limit:
                found.append(f"pins: {name!r} has {count.units} of {count.limit} pinned in {floor}")
        if found:
            raise IntegrityError(found)

    # --- how --------------------------------------------------------------------------------------------

    def _affordable(self, namespace: str, ids: Sequence[BlockId], floor: Floor) -> int:
        """How many blocks of the head the pin limit allows; those that are pinned already cost nothing."""
        tier = self._tiers[floor]
        holding = self._holdings.get((floor, namespace), _Holding())
        left = tier.book.of(namespace).pin_limit // tier.units_per_block - len(holding.leases)
        for length, identity in enumerate(ids):
            left -= identity not in holding.leases
            if left < 0:
                return length
        return len(ids)

    def _cost(self, namespace: str, ids: Sequence[BlockId], floor: Floor) -> int:
        """Units of the blocks that are not pinned already."""
        leases = self._holdings.get((floor, namespace), _Holding()).leases
        return sum(identity not in leases for identity in ids) * self._tiers[floor].units_per_block

    def _denied(self, namespace: str, ids: Sequence[BlockId], floor: Floor, reason: Denial) -> PinGrant:
        count = self.count(namespace, floor)
        retry = None
        if reason is Denial.POLICY_NOT_LOADED:
            retry = _POLICY_RETRY_S
        elif reason is Denial.PIN_LIMIT:
            retry = self._next_expiry_s(namespace, floor)
        return PinGrant(
            granting=Granting.DENIED,
            reason=reason,
            pin=None,
            blocks=0,
            limit=count.limit,
            need=self._cost(namespace, ids, floor),
            have=max(count.limit - count.units, 0),
            retry_after_s=retry,
        )

    def _next_expiry_s(self, namespace: str, floor: Floor) -> float | None:
        """Seconds until the first of the namespace's own pins ends unless it is hit; None if it has none."""
        holding = self._holdings.get((floor, namespace))
        if holding is None:
            return None
        return max(0.0, min(pin.expires_at for pin in holding.pins.values()) - self._clock())

    def _find(self, namespace: str, pin_id: str) -> Pin:
        pin = self._pins.get(pin_id)
        if pin is None or pin.namespace != namespace:
            raise UnknownPin(pin_id)
        return pin

    def _insert(self, pin: Pin) -> None:
        self._pins[pin.pin_id] = pin
        holding = self._holdings.setdefault((pin.floor, pin.namespace), _Holding())
        holding.pins[pin.pin_id] = pin
        holding.leases.update(pin.ids)
        self._tails.setdefault((pin.namespace, pin.ids[-1]), []).append(pin.pin_id)
        heapq.heappush(self._due, (pin.expires_at, pin.pin_id))
        self._tiers[pin.floor].target.pin(pin.ids, pin.namespace)

    def _remove(self, pin: Pin) -> None:
        del self._pins[pin.pin_id]
        holding = self._holdings[pin.floor, pin.namespace]
        del holding.pins[pin.pin_id]
        self._end_leases(pin, pin.ids)
        if not holding.pins:
            del self._holdings[pin.floor, pin.namespace]
        self._drop_tail(pin)

    def _end_leases(self, pin: Pin, ids: Sequence[BlockId]) -> None:
        leases = self._holdings[pin.floor, pin.namespace].leases
        for identity in ids:
            leases[identity] -= 1
            if leases[identity] == 0:
                del leases[identity]
        self._tiers[pin.floor].target.unpin(ids, pin.namespace)

    def _drop_tail(self, pin: Pin) -> None:
        tail = (pin.namespace, pin.ids[-1])
        self._tails[tail].remove(pin.pin_id)
        if not self._tails[tail]:
            del self._tails[tail]

    def _replace(self, pin: Pin, changed: Pin) -> Pin:
        """The same identities with other times. A later expiry needs no new entry in the queue, an earlier one does."""
        self._pins[pin.pin_id] = self._holdings[pin.floor, pin.namespace].pins[pin.pin_id] = changed
        if changed.expires_at < pin.expires_at:
            heapq.heappush(self._due, (changed.expires_at, changed.pin_id))
        return changed

    def _policy_changed(self, floor: Floor, namespace: str | None) -> None:
        if not self._tiers[floor].book.loaded:
            return
        names = [name for tier, name in self._holdings if tier is floor and namespace in (None, name)]
        for name in names:
            self._clip_to_limit(floor, name)

    def _clip_to_limit(self, floor: Floor, namespace: str) -> None:
        """The newest pins lose their tails until the rest is within the limit."""
        tier = self._tiers[floor]
        allowed = tier.book.of(namespace).pin_limit // tier.units_per_block
        holding = self._holdings[floor, namespace]
        for pin in reversed(holding.pins.copy().values()):
            keep = len(pin.ids)
            excess = len(holding.leases) - allowed
            while keep > 0 and excess > 0:
                keep -= 1
                excess -= holding.leases[pin.ids[keep]] == 1
            if keep == 0:
                self._remove(pin)
            elif keep < len(pin.ids):
                self._clip(pin, keep)

    def _clip(self, pin: Pin, keep: int) -> None:
        self._drop_tail(pin)
        self._end_leases(pin, pin.ids[keep:])
        clipped = self._replace(pin, pin.clipped(keep))
        self._tails.setdefault((pin.namespace, clipped.ids[-1]), []).append(pin.pin_id)


def _no_such_tier(asked: int) -> PinGrant:
    return PinGrant(
        granting=Granting.DENIED,
        reason=Denial.NO_SUCH_TIER,
        pin=None,
        blocks=0,
        limit=0,
        need=asked,
        have=0,
        retry_after_s=None,
    )


def _require_times(ttl_s: float, hard_max_s: float) -> None:
    if not 0 < ttl_s <= hard_max_s < math.inf:
        raise ValueError(f"A pin needs 0 < ttl_s <= hard_max_s < infinity, not {ttl_s} and {hard_max_s}.")
