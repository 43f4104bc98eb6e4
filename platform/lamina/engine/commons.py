"""How tenants share the block pool: their quotas, their pins, and what each of them has. No tensors.

A pin leases identities, so it may be granted before its blocks are computed: they are kept from the moment that they
appear (`PinState.resident_blocks` says how many have). Whoever wants them at once sends the same prompt as a request of
one token; it then stands in line and pays like any other.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence

from lamina.errors import InvalidRequest, NotFound, QuotaNotCoverable
from lamina.types import CommonsReport, PinAnswer, PinOrder, PinRecord, PinState, QuotaPolicy, TenantBlocks
from lamina_kvtier import errors as kv_errors
from lamina_kvtier.errors import IntegrityError
from lamina_kvtier.identity import BlockId, IdentityChain
from lamina_kvtier.ledger import Ledger
from lamina_kvtier.manager import KvManager
from lamina_kvtier.pin_types import Floor, Pin
from lamina_kvtier.pins import PinBook, PinTier
from lamina_kvtier.quota import Quota, QuotaBook

__all__ = ["Commons", "RootOf"]

RootOf = Callable[[str | None, str], BlockId]  # (adapter digest, namespace) -> identity of the empty prefix


class Commons:
    """The policy of one pool whose manager has quotas. Owned by the engine's thread."""

    def __init__(self, kv: KvManager, root_of: RootOf, *, clock: Callable[[], float] = time.time) -> None:
        """`clock`: Unix seconds, since pins outlive the process. Without quotas in `kv` every call is refused."""
        self._kv = kv
        self._root_of = root_of
        self._hits: Counter[str] = Counter()
        tiers = {} if kv.ledger is None else {Floor.GPU: PinTier(kv.ledger.book, kv)}
        self._pins = PinBook(tiers, clock=clock)

    # --- quotas -------------------------------------------------------------------------------------------

    def set_quotas(self, policies: Sequence[QuotaPolicy]) -> None:
        """Replaces all quotas, or none: raises QuotaNotCoverable, InvalidRequest.

        A tenant that has more than its new limit loses nothing at once: it gets no more until it has less. Pins beyond
        a new pin limit are clipped, the newest first.
        """
        book = self._ledger.book
        try:
            quotas = {policy.namespace: _quota(policy, book) for policy in policies}
            book.load(quotas)
        except kv_errors.QuotaNotCoverable as error:
            raise QuotaNotCoverable(str(error), limit=error.limit, need=error.need, have=error.have) from error
        except kv_errors.InvalidQuota as error:
            raise InvalidRequest(str(error)) from error

    def report(self) -> CommonsReport:
        """O(tenants with blocks + pinned blocks)."""
        self.expire()
        book = self._ledger.book
        return CommonsReport(
            loaded=book.loaded,
            capacity=book.capacity,
            coverable=book.coverable,
            tenants=self._tenants(),
            pins=tuple(map(self._state, self._pins.listing())),
        )

    def _tenants(self) -> tuple[TenantBlocks, ...]:
        evictions: dict[str, list[tuple[str, int]]] = {}
        for (name, reason), count in sorted(self._kv.evictions().items()):
            evictions.setdefault(name, []).append((reason, count))
        leased = self._kv.leased_by_owner()
        names = {*self._ledger.accounts, *evictions, *self._hits}
        return tuple(self._tenant(name, leased.get(name, 0), evictions.get(name, [])) for name in sorted(names))

    def _tenant(self, name: str, pinned: int, evictions: Sequence[tuple[str, int]]) -> TenantBlocks:
        account = self._ledger.account(name)
        return TenantBlocks(
            namespace=name,
            active=account.firm - pinned,
            cached=account.idle,
            pinned=pinned,
            pending=account.pending,
            pin_hits=self._hits[name],
            evictions=tuple(evictions),
        )

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
        """A request found this prefix in the pool."""
        self._hits[namespace] += len(self._pins.hit(namespace, prefix))

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

    def _state(self, pin: Pin) -> PinState:
        return PinState(
            pin_id=pin.pin_id,
            namespace=pin.namespace,
            floor=pin.floor.value,
            blocks=len(pin.ids),
            resident_blocks=self._kv.match(pin.ids),
            clipped_blocks=pin.clipped_blocks,
            ttl_s=pin.ttl_s,
            hard_max_s=pin.hard_max_s,
            created_at=pin.created_at,
            expires_at=pin.expires_at,
            hits=pin.hits,
            last_hit_at=pin.last_hit_at,
        )


def _quota(policy: QuotaPolicy, book: QuotaBook) -> Quota:
    whole = max(book.capacity, policy.reserved_blocks)  # more than there is, is not coverable rather than invalid
    limit = whole if policy.limit_blocks is None else policy.limit_blocks
    return Quota(policy.reserved_blocks, limit, policy.pin_limit_blocks, policy.weight)


def _floor(name: str) -> Floor:
    try:
        return Floor(name)
    except ValueError:
        raise InvalidRequest(f"A pin's floor is 'gpu' or 'host', not {name!r}.", param="floor") from None
