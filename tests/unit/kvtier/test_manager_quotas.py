"""The manager with quotas: who pays, who gives, and what is refused."""

from __future__ import annotations

import pytest

from lamina_kvtier import (
    UNOWNED,
    BlockMisuse,
    CopyOnWrite,
    KvManager,
    OutOfBlocks,
    OverLimit,
    PrefixMatch,
    Quota,
    QuotaBook,
)


def name(number: int) -> bytes:
    return number.to_bytes(32, "big")


def pool(num_blocks: int = 8, **policies: Quota) -> KvManager:
    book = QuotaBook(num_blocks)
    book.load(policies)
    return KvManager(num_blocks, quotas=book)


def cached(manager: KvManager, owner: str, *names: int) -> list[int]:
    """One request with these identities, computed and released; returns its former table."""
    table = manager.allocate(len(names), owner=owner)
    for block, number in zip(table, names, strict=True):
        manager.publish(block, name(number))
    manager.release(table)
    return table


def usage(manager: KvManager, owner: str) -> int:
    assert manager.ledger is not None
    manager.check_integrity()
    return manager.ledger.usage(owner)


def test_without_quotas_nobody_pays() -> None:
    """Owners may be named all the same."""
    manager = KvManager(4)
    (block, *_) = manager.allocate(2, owner="a")
    assert (manager.ledger, manager.owner_of(block), manager.evictions()) == (None, None, {})
    assert manager.available_to("a") == 2


def test_the_quotas_must_be_for_this_pool() -> None:
    with pytest.raises(BlockMisuse, match="for 5 blocks, but there are 4"):
        KvManager(4, quotas=QuotaBook(5))


def test_a_block_is_paid_for_from_allocation_until_it_is_free() -> None:
    """Active, shared, cached: always once, by the one who allocated it."""
    manager = pool()
    table = manager.allocate(2, owner="a")
    manager.publish(table[0], name(1))
    manager.fork(table)
    assert usage(manager, "a") == 2
    manager.release(table)
    manager.release(table)
    assert usage(manager, "a") == 1
    manager.acquire([name(1)])
    assert (usage(manager, "a"), manager.owner_of(table[0]), manager.owner_of(table[1])) == (1, "a", None)
    manager.forget([name(1)])
    assert usage(manager, "a") == 1
    manager.release([table[0]])
    assert usage(manager, "a") == 0


def test_nobody_named_is_an_owner_too() -> None:
    manager = pool()
    manager.allocate(3)
    assert usage(manager, UNOWNED) == 3


def test_a_copy_is_paid_for_by_the_writer() -> None:
    """Public blocks are the operator's; what a tenant writes is the tenant's."""
    manager = pool()
    (block,) = manager.allocate(1, owner="public")
    manager.publish(block, name(1))
    manager.fork([block])
    assert isinstance(manager.make_writable(block, owner="a"), CopyOnWrite)
    assert (usage(manager, "public"), usage(manager, "a")) == (1, 1)
    manager.make_writable(block)
    assert usage(manager, "public") == 2


def test_beyond_a_reservation_the_furthest_over_its_share_gives_first() -> None:
    """However recently used: the flooding tenant pays for its flood."""
    manager = pool(b=Quota(reserved=2, limit=8), flood=Quota(reserved=1, limit=8, weight=0.5))
    cached(manager, "b", 1, 2, 3)
    flood = cached(manager, "flood", 11, 12, 13, 14, 15)
    assert manager.allocate(1, owner="b") == [flood[4]]
    assert manager.evictions() == {("flood", "over_share"): 1}
    assert manager.match([name(1), name(2), name(3)]) == 3


def test_then_ones_own_and_never_what_others_have_within_their_reservation() -> None:
    manager = pool(a=Quota(reserved=4, limit=8), b=Quota(reserved=4, limit=8))
    old = cached(manager, "a", 1, 2, 3, 4)
    cached(manager, "b", 11, 12, 13, 14)
    assert manager.allocate(4, owner="a") == [old[3], old[2], old[1], old[0]]
    assert manager.evictions() == {("a", "own"): 4}
    with pytest.raises(OutOfBlocks) as refused:
        manager.allocate(1, owner="a")
    assert (refused.value.limit, refused.value.need, refused.value.have) == (8, 1, 0)
    assert refused.value.retry_after_s is not None
    assert manager.available == 4, "b could have them"
    assert (manager.available_to("a"), manager.available_to("b"), manager.available_to("c")) == (0, 4, 0)


