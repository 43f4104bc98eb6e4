"""The reclaim order: the rule in plain words, and the structure that must agree with it."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lamina_kvtier import Ledger, Quota, QuotaBook
from lamina_kvtier.ledger import Account
from lamina_kvtier.reclaim import BlockQueue, ReclaimOrder, next_to_reclaim

NAMES = "abcd"


def account(name: str, committed: int, idle: int, reserved: int, weight: float = 1.0) -> Account:
    made = Account(name, Quota(reserved=reserved, limit=1000, weight=weight))
    made.committed, made.idle = committed, idle
    return made


@pytest.mark.parametrize(
    ("accounts", "gives"),
    [
        ([account("a", 9, 1, 5), account("b", 10, 10, 5)], "b"),
        ([account("a", 9, 1, 5), account("b", 10, 10, 5, weight=2)], "a"),
        ([account("a", 9, 1, 5), account("b", 9, 1, 5)], "a"),
        ([account("a", 9, 0, 5), account("b", 6, 1, 5)], "b"),
        ([account("a", 5, 5, 5), account("me", 5, 5, 5)], "me"),
        ([account("a", 6, 5, 5), account("me", 5, 5, 5)], "a"),
        ([account("a", 6, 5, 5), account("me", 9, 5, 5)], "me"),
        ([account("a", 5, 5, 5), account("me", 5, 0, 5)], None),
        ([], None),
    ],
)
def test_the_rule(accounts: list[Account], gives: str | None) -> None:
    """Beyond a reservation first, the furthest over its share; then one's own; never others' reserved ones."""
    assert next_to_reclaim(accounts, "me") == gives


@settings(max_examples=60, deadline=None)
@given(
    policies=st.dictionaries(
        st.sampled_from(NAMES),
        st.builds(Quota, st.integers(0, 8), st.just(32), st.just(0), st.sampled_from([0.5, 1.0, 3.0])),
    ),
    steps=st.lists(
        st.tuples(st.sampled_from(NAMES), st.sampled_from(["take", "rest", "wake", "free", "ask"])), max_size=80
    ),
)
def test_the_structure_gives_what_the_rule_says(policies: dict[str, Quota], steps: list[tuple[str, str]]) -> None:
    """After any history, for any requester, the same namespace and its oldest block."""
    book = QuotaBook(32)
    ledger = Ledger(book)
    order = ReclaimOrder(32, ledger)
    book.load(policies)
    free, active, idle = list(range(32)), {name: [] for name in NAMES}, {name: [] for name in NAMES}
    for name, step in steps:
        if step == "take" and free:
            active[name].append(free.pop())
            order.take(active[name][-1], name, None)
        elif step == "rest" and active[name]:
            idle[name].append(active[name].pop())
            order.rest(idle[name][-1])
        elif step == "wake" and idle[name]:
            active[name].append(idle[name].pop(len(idle[name]) // 2))
            order.wake(active[name][-1])
        elif step == "free" and idle[name]:
            free.append(idle[name].pop(0))
            order.free(free[-1], idle=True)
        for requester in NAMES if step == "ask" else ():
            gives = next_to_reclaim(ledger.accounts.values(), requester)
            victim = order.victim(requester)
            assert (victim and victim[0]) == (gives and idle[gives][0])


def test_a_queue_keeps_its_order_without_what_is_taken_out() -> None:
    """From the front, the middle and the end, down to nothing and up again."""
    links = array("i", [-1]) * 5, array("i", [-1]) * 5
    queue, other = BlockQueue(*links), BlockQueue(*links)
    other.push(4)
    for block in (2, 0, 3, 1):
        queue.push(block)
    for block, left in ((0, [2, 3, 1]), (2, [3, 1]), (1, [3]), (3, [])):
        queue.remove(block)
        assert (list(queue), len(queue)) == (left, len(left))
    queue.push(2)
    assert (list(queue), queue.oldest, queue.newest, list(other)) == ([2], 2, 2, [4])


def test_owners_that_come_and_go_leave_no_names_although_nothing_is_ever_reclaimed() -> None:
    """There is always room, so nobody asks for a victim; the first one that is wanted is the right one."""
    book = QuotaBook(32)
    ledger = Ledger(book)
    order = ReclaimOrder(32, ledger)
    book.load({"stays": Quota(0, 32)})
    for block in (0, 1):
        order.take(block, "stays", None)
        order.rest(block)
    for number in range(10_000):
        owner = f"t{number}"
        order.take(5, owner, None)
        order.rest(5)
        if number % 2:
            order.wake(5)
        order.free(5, idle=not number % 2)
        assert len(order._over._changed) < 400
    assert order.victim("stays") == (0, "over_share")
    assert len(order._over._order) == 1
    assert order.contradictions([0, 1], []) == []
