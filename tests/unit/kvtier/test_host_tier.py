"""Single rules of the host tier, the ghosts behind it, and its quotas."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from lamina_kvtier.errors import BlockMisuse, IntegrityError
from lamina_kvtier.ghosts import Ghost, Ghosts, segments_for
from lamina_kvtier.host_tier import HostTier, HostUsage
from lamina_kvtier.ledger import Ledger
from lamina_kvtier.quota import Quota, QuotaBook
from lamina_kvtier.quota_policy import QuotaPolicy
from lamina_kvtier.reasons import Reason, reason_of
from lamina_kvtier.reclaim import ReclaimOrder
from lamina_kvtier.tier import BlockKey, Outcome

MIB = 2**20


def key(number: int, namespace: str = "ann") -> BlockKey:
    return BlockKey(number.to_bytes(32, "big"), namespace)


def store(tier: HostTier, *numbers: int, namespace: str = "ann") -> list[int]:
    """Stores blocks in the table's order; returns the slots of those for which there was room."""
    reservations = [found for found in tier.reserve([key(number, namespace) for number in numbers]) if found]
    tier.commit(reservations)
    return [reservation.slot for reservation in reservations]


def there(tier: HostTier, *numbers: int) -> list[int]:
    return [number for number in numbers if tier.knows(key(number).id)]


# Writing


def test_neighbours_are_handed_out_together() -> None:
    """A spill then moves in one copy."""
    assert store(HostTier(8, MIB), 1, 2, 3) == [0, 1, 2]


def test_a_slot_that_is_being_written_is_neither_found_nor_reused() -> None:
    """However great the need; and abandoning it makes it free."""
    tier = HostTier(1, MIB)
    (reservation,) = tier.reserve([key(1)])
    assert reservation is not None
    assert tier.find([key(1).id]) == []
    assert tier.reserve([key(1), key(2)]) == [None, None]
    assert tier.refusals == {("ann", Reason.PRESSURE): 1}
    tier.abandon([reservation])
    assert store(tier, 2) == [0]


def test_what_is_forgotten_while_it_is_written_is_never_known() -> None:
    """An adapter retired in between: its block must not come back."""
    tier = HostTier(2, MIB)
    (first,) = tier.reserve([key(1)])
    assert first is not None
    assert tier.forget([key(1).id], Reason.DELETED) == 1
    (second,) = tier.reserve([key(1)])
    assert second is not None
    tier.commit([first])
    assert tier.find([key(1).id]) == []
    tier.commit([second])
    assert tier.find([key(1).id]) == [second.slot]
    tier.check_integrity()


def test_a_batch_does_not_evict_itself() -> None:
    """Five blocks into three slots keep the first three, the known one among them."""
    tier = HostTier(3, MIB)
    store(tier, 1)
    store(tier, 1, 2, 3, 4, 5)
    assert there(tier, 1, 2, 3, 4, 5) == [1, 2, 3]


def test_storing_again_is_using() -> None:
    tier = HostTier(2, MIB)
    store(tier, 1)
    store(tier, 2)
    assert store(tier, 1) == []
    store(tier, 3)
    assert there(tier, 1, 2, 3) == [1, 3]


# Order of eviction


def test_the_tail_goes_before_the_head() -> None:
    tier = HostTier(3, MIB)
    store(tier, 1, 2, 3)
    store(tier, 4)
    store(tier, 5)
    assert there(tier, 1, 2, 3) == [1]
    assert tier.evictions == {("ann", Reason.PRESSURE): 2}


def test_a_held_slot_is_not_reused_and_a_pinned_block_never_evicted() -> None:
    """Nor is either while the other lasts."""
    tier = HostTier(2, MIB)
    store(tier, 1, 2)
    slots = tier.find([key(1).id])
    tier.hold(slots)
    tier.pin([key(1).id, key(2).id], "ann")
    assert store(tier, 3) == []
    tier.unpin([key(2).id], "ann")
    assert len(store(tier, 3)) == 1
    tier.release(slots)
    store(tier, 4)
    store(tier, 5)
    assert there(tier, 1, 5) == [1, 5]
    tier.check_integrity()


