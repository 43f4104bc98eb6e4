"""Fair shares of a path: by weight while everybody wants it, all of it for one alone, a short wait for the small."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina.engine.tier_shares import Shares

SIZES = st.integers(1, 8)


@given(
    lines=st.dictionaries(
        st.sampled_from("abcd"), st.tuples(st.sampled_from([0.5, 1.0, 3.0]), st.lists(SIZES, min_size=40, max_size=60))
    ),
    served=st.integers(1, 200),
)
def test_tenants_that_always_want_more_get_bytes_by_weight(
    lines: dict[str, tuple[float, list[int]]], served: int
) -> None:
    """As long as both wait, two tenants differ by less than one transfer of each, in bytes per weight."""
    shares: Shares[tuple[str, int]] = Shares(8)
    for tenant, (weight, sizes) in lines.items():
        for number, size in enumerate(sizes):
            shares.want((tenant, number), tenant, weight, size)
    moved, left = Counter[str](), Counter({tenant: len(sizes) for tenant, (_, sizes) in lines.items()})
    for _ in range(served):
        if not left or min(left.values()) == 0:
            break
        item = shares.start()
        assert item is not None
        tenant, number = item
        moved[tenant] += lines[tenant][1][number]
        left[tenant] -= 1
        shares.ended(item)
        for one in lines:
            for other in lines:
                apart = moved[one] / lines[one][0] - moved[other] / lines[other][0]
                assert apart <= 8 / lines[one][0] + 8 / lines[other][0] + 1e-9


@given(queued=st.integers(1, 300), before=st.integers(0, 20), size=SIZES, others=st.integers(1, 4))
def test_a_flood_delays_another_tenant_by_one_transfer_each(queued: int, before: int, size: int, others: int) -> None:
    """However much the others have waiting, and have moved before it came."""
    shares: Shares[str] = Shares(8)
    for other in range(others):
        for number in range(queued):
            shares.want(f"{other}/{number}", str(other), 1.0, size)
    for _ in range(before):
        item = shares.start()
        if item is not None:
            shares.ended(item)
    shares.want("mine", "me", 1.0, 5)
    waited = []
    while (item := shares.start()) not in ("mine", None):
        assert item is not None
        waited.append(item.split("/")[0])
        shares.ended(item)
    assert all(times <= 1 for times in Counter(waited).values())


@given(
    st.lists(st.tuples(st.sampled_from(["want", "start", "end", "drop"]), st.sampled_from("ab"), SIZES), max_size=60)
)
def test_any_use_keeps_the_bound_and_loses_nothing(steps: list[tuple[str, str, int]]) -> None:
    shares: Shares[int] = Shares(10)
    waiting: dict[int, tuple[str, int]] = {}
    moving: dict[int, int] = {}
    for number, (what, tenant, size) in enumerate(steps):
        if what == "want":
            shares.want(number, tenant, 1.0, size)
            waiting[number] = (tenant, size)
        elif what == "start":
            item = shares.start()
            if item is None:
                assert not waiting or sum(moving.values()) + min(size for _, size in waiting.values()) > 10 or moving
            else:
                moving[item] = waiting.pop(item)[1]
        elif what == "end" and moving:
            shares.ended(item := next(iter(moving)))
            del moving[item]
        elif what == "drop" and waiting:
            item = next(iter(waiting))
            shares.withdraw(item, waiting.pop(item)[0])
        assert shares.moving == sum(moving.values())
        assert shares.moving <= 10
    for item in moving:
        shares.ended(item)
    rest = []
    while (item := shares.start()) is not None:
        rest.append(item)
        shares.ended(item)
    assert sorted(rest) == sorted(waiting)


def test_more_than_the_bound_moves_alone() -> None:
    shares: Shares[str] = Shares(10)
    shares.want("small", "a", 1.0, 4)
    shares.want("huge", "b", 1.0, 50)
    assert shares.start() == "small"
    assert shares.start() is None
    shares.ended("small")
    assert shares.start() == "huge"
    assert shares.bytes_before("a", 1.0) == 50
    shares.ended("huge")
    assert shares.moving == 0


def test_idleness_earns_no_credit() -> None:
    """Who comes late does not catch up with what it never asked for."""
    shares: Shares[str] = Shares(1)
    for number in range(40):
        shares.want(f"a{number}", "a", 1.0, 1)
    for _ in range(20):
        shares.ended(shares.start() or "")
    for number in range(40):
        shares.want(f"b{number}", "b", 1.0, 1)
    order = []
    for _ in range(10):
        item = shares.start()
        assert item is not None
        order.append(item[0])
        shares.ended(item)
    assert abs(order.count("a") - order.count("b")) <= 1


@pytest.mark.parametrize(("weight", "size"), [(0.0, 1), (-1.0, 1), (float("nan"), 1), (1.0, 0)])
def test_what_is_no_transfer(weight: float, size: int) -> None:
    with pytest.raises(ValueError, match="not a transfer"):
        Shares[str](1).want("x", "a", weight, size)
    with pytest.raises(ValueError, match="nothing can move"):
        Shares[str](0)
