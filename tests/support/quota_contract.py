"""What every StoreTier promises under quotas, as tests: subclass `QuotaContract` and give it a `make_tier` fixture.

All tiers of one test are on one empty store of its own. Sizes are counted in blocks of VALUE_BYTES.
"""

from __future__ import annotations

import pytest

from lamina_kvtier.errors import QuotaNotCoverable
from lamina_kvtier.quota import Quota
from lamina_kvtier.reasons import Reason
from lamina_kvtier.tier import BlockKey, Outcome, StoreTier, Tally
from support.tier_contract import PATIENCE_S, MakeTier, blocks, ids, keys, load, lookup, put, room

__all__ = ["VALUE_BYTES", "QuotaContract", "quota", "settle", "there"]

VALUE_BYTES = 6 * 1024 + 192  # of a raw block of the contract's size, header included
OK, REFUSED = Outcome.OK, Outcome.REFUSED


def quota(reserved: int = 0, limit: int = 1000, weight: float = 1.0) -> Quota:
    """In blocks."""
    return Quota(reserved * VALUE_BYTES, limit * VALUE_BYTES, 0, weight)


def set_quotas(tier: StoreTier, capacity: int, **quotas: Quota) -> None:
    """capacity: in blocks."""
    tier.set_quotas(quotas, capacity=capacity * VALUE_BYTES)


def settle(tier: StoreTier) -> None:
    """What a tier does at leisure is done."""
    if hasattr(tier, "settle"):
        assert tier.settle(PATIENCE_S)


def fill(tier: StoreTier, count: int, namespace: str) -> list[BlockKey]:
    names = keys(count, namespace)
    assert put(tier, names, blocks(count)) == (OK,) * count
    return names


def there(tier: StoreTier, names: list[BlockKey]) -> list[bool]:
    """Without using them."""
    return [lookup(tier, [name]) == Tally(1, OK) for name in names]


