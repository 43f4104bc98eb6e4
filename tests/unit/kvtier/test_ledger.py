"""Charges in two phases, and what is admitted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from lamina_kvtier import (
    Cause,
    Charge,
    IntegrityError,
    Ledger,
    LedgerMisuse,
    OutOfBlocks,
    OverLimit,
    Quota,
    QuotaBook,
    Verdict,
)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def ledger(capacity: int = 100, headroom: int = 10, *, clock: Clock | None = None, **policies: Quota) -> Ledger:
    book = QuotaBook(capacity, headroom)
    book.load(policies)
    return Ledger(book, clock=clock or Clock())


# Two phases


def test_a_charge_is_committed_and_the_rest_refunded() -> None:
    """What was promised and not taken is there for others again."""
    books = ledger()
    charge = books.reserve("a", 10)
    books.commit(charge, 4)
    assert (books.usage("a"), books.used, books.account("a").pending, charge.pending) == (4, 4, 6, 6)
    books.refund(charge)
    assert (books.usage("a"), books.account("a").pending, charge.pending) == (4, 0, 0)
    books.uncharge("a", 4)
    assert books.used == 0
    assert not books.accounts, "an account without units is not kept"
    books.check_integrity({})


def test_a_whole_charge_is_committed_by_default() -> None:
    books = ledger()
    books.commit(books.reserve("a", 3))
    books.check_integrity({"a": 3})


MISUSES: dict[str, Callable[[Ledger, Charge], object]] = {
    "commit too much": lambda b, c: b.commit(c, 6),
    "refund too much": lambda b, c: b.refund(c, 6),
    "commit less than nothing": lambda b, c: b.commit(c, -1),
    "another ledger's charge": lambda b, c: b.commit(Charge("a", 5), 5),
    "reserve less than nothing": lambda b, c: b.reserve("a", -1),
    "charge less than nothing": lambda b, c: b.charge("a", -1),
    "charge more than there is": lambda b, c: b.charge("a", 98),
    "uncharge too much": lambda b, c: b.uncharge("a", 4),
    "uncharge idle ones that are not": lambda b, c: b.uncharge("a", 2, idle=2),
    "uncharge idle ones as used": lambda b, c: b.uncharge("a", 3),
    "uncharge more idle than units": lambda b, c: b.uncharge("a", 0, idle=1),
    "rest too much": lambda b, c: b.rest("a", 3),
    "wake too much": lambda b, c: b.wake("a", 2),
    "shared beyond the request": lambda b, c: b.admit("a", 3, shared=4),
    "pinned beyond the shared": lambda b, c: b.admit("a", 3, shared=1, pinned=2),
    "shared beyond what is known": lambda b, c: b.admit("a", 9, now=3, shared=4),
    "now beyond the worst case": lambda b, c: b.admit("a", 3, now=4),
    "extend by less than nothing": lambda b, c: b.extend(c, -1),
    "extend another ledger's charge": lambda b, c: b.extend(Charge("a", 5), 1),
    "split another ledger's charge": lambda b, c: b.split(Charge("a", 5), 1, 0),
    "reserve less than nothing ahead": lambda b, c: b.reserve("a", 1, ahead=-1),
}


@pytest.mark.parametrize("name", MISUSES)
def test_misuse_is_refused_and_changes_nothing(name: str) -> None:
    books = ledger()
    charge = books.reserve("a", 5)
    books.charge("a", 3)
    books.rest("a", 1)
    with pytest.raises(LedgerMisuse):
        MISUSES[name](books, charge)
    account = books.account("a")
    assert (account.committed, account.idle, account.pending, books.used) == (3, 1, 5, 3)
    books.check_integrity({"a": 3})


def test_settling_twice_is_misuse() -> None:
    books = ledger()
    charge = books.reserve("a", 5)
    books.refund(charge)
    with pytest.raises(LedgerMisuse):
        books.commit(charge, 1)
    books.refund(charge)  # nothing is left, and that is fine: cleaning up may not need to know


def test_decode_reserve_cannot_exceed_the_headroom() -> None:
    """Reservations may fill everything else; a larger reserve would make what they promise wait for ever."""
    book = QuotaBook(100, 10)
    for reserve in (-1, 11):
        with pytest.raises(LedgerMisuse):
            Ledger(book, decode_reserve=reserve)
    assert Ledger(book, decode_reserve=3).decode_reserve == 3


# Shares


def test_over_share_is_weighed() -> None:
    """(usage - reserved) / weight."""
    books = ledger(a=Quota(reserved=10, limit=100, weight=2))
    books.charge("a", 16)
    books.charge("b", 2)
    assert (books.over_share("a"), books.over_share("b"), books.over_share("c")) == (3.0, 2.0, 0.0)


def test_what_others_hold_within_their_reservation_is_out_of_reach() -> None:
    books = ledger(headroom=0, a=Quota(reserved=30, limit=100))
    books.charge("a", 50)
    assert books.room_in_tier("b") == 50
    books.rest("a", 50)
    assert books.room_in_tier("b") == 70, "20 are idle and beyond the reservation"
    assert books.room_in_tier("a") == 100
    with pytest.raises(OutOfBlocks) as refused:
        books.reserve("b", 71)
    assert (refused.value.limit, refused.value.need, refused.value.have) == (100, 71, 70)


def test_a_change_of_policy_counts_at_once() -> None:
    books = ledger(headroom=0)
    books.charge("a", 50)
    books.rest("a", 50)
    books.book.set("a", Quota(reserved=40, limit=100))
    assert books.room_in_tier("b") == 60
    books.book.load({})
    assert books.room_in_tier("b") == 100
    books.check_integrity({"a": 50})


# Admission


def test_what_fits_is_admitted() -> None:
    books = ledger()
    decision = books.admit("a", 90)
    assert decision.admitted
    assert (decision.need, decision.have, decision.cause) == (90, 90, Cause.NONE)
    assert books.used == 0, "a decision takes nothing"


def test_what_can_never_fit_is_never_admitted() -> None:
    """However idle the tier: beyond its limit, or into what others were promised."""
    books = ledger(a=Quota(reserved=10, limit=20, pin_limit=5), b=Quota(reserved=50, limit=50))
    decision = books.admit("a", 16)
    assert (decision.verdict, decision.cause) == (Verdict.NEVER, Cause.CEILING)
    assert (decision.limit, decision.need, decision.have, decision.retry_after_s) == (15, 16, 15, None)
    assert books.admit("a", 16, shared=1, pinned=1).admitted
    assert books.admit("c", 30).admitted
    assert books.admit("c", 31).verdict is Verdict.NEVER


def test_a_request_starts_by_what_it_needs_now() -> None:
    """What it may come to use later matters for the ceiling and for the reservation alone."""
    books = ledger(a=Quota(reserved=20, limit=100))
    books.charge("b", 60)
    decision = books.admit("a", 30, now=12)
    assert decision.admitted
    assert (decision.need, decision.ahead, decision.entitled) == (12, 18, False)
    decision = books.admit("a", 20, now=12)
    assert (decision.admitted, decision.need, decision.ahead, decision.entitled) == (True, 12, 8, True)
    assert books.admit("a", 91, now=2).verdict is Verdict.NEVER
    books.reserve("a", 5, ahead=10, assured=True)
    assert books.admit("a", 5, now=1).entitled
    assert not books.admit("a", 6, now=1).entitled


def test_what_is_ahead_is_not_kept_from_others() -> None:
    """Only from further requests that want the same reservation."""
    books = ledger(headroom=0, a=Quota(reserved=50, limit=100))
    charge = books.reserve("a", 5, ahead=45, assured=True)
    assert books.admit("b", 50).admitted
    assert books.room_in_tier("b") == 100
    books.check_integrity({})
    books.extend(charge, 8)
    assert (charge.pending, charge.ahead, books.account("a").spoken_for) == (13, 37, 50)
    books.commit(charge, 13)
    part = books.split(charge, 0, 30)
    assert (part.ahead, part.assured, charge.ahead) == (30, True, 7)
    books.refund(part)
    books.extend(charge, 10)
    assert (charge.pending, charge.ahead) == (10, 0)
    books.commit(charge)
    books.refund(charge)
    assert books.account("a").spoken_for == 23
    books.check_integrity({"a": 23})


def test_blocks_are_left_for_decoding_and_for_who_comes_next() -> None:
    """The decode reserve is the most that is left for decoding; claims bind those within their reservation not."""
    books = ledger(a=Quota(reserved=40, limit=100))
    books.charge("b", 50)
    assert books.admit("c", 50, leave=0).admitted
    assert books.admit("c", 47, leave=3).admitted
    assert books.admit("c", 48, leave=3).have == 47
    assert books.admit("c", 40, leave=99).admitted
    assert books.admit("c", 40, leave=5, claimed=6).verdict is Verdict.QUEUE
    assert books.admit("a", 40, leave=5, claimed=6).admitted


def test_before_policy_nothing_is_impossible() -> None:
    books = Ledger(QuotaBook(10, 2))
    assert books.admit("a", 40, now=10, leave=0).admitted
    assert books.admit("a", 40, now=11, leave=0).verdict is Verdict.QUEUE


def test_what_is_shared_costs_nothing_more() -> None:
    books = ledger(a=Quota(reserved=0, limit=20))
    books.charge("a", 12)
    assert books.admit("a", 18, shared=10).admitted
    decision = books.admit("a", 18)
    assert (decision.verdict, decision.cause) == (Verdict.QUEUE, Cause.TENANT_LIMIT)
    assert (decision.limit, decision.need, decision.have) == (20, 18, 8)


def test_admitted_requests_count_as_if_they_had_taken_everything() -> None:
    """Pending charges and the decode reserve are kept apart for those who were admitted."""
    books = ledger()
    books.reserve("a", 60)
    decision = books.admit("b", 31)
    assert (decision.verdict, decision.cause) == (Verdict.QUEUE, Cause.POOL)
    assert (decision.limit, decision.need, decision.have) == (100, 31, 30)
    assert books.admit("b", 30).admitted


def test_idle_units_count_as_room_where_they_may_be_reclaimed() -> None:
    books = ledger(a=Quota(reserved=20, limit=100))
    books.charge("a", 100)
    books.rest("a", 100)
    assert books.admit("b", 70).admitted
    assert books.admit("b", 71).verdict is Verdict.NEVER
    assert books.admit("a", 90).admitted


def test_what_may_not_wait_is_refused_with_a_time() -> None:
    """429 instead of the queue."""
    books = ledger()
    books.charge("a", 90)
    decision = books.admit("b", 5, may_wait=False)
    assert decision.verdict is Verdict.REFUSED
    assert decision.retry_after_s is not None
    assert decision.decision_id != books.admit("b", 5).decision_id


def test_within_its_reservation_a_request_is_entitled_although_it_waits() -> None:
    """So the scheduler may make room for it; one unit more, and it waits like others."""
    books = ledger(a=Quota(reserved=40, limit=100))
    books.charge("b", 80)
    within, beyond = books.admit("a", 40), books.admit("a", 41)
    assert (within.verdict, within.entitled) == (Verdict.QUEUE, True)
    assert (beyond.verdict, beyond.entitled) == (Verdict.QUEUE, False)


def test_retry_after_follows_the_rate_of_releases() -> None:
    """Seconds until so many units have come back, if it goes on like this; bounded at both ends."""
    clock = Clock()
    books = ledger(clock=clock)
    assert books.retry_after_s(10) == 1.0
    books.charge("a", 90)
    for _ in range(80):
        clock.now += 1.0
        books.uncharge("a", 1)
    assert books.retry_after_s(5) == pytest.approx(5.0, rel=0.1)
    assert books.retry_after_s(10_000) == 60.0
    assert books.retry_after_s(0) == 0.1
    clock.now += 100_000.0
    assert books.retry_after_s(1) in (1.0, 60.0)


def test_a_limit_is_named_before_the_pool() -> None:
    """Waiting for others would not help."""
    books = ledger(a=Quota(reserved=0, limit=10))
    books.charge("b", 95)
    books.charge("a", 5)
    with pytest.raises(OverLimit, match="limit of 10 leaves 5") as refused:
        books.require("a", 6)
    assert (refused.value.namespace, refused.value.need, refused.value.have) == ("a", 6, 5)
    with pytest.raises(OverLimit):
        books.reserve("a", 6)
    with pytest.raises(OutOfBlocks):
        books.require("a", 5)


# The proof itself can fail


BREAKS: dict[str, tuple[Callable[[Ledger], object], str]] = {
    "sum": (lambda b: setattr(b, "_committed", 4), "committed units"),
    "held": (lambda b: setattr(b, "_held", 4), "held units"),
    "promised": (lambda b: setattr(b, "_promised", 4), "promised units"),
    "idle": (lambda b: setattr(b.account("a"), "idle", 6), "but 6 idle"),
    "pending": (lambda b: setattr(b.account("a"), "pending", 1), "pending units"),
    "ahead": (lambda b: setattr(b.account("a"), "ahead", 1), "units ahead"),
    "weights": (lambda b: setattr(b.account("a"), "held", 1), "which is not what it has"),
    "quota": (lambda b: setattr(b.account("a"), "quota", Quota(1, 1)), "old quota"),
    "lost account": (lambda b: b._accounts.clear(), "no account"),
    "over the capacity": (lambda b: setattr(b.book, "capacity", 3), "are used of 3"),
}


@pytest.mark.parametrize("name", BREAKS)
def test_each_broken_rule_is_named(name: str) -> None:
    books = ledger()
    books.charge("a", 5)
    books.reserve("a", 2)
    damage, message = BREAKS[name]
    damage(books)
    with pytest.raises(IntegrityError, match=message):
        books.check_integrity()


@pytest.mark.parametrize("used", [{}, {"a": 4}, {"a": 5, "b": 1}])
def test_charges_are_those_of_the_units(used: dict[str, Any]) -> None:
    books = ledger()
    books.charge("a", 5)
    with pytest.raises(IntegrityError, match="is charged for"):
        books.check_integrity(used)


def test_nothing_can_be_promised_where_more_was_promised_than_there_is() -> None:
    """Idle units that were counted on may have been taken without a promise since."""
    books = ledger(10, 0, b=Quota(0, 4))
    books.reserve("a", 8)
    books.charge("b", 6)
    for name in ("a", "b", "c"):
        assert books.reserve(name, 0).pending == 0
    with pytest.raises(OutOfBlocks):
        books.reserve("c", 1)
    with pytest.raises(OverLimit):
        books.reserve("b", 1)


def test_what_an_assured_request_gives_back_unused_is_its_own_still() -> None:
    """Whether it was promised or ahead: nobody else may claim that part of the reservation meanwhile."""
    books = ledger(20, 0, a=Quota(10, 20))
    charge = books.reserve("a", 4, ahead=6, assured=True)
    books.extend(charge, 2)
    books.commit(charge, 6)
    books.uncharge("a", 6)
    assert books.account("a").spoken_for == 4
    books.expect(charge, 6)
    assert (books.account("a").spoken_for, charge.pending, charge.ahead) == (10, 0, 10)
    plain = books.reserve("a", 3)
    books.commit(plain)
    books.uncharge("a", 3)
    books.expect(plain, 3)
    assert books.account("a").spoken_for == 10
    books.refund(charge)
    assert books.account("a").spoken_for == 0
    books.check_integrity({})