def test_a_pin_waits_for_its_block() -> None:
    """Leased before it is stored, it is kept from the first moment."""
    tier = HostTier(1, MIB)
    tier.pin([key(1).id], "ann")
    assert tier.is_leased(key(1).id, "ann")
    assert not tier.stores(key(1).id)
    store(tier, 1)
    assert store(tier, 2) == []
    assert tier.usage() == HostUsage(
        total=1, free=0, writing=0, held=0, cached=0, pinned=1, bytes_by_namespace={"ann": MIB}
    )


def test_nobody_keeps_what_another_pays_for() -> None:
    """A lease holds for blocks of its own namespace, so that it costs what it keeps."""
    tier = HostTier(1, MIB)
    tier.pin([key(1).id], "bob")
    store(tier, 1)
    assert tier.usage().cached == 1
    assert len(store(tier, 2)) == 1
    tier.unpin([key(1).id], "bob")
    tier.check_integrity()


def test_exclusive_tiers_give_up_what_was_promoted_first() -> None:
    """It stays as long as nobody needs the room."""
    tier = HostTier(4, MIB)
    store(tier, 1, 2)
    store(tier, 3)
    promoted = tier.find([key(1).id, key(2).id])
    tier.hold(promoted)
    tier.put_back(promoted)
    store(tier, 4, 5)
    assert there(tier, 1, 2, 3, 4, 5) == [1, 3, 4, 5]


def test_a_tier_without_slots_stores_nothing() -> None:
    """Host memory switched off is a size, not a case."""
    tier = HostTier(0, MIB)
    assert store(tier, 1) == []
    tier.check_integrity()


# Why it is not there


def test_a_miss_is_explained() -> None:
    """By what the block was lost for, as long as that is remembered."""
    tier = HostTier(1, MIB)
    store(tier, 1)
    store(tier, 2)
    assert tier.ghost_of(key(1).id) == Ghost(Reason.PRESSURE, 1)
    assert tier.ghost_of(key(9).id) is None
    tier.forget([key(2).id], Reason.INTEGRITY)
    assert tier.ghost_of(key(2).id) == Ghost(Reason.INTEGRITY, 1)


def test_a_slot_that_was_written_over_is_noticed() -> None:
    """What was committed is sealed, and what has left since is nobody's concern."""
    memory = [0, 0, 0]
    tier = HostTier(3, MIB, seal=lambda slot: memory[slot])
    memory[:] = [7, 8, 9]
    store(tier, 1, 2, 3)
    assert sorted(tier.stored()) == [0, 1, 2]
    assert tier.broken(range(3)) == []
    (slot,) = tier.find([key(2).id])
    (lost,) = tier.find([key(3).id])
    memory[slot] = memory[lost] = 0
    tier.forget([key(3).id], Reason.DELETED)
    assert tier.broken(range(3)) == [slot]


@pytest.mark.parametrize("outcome", Outcome)
def test_every_outcome_below_has_a_reason(outcome: Outcome) -> None:
    assert (reason_of(outcome) is None) == (outcome is Outcome.OK)


def test_ghosts_are_bounded_and_in_order() -> None:
    """Each segment answers with the room that would have kept its blocks."""
    ghosts = Ghosts([1, 2, 3])
    for number in range(10):
        ghosts.add(key(number).id, Reason.PRESSURE)
    assert len(ghosts) == 6
    extras = [ghost and ghost.extra_blocks for ghost in (ghosts.find(key(number).id) for number in range(10))]
    assert extras == [None] * 4 + [6, 6, 6, 3, 3, 1]
    ghosts.discard(key(9).id)
    ghosts.add(key(8).id, Reason.TTL)
    assert ghosts.find(key(8).id) == Ghost(Reason.TTL, 1)
    with pytest.raises(ValueError, match="at least one"):
        Ghosts([1, 0])


