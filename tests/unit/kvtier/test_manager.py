"""Each rule of the KV manager."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from lamina_kvtier import (
    BlockMisuse,
    BlockUsage,
    CopyOnWrite,
    KvError,
    KvManager,
    OutOfBlocks,
    PrefixMatch,
)
from lamina_kvtier.ghosts import Ghost, Ghosts
from lamina_kvtier.quota import Quota, QuotaBook
from lamina_kvtier.reasons import Reason


def name(number: int) -> bytes:
    return number.to_bytes(32, "big")


def state(manager: KvManager) -> Any:
    """Everything that an operation could change."""
    return (
        list(manager._unheld),
        list(manager._references._counts),
        manager._index._blocks.copy(),
        manager._index._identities.copy(),
        manager.usage(),
        (manager.hit_blocks, manager.evicted_blocks, manager.available),
    )


def cached(manager: KvManager, *names: int) -> list[int]:
    """One sequence with these identities, computed and released; returns its former table."""
    table = manager.allocate(len(names))
    for block, number in zip(table, names, strict=True):
        manager.publish(block, name(number))
    manager.release(table)
    return table


# Allocation and release


def test_a_new_pool_is_free() -> None:
    """All blocks, block 0 included, are usable."""
    manager = KvManager(4, 16)
    assert manager.usage() == BlockUsage(total=4, free=4, active=0, cached=0)
    assert (manager.available, manager.num_blocks, manager.block_size) == (4, 4, 16)
    assert sorted(manager.allocate(4)) == [0, 1, 2, 3]


def test_allocation_is_all_or_nothing() -> None:
    """Too large a wish says what was needed and what there is, and takes nothing."""
    manager = KvManager(4)
    manager.allocate(2)
    before = state(manager)
    with pytest.raises(OutOfBlocks, match="3 KV blocks are needed, but only 2") as caught:
        manager.allocate(3)
    assert (caught.value.need, caught.value.have) == (3, 2)
    assert isinstance(caught.value, KvError)
    assert state(manager) == before


def test_nothing_may_be_allocated() -> None:
    """Zero blocks are a valid wish, also of an exhausted pool."""
    manager = KvManager(1)
    manager.allocate(1)
    assert manager.allocate(0) == []


def test_released_blocks_without_identity_are_free() -> None:
    """An unpublished block's contents are worthless once nobody holds it."""
    manager = KvManager(4)
    table = manager.allocate(3)
    manager.release(table)
    assert manager.usage() == BlockUsage(total=4, free=4, active=0, cached=0)
    assert manager.evicted_blocks == 0


def test_a_forked_block_needs_as_many_releases() -> None:
    """Each reference is dropped once."""
    manager = KvManager(2)
    table = manager.allocate(1)
    manager.fork(table)
    manager.release(table)
    assert manager.usage().active == 1
    manager.release(table)
    assert manager.usage().free == 2


def test_a_block_named_twice_loses_two_references() -> None:
    """Tables of two choices may be released in one call."""
    manager = KvManager(2)
    (block,) = manager.allocate(1)
    manager.fork([block])
    manager.release([block, block])
    assert manager.usage().active == 0


# Prefix cache


def test_released_published_blocks_are_cached_and_revived() -> None:
    """A later sequence with the same prefix gets the same blocks back."""
    manager = KvManager(4)
    table = cached(manager, 1, 2)
    assert manager.usage() == BlockUsage(total=4, free=2, active=0, cached=2)
    assert manager.available == 4
    assert manager.acquire([name(1), name(2), name(3)]) == table
    assert manager.usage() == BlockUsage(total=4, free=2, active=2, cached=0)
    assert manager.hit_blocks == 2


def test_active_blocks_are_shared() -> None:
    """A prefix that somebody is using right now is a hit too."""
    manager = KvManager(4)
    table = manager.allocate(1)
    manager.publish(table[0], name(1))
    assert manager.acquire([name(1)]) == table
    manager.release(table)
    manager.check_integrity([table])


def test_match_stops_at_the_first_unknown_block() -> None:
    """A known block behind a gap does not count."""
    manager = KvManager(4)
    cached(manager, 1, 2, 4)
    assert manager.match([name(1), name(2), name(3), name(4)]) == 2
    assert manager.match([name(3), name(4)]) == 0
    assert manager.match([]) == 0
    assert manager.acquire([name(3), name(4)]) == []


def test_match_changes_nothing() -> None:
    """Looking is not using: neither order nor counters move."""
    manager = KvManager(4)
    cached(manager, 1)
    cached(manager, 2)
    before = state(manager)
    assert manager.match([name(1)]) == 1
    assert state(manager) == before


