"""Quotas, and the book that keeps them coverable."""

from __future__ import annotations

from typing import Any

import pytest

from lamina_kvtier import InvalidQuota, PolicyNotLoaded, Quota, QuotaBook, QuotaNotCoverable


def book(capacity: int = 100, headroom: int = 10, **policies: Quota) -> QuotaBook:
    loaded = QuotaBook(capacity, headroom)
    loaded.load(policies)
    return loaded


@pytest.mark.parametrize(
    "numbers",
    [
        {"reserved": -1, "limit": 5, "pin_limit": -1},
        {"reserved": 6, "limit": 5},
        {"reserved": 2, "limit": 5, "pin_limit": 3},
        {"reserved": 1.5, "limit": 5},
        {"reserved": True, "limit": 5},
        {"reserved": 1, "limit": 5, "weight": 0},
        {"reserved": 1, "limit": 5, "weight": float("nan")},
        {"reserved": 1, "limit": 5, "weight": float("inf")},
        {"reserved": 1, "limit": 5, "weight": "2"},
        {"reserved": 1, "limit": 5, "weight": True},
    ],
)
def test_numbers_that_are_no_quota(numbers: dict[str, Any]) -> None:
    """Each is refused when it is written down, not when it is used."""
    with pytest.raises(InvalidQuota):
        Quota(**numbers)


@pytest.mark.parametrize("headroom", [-1, 101])
def test_headroom_is_part_of_the_capacity(headroom: int) -> None:
    with pytest.raises(InvalidQuota):
        QuotaBook(100, headroom)


def test_a_namespace_without_a_quota_has_nothing_reserved_and_no_bound() -> None:
    """Nobody is shut out because a policy is missing."""
    assert book().of("anybody") == Quota(reserved=0, limit=100, pin_limit=0, weight=1.0)


def test_a_policy_that_is_not_coverable_is_refused_with_numbers() -> None:
    """Nothing is rescaled: the promise that was there stays as it was."""
    kept = Quota(reserved=60, limit=100)
    policies = book(a=kept)
    with pytest.raises(QuotaNotCoverable, match="'b' wants 31 reserved") as refused:
        policies.set("b", Quota(reserved=31, limit=31))
    assert (refused.value.limit, refused.value.need, refused.value.have) == (90, 31, 30)
    assert refused.value.decision_id.startswith("kv-")
    assert policies.policies() == {"a": kept}
    policies.set("b", Quota(reserved=30, limit=31))
    assert policies.reserved == 90


def test_changing_a_quota_gives_back_its_own_reservation_first() -> None:
    policies = book(a=Quota(reserved=90, limit=90))
    policies.set("a", Quota(reserved=80, limit=90))
    policies.set("b", Quota(reserved=10, limit=10))
    policies.remove("a")
    policies.remove("never set")
    assert (policies.reserved, policies.of("a")) == (10, policies.default)


def test_loading_is_all_or_nothing() -> None:
    policies = book(a=Quota(reserved=50, limit=50))
    with pytest.raises(QuotaNotCoverable) as refused:
        policies.load({"b": Quota(reserved=50, limit=50), "c": Quota(reserved=50, limit=50)})
    assert (refused.value.limit, refused.value.need) == (90, 100)
    assert list(policies.policies()) == ["a"]


def test_until_policy_is_loaded_nothing_can_be_changed() -> None:
    """A change before the rest is known could be judged wrongly."""
    policies = QuotaBook(100)
    for change in (lambda: policies.set("a", policies.default), lambda: policies.remove("a")):
        with pytest.raises(PolicyNotLoaded) as refused:
            change()
        assert refused.value.retry_after_s is not None
    assert not policies.loaded


def test_watchers_hear_of_changes_only() -> None:
    policies, heard = book(), []
    policies.watch(heard.append)
    policies.set("a", Quota(reserved=1, limit=1))
    with pytest.raises(QuotaNotCoverable):
        policies.set("b", Quota(reserved=90, limit=90))
    policies.remove("b")
    policies.load({})
    assert heard == ["a", None]


def test_the_ceiling_leaves_out_what_others_reserve_and_what_may_be_pinned() -> None:
    """It depends on policy alone, so that a request that is below it stays possible."""
    policies = book(a=Quota(reserved=40, limit=80, pin_limit=15), b=Quota(reserved=20, limit=100))
    assert policies.ceiling("a") == 90 - 20 - 15
    assert policies.ceiling("b") == 90 - 40
    assert policies.ceiling("anybody") == 90 - 60
    policies.set("a", Quota(reserved=40, limit=50, pin_limit=40))
    assert policies.ceiling("a") == 10


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        (Quota(128, 256, 64), Quota(2, 4, 1)),
        (Quota(129, 255, 127, weight=3.0), Quota(3, 3, 1, weight=3.0)),
        (Quota(100, 100, 100), Quota(1, 1, 1)),
        (Quota(10, 63), Quota(0, 0)),
        (Quota(0, 10_000), Quota(0, 156)),
    ],
)
def test_bytes_become_whole_blocks(wanted: Quota, expected: Quota) -> None:
    """What is reserved rounds up, limits round down, and a limit that ends within a block bounds what is reserved."""
    assert wanted.in_units(64) == expected


def test_what_is_not_coverable_can_be_asked_before_it_is_loaded() -> None:
    """So that several tiers take their quotas over together, or none of them."""
    policies = QuotaBook(100, headroom=10)
    policies.require_coverable({"a": Quota(90, 100)})
    assert not policies.loaded
    with pytest.raises(QuotaNotCoverable) as refused:
        policies.require_coverable({"a": Quota(90, 100), "b": Quota(1, 1)})
    assert (refused.value.limit, refused.value.need) == (90, 91)