def test_ghosts_answer_what_more_room_would_bring() -> None:
    """A replay on a tier that is really larger has exactly those hits more (least recently used order, one owner)."""
    dice = random.Random(3)
    requests = [min(int(dice.paretovariate(0.6)), 60) for _ in range(3000)]

    def replay(slots: int) -> tuple[int, list[Ghost]]:
        tier = HostTier(slots, MIB, ghosts=Ghosts(segments_for(16)))
        hits, ghosts = 0, []
        for number in requests:
            found = tier.find([key(number).id])
            hits += len(found)
            if not found and (ghost := tier.ghost_of(key(number).id)) is not None:
                ghosts.append(ghost)
            store(tier, number)
        return hits, ghosts

    hits, ghosts = replay(16)
    for extra in (2, 4, 8, 16):
        more = sum(ghost.extra_blocks <= extra for ghost in ghosts)
        assert more == replay(16 + extra)[0] - hits


# Quotas


def quotas(capacity: int, **policies: Quota) -> tuple[HostTier, Ledger]:
    book = QuotaBook(capacity)
    book.load(policies)
    ledger = Ledger(book)
    return HostTier(capacity, MIB, policy=QuotaPolicy(ReclaimOrder(capacity, ledger))), ledger


def test_a_reservation_is_kept_when_a_neighbour_floods() -> None:
    """The flood takes what is free and its own, and never what was reserved."""
    tier, ledger = quotas(6, ann=Quota(3, 6), bob=Quota(1, 6))
    store(tier, 1, 2, 3)
    for number in range(10, 40):
        store(tier, number, namespace="bob")
    assert there(tier, 1, 2, 3) == [1, 2, 3]
    assert tier.evictions == {("bob", Reason.PRESSURE): 27}
    assert (ledger.usage("ann"), ledger.usage("bob")) == (3, 3)
    tier.check_integrity()
    ledger.check_integrity({"ann": 3, "bob": 3})


def test_who_is_over_its_share_gives_first() -> None:
    tier, _ = quotas(4, ann=Quota(3, 4), bob=Quota(1, 4))
    for number in (10, 11, 12, 13):
        store(tier, number, namespace="bob")
    store(tier, 1, 2, 3)
    assert there(tier, 1, 2, 3, 10, 11, 12, 13) == [1, 2, 3, 13]


def test_at_its_limit_a_namespace_evicts_its_own() -> None:
    """However much is free; and if nothing of its own may go, nothing is stored."""
    tier, _ = quotas(8, ann=Quota(0, 2))
    store(tier, 1)
    store(tier, 2)
    store(tier, 3)
    assert there(tier, 1, 2, 3) == [2, 3]
    assert tier.ghost_of(key(1).id) == Ghost(Reason.OWN_QUOTA, 1)
    tier.hold(tier.find([key(2).id]) + tier.find([key(3).id]))
    assert store(tier, 4) == []
    assert tier.refusals == {("ann", Reason.OWN_QUOTA): 1}


def test_what_comes_beside_others_takes_nothing_of_theirs() -> None:
    """What is free, then its own oldest; then nothing, and nobody has been refused anything."""
    tier, _ = quotas(6, ann=Quota(0, 6), bob=Quota(0, 6))
    store(tier, 10, 11, 12, namespace="bob")
    store(tier, 1, 2)
    given = tier.reserve_beside_others([key(number) for number in range(20, 26)])
    assert [room is not None for room in given] == [True, True, True, False, False, False]
    tier.commit([room for room in given if room is not None])
    assert there(tier, 10, 11, 12) == [10, 11, 12]
    assert there(tier, 1, 2, 20, 21, 22) == [20, 21, 22]
    assert not tier.refusals
    assert tier.evictions == {("ann", Reason.PRESSURE): 2}


