"""Who is furthest over its share: the order after any history, and what a question costs."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from lamina_kvtier.over_shares import OverShares

NAMES = "abcdef"
STEPS = st.lists(st.tuples(st.sampled_from(NAMES), st.integers(-2, 4), st.booleans()), max_size=60)


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
