"""Who is furthest over its share: the order after any history, and what a question costs."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from lamina_kvtier.over_shares import OverShares

NAMES = "abcdef"
STEPS = st.lists(st.tuples(st.sampled_from(NAMES), st.integers(-2, 4), st.booleans()), max_size=60)
CROWDS = st.lists(
    st.tuples(st.integers(0, 2000), st.integers(0, 700), st.integers(-2, 4), st.sampled_from([False] * 5 + [True])),
    max_size=20,
)
FEW = 300  # names that may be noted and stand for nothing


class Shares:
    """Numbers by namespace, and how often each was asked for."""

    def __init__(self) -> None:
        self.over: dict[str, int] = {}
        self.asked: Counter[str] = Counter()
        self.order = OverShares(self.ask)

    def ask(self, namespace: str) -> float | None:
        self.asked[namespace] += 1
        over = self.over.get(namespace, 0)
        return float(over) if over > 0 else None

    def set(self, namespace: str, over: int) -> None:
        self.over[namespace] = over
        self.order.changed(namespace)

    def in_order(self) -> list[str]:
        return sorted((name for name, over in self.over.items() if over > 0), key=lambda name: (-self.over[name], name))


@settings(max_examples=150, deadline=None)
@given(STEPS)
def test_the_order_is_that_of_the_numbers(steps: list[tuple[str, int, bool]]) -> None:
    """However often they changed, one at a time or all at once."""
    shares = Shares()
    for name, number, ask in steps:
        shares.set(name, number)
        if ask:
            assert [*shares.order] == [(-shares.over[name], name) for name in shares.in_order()]
            assert shares.order.first() == next(iter(shares.in_order()), None)


@settings(max_examples=60, deadline=None)
@given(CROWDS)
def test_a_crowd_that_nobody_asks_about_is_in_order_when_somebody_does(
    steps: list[tuple[int, int, int, bool]],
) -> None:
    """Hundreds of names at once come, change and go, and most of the time nobody wants a victim."""
    shares = Shares()
    for first, count, number, ask in steps:
        for name in range(first, first + count):
            shares.set(f"t{name}", number + name % 3)
        if ask:
            assert [*shares.order] == [(-shares.over[name], name) for name in shares.in_order()]
    assert [name for _, name in shares.order] == shares.in_order()
    assert shares.order.first() == next(iter(shares.in_order()), None)


def test_only_what_changed_is_looked_at() -> None:
    """A thousand others cost nothing."""
    shares = Shares()
    for number in range(1000):
        shares.set(f"t{number}", 1 + number % 7)
    assert shares.order.first() == shares.in_order()[0]
    shares.asked.clear()
    for number in range(50):
        shares.set("t3", 100 + number)
        assert shares.order.first() == "t3"
        assert len([*shares.order]) == 1000
    assert shares.asked == {"t3": 50}


def test_nothing_is_kept_of_who_has_nothing_to_give() -> None:
    """Names of tenants that have gone do not add up."""
    shares = Shares()
    for number in range(1000):
        shares.set(f"t{number}", 1)
        assert shares.order.first() == f"t{number}"
        shares.set(f"t{number}", 0)
        assert shares.order.first() is None
    for kept in (shares.order._ranks, shares.order._order, shares.order._changed):
        assert len(kept) == 0


def test_names_that_come_and_go_do_not_add_up_while_nobody_asks() -> None:
    """However many; only who has something to give is kept, and as much again for those who had."""
    shares = Shares()
    for number in range(50):
        shares.set(f"stays{number}", 1 + number)
    for number in range(30_000):
        shares.set(f"t{number}", 1)
        shares.set(f"t{number}", 0)
        assert len(shares.order._changed) + len(shares.order._order) <= 2 * 50 + 2 * FEW
    assert shares.asked.total() <= 2 * 30_000 + 50, "a change is looked at about once"
    assert [name for _, name in shares.order] == [f"stays{number}" for number in range(49, -1, -1)]
    assert len(shares.order._changed) == 0


def test_a_crowd_that_has_gone_is_forgotten() -> None:
    """Its ranks too, once as many others have come."""
    shares = Shares()
    crowd = 5000
    for over in (1, 0):
        for number in range(crowd):
            shares.set(f"t{number}", over)
    for number in range(crowd + 2 * FEW):
        shares.set(f"later{number}", 0)
    for kept in (shares.order._ranks, shares.order._order, shares.order._changed):
        assert len(kept) <= FEW
