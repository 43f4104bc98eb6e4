"""How tenants share the block pool and the tiers below: their quotas, their pins, what each of them has. No tensors.

A pin leases identities, so it may be granted before its blocks are computed: they are kept from the moment that they
appear (`PinState.resident_blocks` says how many have). Whoever wants them at once sends the same prompt as a request of
one token; it then stands in line and pays like any other.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from lamina.engine.erasure import Erasure
from lamina.engine.tier_quotas import PoolOnly, TierQuotas, TiersBelow
from lamina.errors import InvalidRequest, NotFound
from lamina.types import (
    CommonsReport,
    PinAnswer,
    PinOrder,
    PinRecord,
    PinState,
    QuotaPolicy,
    TenantBlocks,
    TierSize,
)
from lamina_kvtier import errors as kv_errors
from lamina_kvtier.errors import IntegrityError
from lamina_kvtier.identity import BlockId, IdentityChain
from lamina_kvtier.ledger import Ledger
from lamina_kvtier.manager import KvManager
from lamina_kvtier.pin_types import Floor, Pin
from lamina_kvtier.pins import PinBook, PinTier
from lamina_kvtier.tier import TierUsage

__all__ = ["Commons", "RootOf"]

RootOf = Callable[[str | None, str], BlockId]  # (adapter digest, namespace) -> identity of the empty prefix


class Commons:
    """The policy of one pool whose manager has quotas, and of the tiers below. Owned by the engine's thread."""

    def __init__(
        self,
        kv: KvManager,
        root_of: RootOf,
        below: TiersBelow | None = None,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`clock`: Unix seconds, since pins outlive the process. Without quotas in `kv` every call is refused."""
        self._kv = kv
        self._root_of = root_of
        self._below: TiersBelow = PoolOnly() if below is None else below
        self._host = self._below.commons_of_host
        self.erasure = Erasure(kv, self._below)
        self._hits: Counter[str] = Counter()
        tiers = {} if kv.ledger is None else {Floor.GPU: PinTier(kv.ledger.book, kv)}
        if tiers and self._host is not None:
            tiers[Floor.HOST] = self._host.pin_tier
        self._pins = PinBook(tiers, clock=clock)
        self._below.save_pins(self._kept_on_device)

    # --- quotas -------------------------------------------------------------------------------------------

    def set_quotas(self, policies: Sequence[QuotaPolicy]) -> None:
        """Replaces all quotas of all tiers, or none: raises QuotaNotCoverable, InvalidRequest.

        A tenant that has more than its new limit loses nothing at once: it gets no more until it has less. Pins beyond
        a new pin limit are clipped, the newest first.
        """
        TierQuotas(self._ledger.book, self._below).set(policies)

    def report(self) -> CommonsReport:
        """O(tenants with blocks + pinned blocks)."""
        self.expire()
        book = self._ledger.book
        usage = self._below.store_usage()
        return CommonsReport(
            loaded=book.loaded,
            capacity=book.capacity,
            coverable=book.coverable,
            tenants=self._tenants(usage),
            pins=tuple(map(self._state, self._pins.listing())),
            host=None if self._host is None else self._host.size,
            store=None if usage is None else TierSize(usage.limit, usage.coverable, usage.keeps_quotas),
        )

    def _tenants(self, store: TierUsage | None) -> tuple[TenantBlocks, ...]:
        evictions = _by_namespace(self._kv.evictions())
        leased = self._kv.leased_by_owner()
        below = self._host_parts()
        stored = {} if store is None else store.by_namespace
        names = {*self._ledger.accounts, *evictions, *self._hits, *below, *stored}
        found = []
        for name in sorted(names):
            account, pinned = self._ledger.account(name), leased.get(name, 0)
            share = replace(
                below.get(name) or TenantBlocks(namespace=name),
                active=account.firm - pinned,
                cached=account.idle,
                pinned=pinned,
                pending=account.pending,
                pin_hits=self._hits[name],
                evictions=evictions.get(name, ()),
                store_bytes=None if store is None else stored.get(name, 0),
            )
            found.append(share)
        return tuple(found)

    def _host_parts(self) -> dict[str, TenantBlocks]:
        """What each namespace has in host memory, and nothing else."""
        if self._host is None:
            return {}
        tier = self._host.tier
        pinned, writing, unit = tier.pinned_by_owner(), tier.writing_by_owner(), tier.block_bytes
        lost = _by_namespace({(name, reason.value): count for (name, reason), count in tier.evictions.items()})
        return {
            name: TenantBlocks(
                namespace=name,
                host_bytes=tier.slots_of(name) * unit,
                host_pinned_bytes=pinned.get(name, 0) * unit,
                host_pending_bytes=writing.get(name, 0) * unit,
                host_evictions=lost.get(name, ()),
            )
            for name in {*self._host.ledger.accounts, *lost}
        }

    # --- pins ---------------------------------------------------------------------------------------------

    def pin(self, order: PinOrder) -> PinAnswer:
        """Leases the full blocks of a prefix, or of its head as far as the pin limit goes. Raises InvalidRequest."""
        ids = self._identities(order)
        try:
            grant = self._pins.pin(
                order.namespace, ids, floor=_floor(order.floor), ttl_s=order.ttl_s, hard_max_s=order.hard_max_s
            )
        except ValueError as error:
            raise InvalidRequest(str(error), param="ttl") from error
        return PinAnswer(
            status=grant.granting.value,
            reason=None if grant.reason is None else grant.reason.value,
            pin=None if grant.pin is None else self._state(grant.pin),
            limit=grant.limit,
            need=grant.need,
            have=grant.have,
            decision=grant.decision_id,
            retry_after_s=grant.retry_after_s,
        )

    def renew(self, namespace: str, pin_id: str, ttl_s: float) -> PinState:
        """Another time to live, from now. Raises NotFound, InvalidRequest."""
        try:
            return self._state(self._pins.renew(namespace, pin_id, ttl_s=ttl_s))
        except kv_errors.UnknownPin as error:
            raise NotFound(str(error)) from error
        except ValueError as error:
            raise InvalidRequest(str(error), param="ttl") from error

    def unpin(self, namespace: str, pin_id: str) -> None:
        """Its blocks are ordinary cached ones again. Raises NotFound."""
        try:
            self._pins.unpin(namespace, pin_id)
        except kv_errors.UnknownPin as error:
            raise NotFound(str(error)) from error

    def restore(self, records: Sequence[PinRecord]) -> tuple[PinState, ...]:
        """Takes pins back that another process had granted, and returns those that are alive and not here yet."""
        known = {pin.pin_id for pin in self._pins.listing()}
        fresh = [self._record(record) for record in records if record.pin_id not in known]
        restored = self._pins.restore(record for record in fresh if record["ids"])
        return tuple(map(self._state, restored))

    def hit(self, namespace: str, prefix: Sequence[BlockId]) -> None:
        """A request found these blocks, the next ones of its prompt, instead of computing them."""
        self._hits[namespace] += len(self._pins.hit(namespace, prefix))

    def pins_on(self, namespace: str, ids: Sequence[BlockId]) -> dict[BlockId, tuple[str, ...]]:
        """Which of the namespace's pins keep which of these blocks. O(blocks of its pins)."""
        wanted, found = frozenset(ids), dict[BlockId, tuple[str, ...]]()
        for pin in self._pins.listing(namespace):
            for identity in wanted.intersection(pin.ids):
                found[identity] = (*found.get(identity, ()), pin.pin_id)
        return found

    # --- deletions ----------------------------------------------------------------------------------------

    def erase(self, namespace: str) -> None:
        """A tenant is gone: its pins end, its blocks leave every tier. Its quota goes with the next `set_quotas`."""
        for pin in self._pins.listing(namespace):
            self._pins.unpin(namespace, pin.pin_id)
        self._hits.pop(namespace, None)
        self.erasure.erase_namespace(namespace)

    def expire(self) -> None:
        """Ends what is due. O(1) if nothing is."""
        self._pins.expire()

    def check_integrity(self) -> None:
        """Raises IntegrityError unless leases are those of the pins, and in the manager."""
        self._pins.check_integrity()
        book = None if self._kv.ledger is None else self._kv.ledger.book
        if book is not None and book.loaded and book.reserved > book.coverable:
            raise IntegrityError([f"quotas: {book.reserved} blocks are promised of {book.coverable}"])

    # --- how ----------------------------------------------------------------------------------------------

    @property
    def _ledger(self) -> Ledger:
        if self._kv.ledger is None:
            raise InvalidRequest("This engine has no quotas.")
        return self._kv.ledger

    def _identities(self, order: PinOrder) -> list[BlockId]:
        chain = IdentityChain(self._root_of(order.adapter, order.namespace), self._kv.block_size)
        chain.extend(order.token_ids)
        return chain.ids

    def _record(self, record: PinRecord) -> dict[str, object]:
        order = record.order
        pin = Pin(
            pin_id=record.pin_id,
            namespace=order.namespace,
            floor=_floor(order.floor),
            ids=tuple(self._identities(order)),
            ttl_s=order.ttl_s,
            hard_max_s=order.hard_max_s,
            created_at=record.created_at,
            expires_at=min(record.expires_at, record.created_at + order.hard_max_s),
            hits=record.hits,
            last_hit_at=record.last_hit_at,
            clipped_blocks=record.clipped_blocks,
        )
        return pin.to_record()

    def _kept_on_device(self) -> list[BlockId]:
        """Those of pins that share blocks more than once. O(blocks of pins)."""
        return [identity for pin in self._pins.listing() if pin.floor is Floor.GPU for identity in pin.ids]

    def _resident(self, pin: Pin) -> int:
        if pin.floor is Floor.HOST and self._host is not None:
            return self._host.pins.resident(pin.ids)
        return self._kv.match(pin.ids)

    def _state(self, pin: Pin) -> PinState:
        return PinState(
            pin_id=pin.pin_id,
            namespace=pin.namespace,
            floor=pin.floor.value,
            blocks=len(pin.ids),
            resident_blocks=self._resident(pin),
            clipped_blocks=pin.clipped_blocks,
            ttl_s=pin.ttl_s,
            hard_max_s=pin.hard_max_s,
            created_at=pin.created_at,
            expires_at=pin.expires_at,
            hits=pin.hits,
            last_hit_at=pin.last_hit_at,
        )


def _by_namespace(counts: Mapping[tuple[str, str], int]) -> dict[str, tuple[tuple[str, int], ...]]:
    """Counts by reason, of each namespace."""
    found: dict[str, tuple[tuple[str, int], ...]] = {}
    for (name, reason), count in sorted(counts.items()):
        found[name] = (*found.get(name, ()), (reason, count))
    return found


def _floor(name: str) -> Floor:
    try:
        return Floor(name)
    except ValueError:
        raise InvalidRequest(f"A pin's floor is 'gpu' or 'host', not {name!r}.", param="floor") from None
