"""The cache for what the database says."""

from __future__ import annotations

from fixtures.tenancy import Time
from lamina.tenancy.cache import TtlCache


def test_an_entry_lives_for_its_time(time: Time) -> None:
    """Served before ttl_s, gone at ttl_s."""
    cache = TtlCache[str, int](ttl_s=5, monotonic=time.monotonic)
    cache.put("a", 1, epoch=cache.epoch)
    time.advance(seconds=4.9)
    assert cache.get("a") == 1
    time.advance(seconds=0.1)
    assert cache.get("a") is None
    assert len(cache) == 0


def test_being_used_does_not_prolong_a_life(time: Time) -> None:
    """Otherwise a busy key would never hear of its revocation elsewhere."""
    cache = TtlCache[str, int](ttl_s=5, monotonic=time.monotonic)
    cache.put("a", 1, epoch=cache.epoch)
    for _ in range(4):
        time.advance(seconds=1)
        assert cache.get("a") == 1
    time.advance(seconds=1)
    assert cache.get("a") is None


def test_a_look_up_that_began_before_a_change_is_not_remembered(time: Time) -> None:
    """Otherwise a revoked key would live on for ttl_s."""
    cache = TtlCache[str, int](monotonic=time.monotonic)
    epoch = cache.epoch
    cache.forget("a")
    cache.put("a", 1, epoch=epoch)
    assert cache.get("a") is None


def test_capacity_is_kept_and_the_least_recently_used_leaves(time: Time) -> None:
    """The cache cannot grow without bound."""
    cache = TtlCache[str, int](capacity=2, monotonic=time.monotonic)
    for key in ("a", "b"):
        cache.put(key, 1, epoch=cache.epoch)
    cache.get("a")
    cache.put("c", 1, epoch=cache.epoch)
    assert len(cache) == 2
    assert cache.get("b") is None
    assert cache.get("a") == 1


def test_clear(time: Time) -> None:
    """Everything goes, and look-ups under way are not remembered either."""
    cache = TtlCache[str, int](monotonic=time.monotonic)
    epoch = cache.epoch
    cache.put("a", 1, epoch=epoch)
    cache.clear()
    cache.put("a", 1, epoch=epoch)
    assert len(cache) == 0
