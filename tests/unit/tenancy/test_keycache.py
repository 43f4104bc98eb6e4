"""The cache of verified keys."""

from __future__ import annotations

from fixtures.tenancy import Time
from lamina.tenancy.keycache import CachedKey, KeyCache
from lamina.tenancy.principal import Principal

MAC, OTHER = bytes(32), bytes([1]) * 32


def entry(key_id: str = "key_a", mac: bytes = MAC) -> CachedKey:
    principal = Principal(
        tenant_id="ten_a", tenant_name="a", key_id=key_id, scopes=frozenset(), weight=1.0, namespace="00"
    )
    return CachedKey(mac, None, principal)


def test_an_entry_lives_for_its_time(time: Time) -> None:
    """Served before ttl_s, gone at ttl_s."""
    cache = KeyCache(ttl_s=5, monotonic=time.monotonic)
    cache.put("key_a", entry(), epoch=cache.epoch)
    time.advance(seconds=4.9)
    assert cache.get("key_a", MAC) == entry()
    time.advance(seconds=0.1)
    assert cache.get("key_a", MAC) is None
    assert len(cache) == 0


def test_a_wrong_secret_for_a_cached_id_misses(time: Time) -> None:
    """Knowing a key's public id is not enough, and a wrong try does not evict the right one."""
    cache = KeyCache(monotonic=time.monotonic)
    cache.put("key_a", entry(), epoch=cache.epoch)
    assert cache.get("key_a", OTHER) is None
    assert cache.get("key_a", MAC) is not None


def test_a_look_up_that_began_before_a_revocation_is_not_remembered(time: Time) -> None:
    """Otherwise a revoked key would live on for ttl_s."""
    cache = KeyCache(monotonic=time.monotonic)
    epoch = cache.epoch
    cache.forget("key_a")
    cache.put("key_a", entry(), epoch=epoch)
    assert cache.get("key_a", MAC) is None


def test_capacity_is_kept_and_the_least_recently_used_leaves(time: Time) -> None:
    """The cache cannot grow without bound."""
    cache = KeyCache(capacity=2, monotonic=time.monotonic)
    for key_id in ("key_a", "key_b"):
        cache.put(key_id, entry(key_id), epoch=cache.epoch)
    cache.get("key_a", MAC)
    cache.put("key_c", entry("key_c"), epoch=cache.epoch)
    assert len(cache) == 2
    assert cache.get("key_b", MAC) is None
    assert cache.get("key_a", MAC) is not None


def test_clear(time: Time) -> None:
    """Everything goes, and look-ups under way are not remembered either."""
    cache = KeyCache(monotonic=time.monotonic)
    epoch = cache.epoch
    cache.put("key_a", entry(), epoch=epoch)
    cache.clear()
    cache.put("key_a", entry(), epoch=epoch)
    assert len(cache) == 0