def test_at_its_limit_a_namespace_gives_up_its_own_however_much_is_free() -> None:
    manager = pool(a=Quota(reserved=0, limit=3))
    old = cached(manager, "a", 1, 2, 3)
    held = manager.allocate(2, owner="a")
    assert held == [old[2], old[1]]
    assert manager.evictions() == {("a", "limit"): 2}
    with pytest.raises(OverLimit) as refused:
        manager.allocate(2, owner="a")
    assert (refused.value.limit, refused.value.need, refused.value.have) == (3, 2, 1)
    assert usage(manager, "a") == 3


def test_a_lowered_limit_is_reached_at_the_next_allocation() -> None:
    """Nothing is lost at the moment of the change."""
    manager = pool(a=Quota(reserved=0, limit=6))
    cached(manager, "a", 1, 2, 3, 4, 5, 6)
    assert manager.ledger is not None
    manager.ledger.book.set("a", Quota(reserved=0, limit=2))
    assert usage(manager, "a") == 6
    manager.allocate(1, owner="a")
    assert usage(manager, "a") == 2


def test_until_policy_is_loaded_the_least_recently_used_goes() -> None:
    """Nobody is evicted because of a quota that nobody has read yet."""
    book = QuotaBook(4)
    manager = KvManager(4, quotas=book)
    oldest = cached(manager, "a", 1)
    cached(manager, "b", 11, 12, 13)
    assert manager.allocate(1, owner="b") == oldest
    assert manager.evictions() == {("a", "lru"): 1}
    with pytest.raises(OutOfBlocks):
        manager.allocate(4, owner="b")


def test_a_charge_covers_what_is_allocated_and_what_was_found() -> None:
    """What an admitted request was promised, step by step."""
    manager = pool(a=Quota(reserved=0, limit=6))
    cached(manager, "a", 1, 2)
    assert manager.ledger is not None
    charge = manager.ledger.reserve("a", 5)
    table = manager.acquire([name(1), name(2)], charge)
    assert charge.pending == 3
    table += manager.allocate(2, owner="a", charge=charge)
    assert (charge.pending, usage(manager, "a")) == (1, 4)
    for owner, count in (("b", 1), ("a", 2)):
        with pytest.raises(BlockMisuse, match="out of this charge"):
            manager.allocate(count, owner=owner, charge=charge)
    manager.ledger.refund(charge)
    manager.release(table)
    assert usage(manager, "a") == 2


# Pins


def test_a_pinned_block_is_not_evicted() -> None:
    """Not even when it is the only one; it is when the lease has ended, as if used just now."""
    manager = pool(3)
    pinned = cached(manager, "a", 1)
    cached(manager, "a", 2, 3)
    manager.pin([name(1)], "a")
    assert manager.is_pinned(pinned[0])
    assert (manager.usage().pinned, manager.usage().cached, manager.available) == (1, 3, 2)
    assert manager.preview([name(1)]) == PrefixMatch(known=1, cached=0, pinned=1)
    with pytest.raises(OutOfBlocks):
        manager.allocate(3, owner="a")
    manager.release(manager.allocate(2, owner="a"))
    assert manager.match([name(1)]) == 1
    manager.unpin([name(1)], "a")
    assert pinned[0] in manager.allocate(3, owner="a")


def test_a_pin_waits_for_its_block() -> None:
    """A pin is on contents: computed later, or found while somebody holds it."""
    manager = pool(2)
    manager.pin([name(1)], "a")
    table = manager.allocate(1, owner="a")
    manager.publish(table[0], name(1))
    manager.release(table)
    manager.check_integrity()
    assert manager.usage().pinned == 1
    assert manager.acquire([name(1)]) == table
    manager.check_integrity()
    manager.release(table)
    assert manager.drop_cached() == 0
    assert manager.forget([name(1)]) == 1
    manager.check_integrity()
    assert manager.usage().free == 2


def test_leases_are_counted() -> None:
    manager = KvManager(2)
    manager.pin([name(1)])
    manager.pin([name(1)])
    manager.unpin([name(1)])
    cached(manager, UNOWNED, 1)
    assert manager.usage().pinned == 1
    with pytest.raises(BlockMisuse, match="2 times: it has 1"):
        manager.unpin([name(1), name(1)])
    manager.unpin([name(1)])
    assert (manager.usage().pinned, manager.available) == (0, 2)
    manager.check_integrity()


def test_a_tenant_cannot_keep_the_operators_public_blocks() -> None:
    """Its lease on them has no effect, for its quota does not pay for them."""
    manager = pool(2)
    cached(manager, "public", 1, 2)
    manager.pin([name(1), name(2)], "a")
    assert manager.available_to("b") == 2
    manager.check_integrity()
    manager.unpin([name(1), name(2)], "a")
    assert manager.usage().pinned == 0