def test_without_prefix_caching_nothing_is_known() -> None:
    """Publishing is harmless and every released block is free."""
    manager = KvManager(2, prefix_caching=False)
    table = manager.allocate(1)
    assert manager.publish(table[0], name(1)) == table[0]
    assert (manager.match([name(1)]), manager.acquire([name(1)])) == (0, [])
    manager.release(table)
    assert manager.usage() == BlockUsage(total=2, free=2, active=0, cached=0)


# Eviction


def test_free_blocks_are_taken_before_cached_ones() -> None:
    """Nothing is evicted while something is free."""
    manager = KvManager(3)
    (kept,) = cached(manager, 1)
    assert kept not in manager.allocate(2)
    assert (manager.evicted_blocks, manager.match([name(1)])) == (0, 1)
    assert manager.allocate(1) == [kept]
    assert (manager.evicted_blocks, manager.match([name(1)])) == (1, 0)


def test_the_least_recently_used_cached_block_goes_first() -> None:
    """A hit makes a block young again."""
    manager = KvManager(3)
    for number in (1, 2, 3):
        cached(manager, number)
    manager.release(manager.acquire([name(1)]))
    manager.allocate(2)
    assert [manager.match([name(number)]) for number in (1, 2, 3)] == [1, 0, 0]


def test_the_tail_of_a_sequence_goes_before_its_head() -> None:
    """Under pressure a cached prefix gets shorter and never loses its beginning first."""
    manager = KvManager(4)
    cached(manager, 1, 2, 3, 4)
    for left in (3, 2, 1, 0):
        manager.allocate(1)
        assert manager.match([name(number) for number in (1, 2, 3, 4)]) == left


def test_a_prefix_shared_by_a_living_sequence_stays() -> None:
    """Only the part that nobody holds can be evicted."""
    manager = KvManager(4)
    cached(manager, 1, 2, 3)
    manager.acquire([name(1)])
    manager.allocate(3)
    assert manager.match([name(1), name(2)]) == 1
    with pytest.raises(OutOfBlocks):
        manager.allocate(1)


# Copy on write


def test_an_exclusive_unpublished_block_is_written_in_place() -> None:
    """No copy where nobody could see the write."""
    manager = KvManager(2)
    (block,) = manager.allocate(1)
    before = state(manager)
    assert manager.make_writable(block) is None
    assert state(manager) == before


def test_a_shared_block_is_copied() -> None:
    """The writer moves to a fresh block and the other holder keeps the old one."""
    manager = KvManager(2)
    (block,) = manager.allocate(1)
    manager.fork([block])
    assert manager.make_writable(block) == CopyOnWrite(source=block, target=1 - block)
    manager.check_integrity([[block], [1 - block]])
    assert manager.make_writable(block) is None


def test_a_published_block_is_copied_even_if_exclusive() -> None:
    """Others may find it by identity at any moment, so its bytes are frozen; it stays cached."""
    manager = KvManager(2)
    (block,) = manager.allocate(1)
    manager.publish(block, name(1))
    copy = manager.make_writable(block)
    assert copy == CopyOnWrite(source=block, target=1 - block)
    assert manager.usage() == BlockUsage(total=2, free=0, active=1, cached=1)
    assert manager.acquire([name(1)]) == [block]


def test_copy_on_write_may_evict() -> None:
    """A cached block makes room for the copy."""
    manager = KvManager(2)
    (block,) = manager.allocate(1)
    cached(manager, 1)
    manager.fork([block])
    assert manager.make_writable(block) == CopyOnWrite(source=block, target=1 - block)
    assert manager.evicted_blocks == 1


def test_copy_on_write_without_room_changes_nothing() -> None:
    """The reference on the shared block is kept when no target can be had."""
    manager = KvManager(1)
    (block,) = manager.allocate(1)
    manager.fork([block])
    before = state(manager)
    with pytest.raises(OutOfBlocks) as caught:
        manager.make_writable(block)
    assert (caught.value.need, caught.value.have) == (1, 0)
    assert state(manager) == before


# Publishing


def test_a_duplicate_stays_anonymous() -> None:
    """Two sequences computed the same block: the first is known, the second is freed after use."""
    manager = KvManager(3)
    first, second = manager.allocate(2)
    assert manager.publish(first, name(1)) == first
    assert manager.publish(second, name(1)) == first
    manager.release([second])
    assert manager.usage() == BlockUsage(total=3, free=2, active=1, cached=0)
    assert manager.acquire([name(1)]) == [first]


def test_a_duplicate_can_be_swapped_for_the_canonical_block() -> None:
    """Acquire the canonical one, release the duplicate: one block less is used."""
    manager = KvManager(3)
    (canonical,) = cached(manager, 1)
    (duplicate,) = manager.allocate(1)
    assert manager.publish(duplicate, name(1)) == canonical
    assert manager.acquire([name(1)]) == [canonical]
    manager.release([duplicate])
    manager.check_integrity([[canonical]])
    assert manager.usage() == BlockUsage(total=3, free=2, active=1, cached=0)