def used(tier: StoreTier) -> dict[str, int]:
    """Blocks by namespace."""
    settle(tier)
    usage = tier.usage()
    assert usage.bytes == sum(usage.by_namespace.values())
    return {name: count // VALUE_BYTES for name, count in usage.by_namespace.items()}


class QuotaContract:
    @pytest.fixture
    def tier(self, make_tier: MakeTier) -> StoreTier:
        return make_tier()

    def test_a_namespace_at_its_limit_loses_its_own_oldest(self, tier: StoreTier) -> None:
        """However much room there is beside it."""
        set_quotas(tier, 100, ann=quota(limit=3))
        bob, old = fill(tier, 1, "bob"), fill(tier, 3, "ann")
        new = fill(tier, 1, "ann")
        assert there(tier, [*old, *new, *bob]) == [True, True, False, True, True]
        assert used(tier) == {"ann": 3, "bob": 1}
        assert tier.usage().evictions == {("ann", Reason.OWN_QUOTA): 1}

    def test_the_head_of_a_put_is_kept_and_its_tail_refused(self, tier: StoreTier) -> None:
        """A prefix without its tail is of use, a tail without its prefix is not."""
        set_quotas(tier, 100, ann=quota(limit=3))
        names = keys(5, "ann")
        assert put(tier, names, blocks(5)) == (OK, OK, OK, REFUSED, REFUSED)
        assert there(tier, names) == [True, True, True, False, False]
        assert tier.usage().refusals == {("ann", Reason.OWN_QUOTA): 2}
        assert tier.usage().puts == {OK: 3, REFUSED: 2}

    def test_a_known_head_is_not_evicted_for_its_own_tail(self, tier: StoreTier) -> None:
        """What one put names is not taken for the rest of it."""
        set_quotas(tier, 100, ann=quota(limit=3))
        names = fill(tier, 3, "ann")
        longer = [*names, *keys(2, "ann")]
        assert put(tier, longer, blocks(5)) == (OK, OK, OK, REFUSED, REFUSED)
        assert there(tier, longer) == [True, True, True, False, False]

    def test_in_a_full_store_the_furthest_over_its_share_loses(self, tier: StoreTier) -> None:
        set_quotas(tier, 10, ann=quota(reserved=4), bob=quota(reserved=1))
        ann, bob = fill(tier, 5, "ann"), fill(tier, 5, "bob")
        fill(tier, 3, "cat")
        assert there(tier, ann) == [True] * 5
        assert there(tier, bob) == [True, True, False, False, False]
        assert used(tier) == {"ann": 5, "bob": 2, "cat": 3}
        assert tier.usage().evictions == {("bob", Reason.PRESSURE): 3}

    def test_weight_counts(self, tier: StoreTier) -> None:
        """With three times the weight, three times as much beyond the reservation."""
        set_quotas(tier, 8, ann=quota(weight=3.0), bob=quota())
        fill(tier, 4, "ann")
        fill(tier, 4, "bob")
        for _ in range(6):
            fill(tier, 1, "ann")
        assert used(tier) == {"ann": 6, "bob": 2}

    def test_a_reservation_is_never_taken(self, tier: StoreTier) -> None:
        """Somebody without a block to lose is refused, and told why."""
        set_quotas(tier, 6, ann=quota(reserved=6))
        ann = fill(tier, 6, "ann")
        assert put(tier, keys(2, "bob"), blocks(2)) == (REFUSED, REFUSED)
        assert there(tier, ann) == [True] * 6
        assert tier.usage().refusals == {("bob", Reason.PRESSURE): 2}

    def test_a_reservation_is_there_when_it_is_wanted(self, tier: StoreTier) -> None:
        """Others may use it until then."""
        set_quotas(tier, 6, ann=quota(reserved=4))
        fill(tier, 6, "bob")
        fill(tier, 4, "ann")
        assert used(tier) == {"ann": 4, "bob": 2}

    def test_what_can_never_fit_is_refused(self, tier: StoreTier) -> None:
        """And nothing makes room for it."""
        tier.set_quotas({"ann": Quota(0, VALUE_BYTES - 1)}, capacity=3 * VALUE_BYTES)
        bob = fill(tier, 3, "bob")
        assert put(tier, keys(1, "ann"), blocks(1)) == (REFUSED,)
        assert there(tier, bob) == [True] * 3
        tier.set_quotas({}, capacity=VALUE_BYTES - 1)
        assert put(tier, keys(1, "ann"), blocks(1)) == (REFUSED,)
        assert tier.usage().refusals == {("ann", Reason.OWN_QUOTA): 1, ("ann", Reason.PRESSURE): 1}

    def test_what_was_loaded_goes_later(self, tier: StoreTier) -> None:
        """The tail of what was loaded before its head."""
        set_quotas(tier, 100, ann=quota(limit=4))
        first, second = fill(tier, 2, "ann"), fill(tier, 2, "ann")
        assert load(tier, first, room(2)) == (OK, OK)
        settle(tier)
        fill(tier, 3, "ann")
        assert there(tier, [*first, *second]) == [True, False, False, False]

    def test_a_block_is_paid_for_once(self, make_tier: MakeTier) -> None:
        """However often it is put, by whichever replica; also twice in one put."""
        tier, other = make_tier(), make_tier()
        set_quotas(tier, 10, ann=quota(limit=2))
        names, values = keys(2, "ann"), blocks(2)
        assert put(tier, [*names, names[0]], [*values, values[0]]) == (OK,) * 3
        assert put(other, names, values) == (OK, OK)
        assert used(tier) == {"ann": 2}
        into = room(2)
        assert load(other, names, into) == (OK, OK)
        assert into == values

    def test_quotas_hold_for_all_replicas(self, make_tier: MakeTier) -> None:
        """One of them sets them."""
        tier, other = make_tier(), make_tier()
        set_quotas(tier, 10, ann=quota(limit=3))
        set_quotas(other, 10, ann=quota(limit=3))
        fill(tier, 2, "ann")
        fill(other, 2, "ann")
        assert used(tier) == {"ann": 3}

    def test_a_lower_limit_takes_effect_with_the_next_block(self, tier: StoreTier) -> None:
        """Nothing is lost at once."""
        set_quotas(tier, 100, ann=quota(limit=5))
        names = fill(tier, 5, "ann")
        set_quotas(tier, 100, ann=quota(limit=2))
        assert there(tier, names) == [True] * 5
        new = fill(tier, 1, "ann")
        assert there(tier, [*names, *new]) == [True, False, False, False, False, True]

    def test_quotas_replace_those_there_were(self, tier: StoreTier) -> None:
        """All of them."""
        set_quotas(tier, 100, ann=quota(limit=1))
        set_quotas(tier, 100, bob=quota(limit=1))
        fill(tier, 3, "ann")
        assert put(tier, keys(2, "bob"), blocks(2)) == (OK, REFUSED)

    def test_what_is_not_coverable_is_not_set(self, tier: StoreTier) -> None:
        set_quotas(tier, 10, ann=quota(limit=2))
        with pytest.raises(QuotaNotCoverable):
            set_quotas(tier, 10, ann=quota(reserved=6), bob=quota(reserved=5))
        assert put(tier, keys(3, "ann"), blocks(3)) == (OK, OK, REFUSED)

    def test_deleting_makes_room(self, tier: StoreTier) -> None:
        set_quotas(tier, 10, ann=quota(limit=3))
        names = fill(tier, 3, "ann")
        assert tier.delete([names[1].id, *ids(keys(1))]).result(PATIENCE_S) == Tally(1, OK)
        assert tier.delete([]).result(PATIENCE_S) == Tally(0, OK)
        new = fill(tier, 1, "ann")
        assert there(tier, [*names, *new]) == [True, False, True, True]
        assert used(tier) == {"ann": 3}

    def test_a_namespace_is_forgotten(self, tier: StoreTier) -> None:
        """All that it pays for is gone, whatever its name, and nothing of the others."""
        name = "änn with spaces\nand lines"
        set_quotas(tier, 1000)
        ann, bob = fill(tier, 300, name), fill(tier, 3, "bob")
        assert tier.forget(name).result(PATIENCE_S) == Tally(300, OK)
        assert there(tier, ann[:3]) == [False] * 3
        assert there(tier, bob) == [True] * 3
        assert used(tier) == {"bob": 3}
        assert tier.forget(name).result(PATIENCE_S) == Tally(0, OK)

    def test_without_quotas_nobody_is_known(self, tier: StoreTier) -> None:
        """So forgetting somebody is refused rather than done by halves."""
        fill(tier, 2, "ann")
        assert tier.forget("ann").result(PATIENCE_S) == Tally(0, REFUSED)

    def test_nothing_is_nothing(self, tier: StoreTier) -> None:
        set_quotas(tier, 10)
        assert put(tier, [], []) == ()
        assert used(tier) == {}

    def test_a_cancelled_put_leaves_no_charge_behind(self, tier: StoreTier) -> None:
        """Each block is kept and paid for, or neither."""
        set_quotas(tier, 1000)
        names, values = keys(100, "ann"), blocks(100)
        operation = tier.put(names, values)
        operation.cancel()
        outcomes = operation.result(PATIENCE_S)
        assert set(outcomes) <= {OK, Outcome.CANCELLED}
        assert there(tier, names) == [outcome is OK for outcome in outcomes]
        assert used(tier).get("ann", 0) == outcomes.count(OK)

    def test_a_closed_tier_is_unavailable(self, tier: StoreTier) -> None:
        set_quotas(tier, 10)
        tier.close()
        outcomes = {*put(tier, keys(2), blocks(2)), tier.forget("ann").result(PATIENCE_S).outcome}
        assert outcomes <= {Outcome.UNAVAILABLE, Outcome.CANCELLED}
