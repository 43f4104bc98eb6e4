"""Who computed a block, who pays for it, and how all blocks of one of them are dropped."""

from __future__ import annotations

import pytest

from lamina_kvtier.errors import BlockMisuse, IntegrityError
from lamina_kvtier.ghosts import Ghosts, segments_for
from lamina_kvtier.host_tier import HostTier
from lamina_kvtier.manager import KvManager
from lamina_kvtier.namespace_counts import FOLDED, NamespaceCounts
from lamina_kvtier.quota import Quota, QuotaBook
from lamina_kvtier.reasons import Reason
from lamina_kvtier.tier import NO_ADAPTER, BlockKey, adapter_bytes

ONE, TWO = b"\x01" * 32, b"\x02" * 32


def name(number: int) -> bytes:
    return number.to_bytes(32, "big")


def manager(blocks: int = 16) -> KvManager:
    return KvManager(blocks, quotas=QuotaBook(blocks), ghosts=Ghosts(segments_for(blocks)))


def cached(kv: KvManager, owner: str, first: int, count: int, adapter: bytes = NO_ADAPTER) -> list[bytes]:
    ids = [name(first + at) for at in range(count)]
    table = kv.allocate(count, owner=owner)
    for block, identity in zip(table, ids, strict=True):
        assert kv.publish(block, identity, adapter=adapter) == block
    kv.release(table)
    return ids


def test_a_block_knows_who_computed_it() -> None:
    """From when it is published until it loses its name, whatever takes that."""
    kv = manager(8)
    cached(kv, "ann", 0, 2, ONE)
    (mine,) = kv.acquire([name(0)])
    assert kv.adapter_of(mine) == ONE
    assert kv.blocks_by_adapter() == {ONE: 2}
    kv.forget([name(0)])
    assert kv.adapter_of(mine) == NO_ADAPTER
    kv.check_integrity([[mine]])
    kv.release([mine])
    held = kv.allocate(8, owner="bob")  # evicts the other one
    assert kv.blocks_by_adapter() == {}
    kv.publish(held[0], name(7), adapter=TWO)
    kv.publish(held[1], name(7), adapter=ONE)  # known already, so this one stays nameless
    assert (kv.adapter_of(held[0]), kv.adapter_of(held[1])) == (TWO, NO_ADAPTER)
    kv.release(held)
    kv.drop_cached()
    assert kv.blocks_by_adapter() == {}
    kv.check_integrity([])


def test_digests() -> None:
    """As requests have them, and no other length."""
    assert adapter_bytes(None) == NO_ADAPTER
    assert adapter_bytes("01" * 32) == ONE
    kv = manager()
    (block,) = kv.allocate(1)
    with pytest.raises(BlockMisuse):
        kv.publish(block, name(0), adapter=b"short")


def test_forgetting_an_owner() -> None:
    """Its cached blocks are free at once, active and pinned ones too; others' are untouched, and misses know why."""
    kv = manager()
    mine, others = cached(kv, "ann", 0, 4), cached(kv, "bob", 100, 3)
    table = kv.acquire(mine[:2])
    kv.pin(mine[3:], "ann")
    assert kv.forget_where(owner="ann") == 4
    assert (kv.match(mine), kv.match(others)) == (0, 3)
    ghost = kv.ghost_of(mine[0])
    assert ghost is not None
    assert ghost.reason is Reason.DELETED
    assert (kv.usage().active, kv.usage().cached) == (2, 3)
    kv.check_integrity([table])
    kv.release(table)
    assert kv.usage().free == 13
    kv.check_integrity([])
    assert kv.forget_where(owner="ann") == kv.forget_where(owner="nobody") == 0


def test_forgetting_an_adapter() -> None:
    """Whoever pays for what it computed."""
    kv = manager()
    kept = [*cached(kv, "ann", 0, 2), *cached(kv, "ann", 10, 2, TWO)]
    gone = [*cached(kv, "ann", 20, 2, ONE), *cached(kv, "bob", 30, 2, ONE)]
    assert kv.forget_where(adapter=ONE, owner="bob") == 2
    assert kv.forget_where(adapter=ONE) == 2
    assert all(map(kv.holds, kept))
    assert not any(map(kv.holds, gone))
    kv.check_integrity([])
    with pytest.raises(BlockMisuse):
        kv.forget_where()


def test_the_proof_sees_a_wrong_maker() -> None:
    """Counts and names have to agree with the blocks."""
    kv = manager()
    cached(kv, "ann", 0, 1, ONE)
    kv._makers.forget(kv.find(name(0)) or 0)
    kv._makers.note(15, TWO)
    with pytest.raises(IntegrityError, match="nameless"):
        kv.check_integrity([])


def test_host_memory_forgets_what_it_is_told() -> None:
    """Stored blocks, those being written, and held ones, which are free afterwards."""
    tier = HostTier(8, 64)
    keys = [BlockKey(name(at), "ann" if at < 4 else "bob", ONE if at % 2 else NO_ADAPTER) for at in range(6)]
    given = [room for room in tier.reserve(keys) if room is not None]
    tier.commit(given[:3])
    tier.commit(given[4:])
    assert tier.slots_by_adapter() == {ONE: 3}
    (held,) = tier.find([name(0)])
    tier.hold([held])
    assert tier.forget_where(lambda key: key.namespace == "ann", Reason.DELETED) == 4
    assert not any(tier.knows(name(at)) for at in range(4))
    assert all(tier.stores(name(at)) for at in (4, 5))
    tier.check_integrity()
    tier.release([held])
    tier.commit([given[3]])
    assert tier.slots_of("ann") == 0
    assert tier.slots_by_adapter() == {ONE: 1}
    assert tier.evictions == {("ann", Reason.DELETED): 3}
    tier.check_integrity()
    assert tier.forget_where(lambda key: key.adapter == ONE, Reason.DELETED) == 1
    assert tier.slots_by_adapter() == {}
    tier.check_integrity()


def test_counts_are_bounded() -> None:
    """The longest known namespaces that have nothing are one; the others keep their numbers, and the sum is right."""
    counts: NamespaceCounts[str] = NamespaceCounts(lambda namespace: namespace in ("n3", "n4"), most=10)
    for at in range(1000):
        counts.add(f"n{at}", "lru", 2)
        counts.add("n3", "own")
    names = {namespace for namespace, _ in counts}
    assert len(names) <= 10 + 256 + 1
    assert {"n3", "n4", "n999", FOLDED} <= names
    assert "n0" not in names
    assert counts["n3", "own"] == 1000
    assert counts["never", "lru"] == 0
    assert ("never", "lru") not in counts
    assert sum(counts.values()) == 3000


def test_evictions_of_many_owners_are_bounded() -> None:
    """But for those with blocks or a quota."""
    kv = KvManager(2, quotas=QuotaBook(2))
    assert kv.ledger is not None
    kv.ledger.book.load({"a": Quota(0, 2)})
    for at, owner in enumerate(["a", *(f"n{at}" for at in range(5000))]):
        cached(kv, owner, 10 * at, 1)
    counted = kv.evictions()
    assert sum(counted.values()) == 5001 - 2
    assert len({namespace for namespace, _ in counted}) <= 4096 + 256 + 1
    assert counted[FOLDED, "over_share"] > 0
    assert counted["a", "over_share"] == 1