def test_a_duplicate_can_be_published_after_the_first_was_evicted() -> None:
    """Once the identity is unknown again, anyone who has the block may publish it."""
    manager = KvManager(2)
    first = manager.allocate(1)
    second = manager.allocate(1)
    manager.publish(first[0], name(1))
    manager.publish(second[0], name(1))
    manager.release(first)
    assert manager.allocate(1) == first
    assert manager.publish(second[0], name(1)) == second[0]


def test_publishing_twice_is_harmless() -> None:
    """The same block by the same identity is a repetition and not an error."""
    manager = KvManager(2)
    (block,) = manager.allocate(1)
    manager.publish(block, name(1))
    before = state(manager)
    assert manager.publish(block, name(1)) == block
    assert state(manager) == before


# Forgetting


def test_drop_cached_frees_all_cached_and_no_active_blocks() -> None:
    """What is in use stays known; what is not, is gone, and not counted as evicted."""
    manager = KvManager(4)
    cached(manager, 1, 2)
    (block,) = manager.acquire([name(1)])
    assert manager.drop_cached() == 1
    assert manager.usage() == BlockUsage(total=4, free=3, active=1, cached=0)
    assert (manager.match([name(1), name(2)]), manager.evicted_blocks) == (1, 0)
    assert manager.drop_cached() == 0
    manager.check_integrity([[block]])


def test_forget_makes_identities_unknown() -> None:
    """Cached blocks become free and next in line; unknown identities are ignored."""
    manager = KvManager(3)
    (first,) = cached(manager, 1)
    cached(manager, 2)
    assert manager.forget([name(1), name(9), name(1)]) == 1
    assert manager.usage() == BlockUsage(total=3, free=2, active=0, cached=1)
    assert (manager.match([name(1)]), manager.match([name(2)])) == (0, 1)
    assert manager.allocate(1) == [first]
    manager.check_integrity([[first]])


def test_a_forgotten_active_block_stays_with_its_holder() -> None:
    """It can be neither found nor cached afterwards."""
    manager = KvManager(2)
    table = manager.allocate(1)
    manager.publish(table[0], name(1))
    assert manager.forget([name(1)]) == 1
    assert manager.match([name(1)]) == 0
    manager.check_integrity([table])
    manager.release(table)
    assert manager.usage().free == 2


# Misuse

MISUSES: dict[str, Callable[[KvManager], Any]] = {
    "negative count": lambda m: m.allocate(-1),
    "release of a free block": lambda m: m.release([5]),
    "release of a cached block": lambda m: m.release([2]),
    "good and bad in one release": lambda m: m.release([0, 1, 5]),
    "double release in one call": lambda m: m.release([1, 1]),
    "one release too many in one call": lambda m: m.release([0, 1, 0, 0]),
    "release of no such block": lambda m: m.release([6]),
    "release of a negative number": lambda m: m.release([-6]),
    "fork of a free block": lambda m: m.fork([0, 5]),
    "fork of a cached block": lambda m: m.fork([0, 2]),
    "fork of no such block": lambda m: m.fork([0, 6]),
    "write into a free block": lambda m: m.make_writable(5),
    "write into a cached block": lambda m: m.make_writable(2),
    "write into no such block": lambda m: m.make_writable(-1),
    "publish of a free block": lambda m: m.publish(5, name(9)),
    "publish of a cached block": lambda m: m.publish(2, name(2)),
    "publish of no such block": lambda m: m.publish(6, name(9)),
    "publish by a second identity": lambda m: m.publish(1, name(9)),
    "publish by a second, known identity": lambda m: m.publish(1, name(2)),
    "publish by a short identity": lambda m: m.publish(0, b"short"),
    "publish by text": lambda m: m.publish(0, "x" * 32),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("misuse", MISUSES)
def test_misuse_is_refused_and_changes_nothing(misuse: str) -> None:
    """Block 0 is held twice, 1 is held and known, 2 is cached, 3 ... 5 are free."""
    manager = KvManager(6)
    manager.allocate(3)
    manager.fork([0])
    manager.publish(1, name(1))
    manager.publish(2, name(2))
    manager.release([2])
    before = state(manager)
    with pytest.raises(BlockMisuse):
        MISUSES[misuse](manager)
    assert state(manager) == before
    manager.check_integrity([[0, 1], [0]])


def test_misuse_names_the_block() -> None:
    """Programs get the number, people a sentence."""
    manager = KvManager(3)
    with pytest.raises(BlockMisuse, match="Cannot release block 2: nobody holds it") as caught:
        manager.release([2])
    assert caught.value.block == 2


@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 16), (-1, 16), (4, 0), (4, -1), (2**31, 16)])
def test_impossible_pools_are_refused(num_blocks: int, block_size: int) -> None:
    """A pool without blocks, or blocks without tokens, or more blocks than can be numbered."""
    with pytest.raises(BlockMisuse, match="must be"):
        KvManager(num_blocks, block_size)


