"""Who is charged for how much of one tier. Units are blocks or bytes, as in the quota book.

ahead ──extend──▶ pending ──commit──▶ committed ──uncharge──▶ (nothing)
reserve ─────────────▶ │                 │     ▲
                       └──refund──▶      ▼     │ wake
                                        idle ──┘      committed, but in nobody's use: it may be reclaimed
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from lamina_kvtier.accounts import Account, Charge, out_of_reach
from lamina_kvtier.admission import Cause, Decision, ReleaseRate, Verdict
from lamina_kvtier.errors import IntegrityError, LedgerMisuse, OutOfBlocks, OverLimit
from lamina_kvtier.ledger_integrity import Sums, find_contradictions
from lamina_kvtier.quota import QuotaBook

__all__ = ["Account", "Charge", "Ledger"]


class Ledger:
    """Charges by namespace; what is committed to all of them together is exactly what is used of the tier.

    What others cannot have of a namespace's units is `held = max(firm, min(committed, reserved))`: what it uses, or
    what it has within its reservation. So one sum over all namespaces answers in O(1) what any of them can get:
    `capacity - (sum of held - own held) - own firm`, bounded by its limit. The same sum with pending units in it
    answers what may still be admitted.

    Everything is O(1) except a change of all policies and `check_integrity`. Not thread-safe.
    """

    def __init__(
        self,
        book: QuotaBook,
        *,
        decode_reserve: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Admission leaves `decode_reserve` units free or reclaimable, at most (and by default) the headroom."""
        self.decode_reserve = book.headroom if decode_reserve is None else decode_reserve
        if not 0 <= self.decode_reserve <= book.headroom:
            # More would make requests within a reservation wait for ever.
            raise LedgerMisuse(f"decode_reserve must be 0 ... {book.headroom} (the headroom), not {decode_reserve}.")
        self.book = book
        self._accounts: dict[str, Account] = {}
        self._charges: set[Charge] = set()
        self._committed = self._held = self._promised = 0
        self._rate = ReleaseRate(clock)
        self._watchers: list[Callable[[str], None]] = []
        book.watch(self._policy_changed)

    # --- what is known ------------------------------------------------------------------------------------

    @property
    def used(self) -> int:
        """Committed units of all namespaces."""
        return self._committed

    @property
    def accounts(self) -> Mapping[str, Account]:
        """Namespaces with committed or pending units."""
        return self._accounts

    def knows(self, namespace: str) -> bool:
        """Whether it has units, or a quota of its own."""
        return namespace in self._accounts or self.book.has(namespace)

    def account(self, namespace: str) -> Account:
        """An account without units, if there is none. It is not kept; ask again after a change."""
        return self._accounts.get(namespace) or Account(namespace, self.book.of(namespace))

    def usage(self, namespace: str) -> int:
        """Committed units."""
        return self.account(namespace).committed

    def over_share(self, namespace: str) -> float:
        """`(usage - reserved) / weight`: who is furthest over it gives first."""
        return self.account(namespace).over_share

    def room_in_limit(self, namespace: str) -> int:
        """Units that the namespace's own limit leaves it now, if it gives up all its idle ones. Negative: over it."""
        account = self.account(namespace)
        return account.quota.limit - account.firm

    def is_at_limit(self, namespace: str) -> bool:
        """Whether it has to give up idle units of its own for each new one, however much is free."""
        account = self.account(namespace)
        return self._is_bounded(account) and account.committed >= account.quota.limit

    def room_in_tier(self, namespace: str) -> int:
        """Units that are unused, idle and its own, or idle and beyond their owner's reservation."""
        account = self.account(namespace)
        return self.book.capacity - (self._held - account.held) - account.firm

    # --- admission ----------------------------------------------------------------------------------------

    def admit(
        self,
        namespace: str,
        worst_case_units: int,
        *,
        now: int | None = None,
        shared: int = 0,
        pinned: int = 0,
        leave: int | None = None,
        claimed: int = 0,
        may_wait: bool = True,
    ) -> Decision:
        """Whether a request that may come to use `worst_case_units` can start. Changes nothing; `reserve` follows.

        It starts as soon as the `now` units (None: all of them) fit that it is known to need. `shared` of these exist
        and are in use or pinned, so they cost nothing more; `pinned` of those are pinned, so they stay when their other
        users have gone. `leave` units stay free or reclaimable for decoding, at most (and by default) the decode
        reserve; beyond a reservation so do `claimed` ones. Without `may_wait` what would queue is refused.
        """
        now = worst_case_units if now is None else now
        if not 0 <= pinned <= shared <= now <= worst_case_units:
            raise LedgerMisuse(f"Not 0 <= {pinned} pinned <= {shared} shared <= {now} <= {worst_case_units} units.")
        ceiling, lasting = self.book.ceiling(namespace), worst_case_units - pinned
        if lasting > ceiling and self.book.loaded:
            return Decision(
                verdict=Verdict.NEVER,
                cause=Cause.CEILING,
                namespace=namespace,
                limit=ceiling,
                need=lasting,
                have=ceiling,
            )
        return self._judge(
            self.account(namespace),
            need=now - shared,
            ahead=worst_case_units - now,
            leave=self.decode_reserve if leave is None else min(leave, self.decode_reserve),
            claimed=claimed,
            may_wait=may_wait,
        )

    def _judge(self, account: Account, *, need: int, ahead: int, leave: int, claimed: int, may_wait: bool) -> Decision:
        entitled = account.spoken_for + need + ahead <= account.quota.reserved
        own, everybodys = self._room(account)
        everybodys -= leave if entitled else leave + claimed
        have, cause = min(own, everybodys), Cause.NONE
        if need > own and self._is_bounded(account):
            have, cause = own, Cause.TENANT_LIMIT
        elif need > everybodys:
            have, cause = everybodys, Cause.POOL
        waits = cause is not Cause.NONE
        verdict = Verdict.QUEUE if may_wait else Verdict.REFUSED
        return Decision(
            verdict=verdict if waits else Verdict.ADMITTED,
            cause=cause,
            namespace=account.namespace,
            limit=self.book.capacity if cause is Cause.POOL else account.quota.limit,
            need=need,
            have=max(have, 0),
            ahead=ahead,
            entitled=entitled,
            retry_after_s=self.retry_after_s(need - have) if waits else None,
        )

    def _room(self, account: Account) -> tuple[int, int]:
        """Units that may still be promised to a namespace: as its limit has it, and as the tier has it."""
        mine = account.firm + account.pending
        return account.quota.limit - mine, self.book.capacity - (self._promised - account.promised) - mine

    def retry_after_s(self, missing: int) -> float:
        """Seconds until `missing` units have come out of use, at the rate at which they do now."""
        return self._rate.seconds_for(missing)

    # --- two phases ---------------------------------------------------------------------------------------

    def reserve(self, namespace: str, units: int, *, ahead: int = 0, assured: bool = False) -> Charge:
        """Promises units to a request. Raises OverLimit or OutOfBlocks if they could not be had after all promises.

        `ahead` more may follow of an assured one: they count against the reservation only.
        """
        _require_count(units)
        _require_count(ahead)
        account = self.account(namespace)
        own, room = self._room(account)
        if units > max(own, 0) and self._is_bounded(account):
            raise self._over_limit(account, units, own)
        if units > max(room, 0):  # nothing can be promised, even where more was promised than there is
            raise self._out_of_units(units, room)
        return self._open(Charge(namespace, units, ahead=ahead, assured=assured))

    def _open(self, charge: Charge) -> Charge:
        if charge.pending or charge.ahead:
            self._charges.add(charge)
            self._change(charge.namespace, pending=charge.pending, ahead=charge.ahead)
        return charge

    def extend(self, charge: Charge, units: int) -> None:
        """`units` more are about to be taken, out of what was ahead as far as that goes. Whether there is room is the
        caller's to ask."""
        _require_count(units)
        if (charge.pending or charge.ahead) and charge not in self._charges:
            raise LedgerMisuse("This charge is not of this ledger.")
        used = min(units, charge.ahead)
        charge.pending += units
        charge.ahead -= used
        if units:
            self._charges.add(charge)
            self._change(charge.namespace, pending=units, ahead=-used)

    def expect(self, charge: Charge, units: int) -> None:
        """`units` that were taken out of an assured charge were given back, and may be wanted again."""
        _require_count(units)
        if charge.assured and units:
            charge.ahead += units
            self._charges.add(charge)
            self._change(charge.namespace, ahead=units)

    def split(self, charge: Charge, pending: int, ahead: int) -> Charge:
        """Part of a charge, as far as it has that much, as one of its own."""
        pending, ahead = min(pending, charge.pending), min(ahead, charge.ahead)
        self._settle(charge, pending, ahead)
        self._change(charge.namespace, pending=-pending, ahead=-ahead)
        return self._open(Charge(charge.namespace, pending, ahead=ahead, assured=charge.assured))

    def commit(self, charge: Charge, units: int | None = None) -> None:
        """`units` (None: all) of the charge were taken. Raises LedgerMisuse if fewer are pending."""
        units = self._settle(charge, units)
        self._change(charge.namespace, pending=-units, committed=units)

    def refund(self, charge: Charge, units: int | None = None) -> None:
        """`units` (None: all that are left, and what was ahead) are not wanted any more. Raises LedgerMisuse."""
        ahead = charge.ahead if units is None else 0
        units = self._settle(charge, units, ahead)
        self._change(charge.namespace, pending=-units, ahead=-ahead)

    def _settle(self, charge: Charge, units: int | None, ahead: int = 0) -> int:
        units = charge.pending if units is None else units
        _require_count(units)
        if units > charge.pending:
            raise LedgerMisuse(f"{units} units of a charge cannot be settled: {charge.pending} are pending.")
        if (units or ahead) and charge not in self._charges:
            raise LedgerMisuse("This charge is not of this ledger.")
        charge.pending -= units
        charge.ahead -= ahead
        if not charge.pending and not charge.ahead:
            self._charges.discard(charge)
        return units

    # --- committed units ----------------------------------------------------------------------------------

    def require(self, namespace: str, units: int) -> None:
        """Raises OverLimit or OutOfBlocks unless the namespace could take `units` now, reclaiming what it may."""
        account = self.account(namespace)
        own, room = account.quota.limit - account.firm, self.room_in_tier(namespace)
        if units > own and self._is_bounded(account):
            raise self._over_limit(account, units, own)
        if units > room:
            raise self._out_of_units(units, room)

    def charge(self, namespace: str, units: int) -> None:
        """Units were taken without a promise. They must be unused; whether they are allowed is the caller's to ask."""
        _require_count(units)
        if self._committed + units > self.book.capacity:
            raise LedgerMisuse(f"{units} units more than {self._committed} exceed the {self.book.capacity} there are.")
        self._change(namespace, committed=units)

    def uncharge(self, namespace: str, units: int, *, idle: int = 0) -> None:
        """Units were given back, `idle` of them idle ones. Raises LedgerMisuse."""
        account = self.account(namespace)
        if not 0 <= idle <= units or idle > account.idle or units - idle > account.firm:
            raise LedgerMisuse(
                f"{namespace!r} cannot give back {units} units, {idle} of them idle: "
                f"it has {account.committed}, {account.idle} of them idle."
            )
        self._change(namespace, committed=-units, idle=-idle)

    def rest(self, namespace: str, units: int) -> None:
        """Units in use have become idle. Raises LedgerMisuse."""
        if not 0 <= units <= self.account(namespace).firm:
            raise LedgerMisuse(f"{units} units of {namespace!r} cannot rest: fewer are in use.")
        self._change(namespace, idle=units)

    def wake(self, namespace: str, units: int) -> None:
        """Idle units are in use (or pinned) again. Raises LedgerMisuse."""
        if not 0 <= units <= self.account(namespace).idle:
            raise LedgerMisuse(f"{units} units of {namespace!r} cannot wake: fewer are idle.")
        self._change(namespace, idle=-units)

    def watch(self, watcher: Callable[[str], None]) -> None:
        """From now on `watcher(namespace)` is called after each change of its charges or its quota."""
        self._watchers.append(watcher)

    # --- proof --------------------------------------------------------------------------------------------

    def check_integrity(self, used: Mapping[str, int] | None = None) -> None:
        """Proves all sums; with `used` (units in use by namespace, counted elsewhere) also who is charged.

        Raises IntegrityError. O(namespaces + open charges).
        """
        found = self.contradictions(used)
        if found:
            raise IntegrityError(found)

    def contradictions(self, used: Mapping[str, int] | None = None) -> list[str]:
        """What `check_integrity` would complain about, one sentence each."""
        sums = Sums(committed=self._committed, held=self._held, promised=self._promised)
        return find_contradictions(self.book, self._accounts, self._charges, sums, used)

    # --- the one place where numbers change ---------------------------------------------------------------

    def _change(self, namespace: str, *, committed: int = 0, idle: int = 0, pending: int = 0, ahead: int = 0) -> None:
        account = self._accounts.get(namespace)
        if account is None:
            account = self._accounts[namespace] = self.account(namespace)
        account.committed += committed
        account.idle += idle
        account.pending += pending
        account.ahead += ahead
        self._committed += committed
        returned = idle - committed - pending
        if returned > 0:
            self._rate.add(returned)
        self._weigh(account)
        if account.committed == account.pending == account.ahead == 0:
            del self._accounts[namespace]

    def _weigh(self, account: Account) -> None:
        held, promised = out_of_reach(account)
        self._held += held - account.held
        self._promised += promised - account.promised
        account.held, account.promised = held, promised
        for watcher in self._watchers:
            watcher(account.namespace)

    def _policy_changed(self, namespace: str | None) -> None:
        for name in list(self._accounts) if namespace is None else [namespace]:
            account = self._accounts.get(name)
            if account is not None:
                account.quota = self.book.of(name)
                self._weigh(account)

    def _is_bounded(self, account: Account) -> bool:
        """Whether its limit is a bound at all; else the tier's capacity is what has to be named."""
        return account.quota.limit < self.book.capacity

    def _over_limit(self, account: Account, need: int, have: int) -> OverLimit:
        return OverLimit(
            account.namespace,
            limit=account.quota.limit,
            need=need,
            have=max(have, 0),
            retry_after_s=self.retry_after_s(need - have),
        )

    def _out_of_units(self, need: int, have: int) -> OutOfBlocks:
        retry = self.retry_after_s(need - have)
        return OutOfBlocks(need, max(have, 0), limit=self.book.capacity, retry_after_s=retry)


def _require_count(units: int) -> None:
    if units < 0:
        raise LedgerMisuse(f"{units} units cannot be booked.")