def test_what_is_spare_of_others_goes_for_what_comes_beside_them() -> None:
    """The one that is next by their shares, and none behind it; a reservation holds."""
    tier, _ = quotas(6, ann=Quota(0, 6), bob=Quota(1, 6), eve=Quota(2, 6))
    store(tier, 30, 31, namespace="eve")
    for number in (10, 11, 12, 13):
        store(tier, number, namespace="bob")
    spare = {key(number).id for number in (10, 11, 13, 30, 31)}
    given = tier.reserve_beside_others([key(number) for number in range(20, 24)], spare.__contains__)
    assert [room is not None for room in given] == [True, True, False, False]
    tier.commit([room for room in given if room is not None])
    assert there(tier, 10, 11, 12, 13, 20, 21, 30, 31) == [12, 13, 20, 21, 30, 31]
    assert tier.evictions == {("bob", Reason.PRESSURE): 2}
    assert not tier.refusals


def test_what_comes_beside_others_keeps_within_the_limit() -> None:
    tier, _ = quotas(8, ann=Quota(0, 2))
    given = tier.reserve_beside_others([key(number) for number in range(3)])
    assert [room is not None for room in given] == [True, True, False]
    tier.commit([room for room in given if room is not None])
    assert tier.reserve_beside_others([key(9)])[0] is not None
    assert tier.evictions == {("ann", Reason.OWN_QUOTA): 1}


def test_until_quotas_are_loaded_the_oldest_goes() -> None:
    """A restart costs nobody what a quota would have kept."""
    order = ReclaimOrder(2, Ledger(QuotaBook(2)))
    tier = HostTier(2, MIB, policy=QuotaPolicy(order))
    store(tier, 1)
    store(tier, 2, namespace="bob")
    store(tier, 3, namespace="bob")
    assert there(tier, 1, 2, 3) == [2, 3]


# Proof


BREAKS: dict[str, tuple[Callable[[HostTier], object], str]] = {
    "free twice": (lambda tier: tier._books.free.append(7), "a slot is free twice"),
    "free and known": (lambda tier: tier._books.free.append(0), "slot 0: it is in 2 states"),
    "lost": (lambda tier: tier._books.free.remove(7), "slot 7: it is in 0 states"),
    "no key": (lambda tier: tier._books.keys.__setitem__(0, None), "slot 0: free slots, and only they, have no key"),
    "other key": (lambda tier: tier._books.keys.__setitem__(0, key(9)), "slot 0: it is found by an identity"),
    "victim missing": (lambda tier: tier._books.victims.remove(0), "slot 0: missing from the queue"),
    "victim too many": (lambda tier: tier._books.pins.add("ann", key(1).id), "slot 0: wrongly in the queue"),
    "holds": (lambda tier: setattr(tier._books.holds, "active", 3), "slots are held, but 3 were counted"),
    "touched": (lambda tier: tier._books.touched.add(0), "slot 0: used by a holder, but nobody holds it"),
    "arriving": (lambda tier: tier._books.arriving.update({key(5).id: 0}), "arrives there, but is not being written"),
    "charges": (lambda tier: tier._books.charged.update(ann=1), "'ann' is charged 1 slots, but has 3"),
    "pins": (lambda tier: tier._books.pins._counts.update({("ann", key(8).id): 0}), "less than one pin"),
    "index": (lambda tier: tier._books.index._blocks.clear(), "index: "),
    "ring": (lambda tier: tier._books.victims._order._following.__setitem__(0, 0), "everybody's ring is broken"),
    "own ring": (lambda tier: tier._books.victims._own._following.__setitem__(0, 0), "'ann' is broken"),
    "counter": (lambda tier: setattr(tier._books.victims, "_length", 9), "but 9 were counted"),
}


@pytest.mark.parametrize("name", BREAKS)
def test_each_broken_rule_is_named(name: str) -> None:
    """The proof itself must be able to fail."""
    tier = HostTier(8, MIB)
    store(tier, 1, 2)
    tier.reserve([key(3)])
    tier.check_integrity()
    damage, message = BREAKS[name]
    damage(tier)
    with pytest.raises(IntegrityError) as caught:
        tier.check_integrity()
    assert any(message in violation for violation in caught.value.violations), caught.value.violations


def test_misuse() -> None:
    with pytest.raises(BlockMisuse, match="No host tier"):
        HostTier(1, 0)
    with pytest.raises(BlockMisuse, match="unpin"):
        HostTier(1, 1).unpin([key(1).id], "ann")