# Cost


def work(manager: KvManager, tables: int) -> int:
    """Lines executed (C calls included) for a full cycle of a sequence, as a clock that is never noisy."""
    lines = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal lines
        lines += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        for number in range(tables):
            ids = [name(10**9 + number * 8 + at) for at in range(8)]
            table = manager.acquire(ids)
            table += manager.allocate(8)
            for block, identity in zip(table, ids, strict=True):
                manager.publish(block, identity)
            manager.fork(table)
            manager.release(table)
            manager.release(table)
    finally:
        sys.settrace(before)
    return lines


def test_work_per_block_does_not_grow_with_the_pool() -> None:
    """A full pool that evicts on each allocation does exactly as much for 100,000 blocks as for 100."""
    costs = []
    for num_blocks in (100, 100_000):
        manager = KvManager(num_blocks)
        cached(manager, *range(num_blocks))
        costs.append(work(manager, tables=3))
        assert manager.evicted_blocks == 24
    assert costs[0] == costs[1] > 0


# Looking ahead


def test_preview_says_what_acquiring_would_use_up() -> None:
    """Known blocks that somebody holds cost nothing; cached ones come out of the available blocks."""
    manager = KvManager(6)
    cached(manager, 1, 2, 3)
    held = manager.acquire([name(1)])
    before = state(manager)
    assert manager.preview([name(1), name(2), name(3), name(4)]) == PrefixMatch(known=3, cached=2)
    assert manager.preview([name(9)]) == PrefixMatch(known=0, cached=0)
    assert state(manager) == before
    manager.acquire([name(1), name(2), name(3)])
    assert manager.available == before[-1][2] - 2
    manager.release(held)


def test_a_block_is_shared_while_two_tables_hold_it() -> None:
    """Forking shares, releasing ends it; asking about a block that nobody holds is a misuse."""
    manager = KvManager(2)
    (block,) = manager.allocate(1)
    assert not manager.is_shared(block)
    manager.fork([block])
    assert manager.is_shared(block)
    manager.release([block])
    assert not manager.is_shared(block)
    manager.release([block])
    with pytest.raises(BlockMisuse, match="nobody holds it"):
        manager.is_shared(block)


# What was evicted


def test_without_ghosts_nothing_is_remembered() -> None:
    manager = KvManager(1)
    cached(manager, 1)
    manager.allocate(1)
    assert manager.ghost_of(name(1)) is None
    assert manager.ghost_rooms == []


def test_evicted_blocks_are_remembered_until_they_are_back() -> None:
    """With the room that would have kept them; a block that is forgotten has the reason that was given."""
    manager = KvManager(2, ghosts=Ghosts([1, 2]))
    cached(manager, 1)
    cached(manager, 2)
    manager.release(manager.allocate(2))
    assert (manager.ghost_of(name(1)), manager.ghost_of(name(2))) == (
        Ghost(Reason.PRESSURE, 3),
        Ghost(Reason.PRESSURE, 1),
    )
    assert manager.ghost_rooms == [1, 3]
    cached(manager, 1)
    assert manager.ghost_of(name(1)) is None
    assert manager.holds(name(1))
    assert manager.known() == [name(1)]
    manager.forget([name(1)], Reason.INTEGRITY)
    assert manager.ghost_of(name(1)) == Ghost(Reason.INTEGRITY, 1)
    assert not manager.holds(name(1))


def test_an_owner_at_its_limit_lost_it_to_itself() -> None:
    """Everything else that the order of reclaim takes is for want of room."""
    quotas = QuotaBook(4)
    quotas.load({"a": Quota(0, 1), "b": Quota(0, 4)})
    manager = KvManager(4, quotas=quotas, ghosts=Ghosts([8]))
    for owner, number in (("a", 1), ("a", 2), ("b", 3), ("b", 4), ("b", 5), ("b", 6)):
        (block,) = manager.allocate(1, owner=owner)
        manager.publish(block, name(number))
        manager.release([block])
    lost = {number: ghost.reason for number in range(1, 7) if (ghost := manager.ghost_of(name(number))) is not None}
    assert lost.pop(1) is Reason.OWN_QUOTA
    assert lost
    assert set(lost.values()) == {Reason.PRESSURE}
