"""What is saved ahead is what goes: the announced victims are those that allocations then take, in that order."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from lamina_kvtier import KvManager, OutOfBlocks, Quota, QuotaBook

NAMES = "abc"
BLOCKS = 24
QUOTAS = st.dictionaries(
    st.sampled_from(NAMES),
    st.builds(Quota, st.integers(0, 6), st.sampled_from([8, BLOCKS]), st.just(0), st.sampled_from([0.5, 1.0, 3.0])),
)
STEPS = st.lists(st.tuples(st.sampled_from(NAMES), st.integers(1, 5), st.booleans()), max_size=25)


def manager_after(policies: dict[str, Quota] | None, steps: list[tuple[str, int, bool]]) -> KvManager:
    """Tenants that used blocks, published them or not, and left."""
    book = QuotaBook(BLOCKS)
    kv = KvManager(BLOCKS, quotas=book)
    if policies is not None:
        book.load(policies)
    for number, (name, count, published) in enumerate(steps):
        try:
            blocks = kv.allocate(count, owner=name)
        except OutOfBlocks:
            continue
        for place, block in enumerate(blocks):
            if published:
                kv.publish(block, f"{name}{number}/{place}".encode().ljust(32))
        kv.release(blocks)
    return kv


@settings(max_examples=150, deadline=None)
@given(policies=st.none() | QUOTAS, steps=STEPS)
def test_the_announced_order_is_the_order_of_eviction(
    policies: dict[str, Quota] | None, steps: list[tuple[str, int, bool]]
) -> None:
    """For somebody who takes one block after the other; what is announced beyond that is within reservations."""
    kv = manager_after(policies, steps)
    announced = kv.next_victims(BLOCKS)
    assert len(announced) == kv.usage().cached
    assert kv.next_victims(3) == announced[:3]
    gone: list[tuple[int, bytes]] = []
    try:
        while len(gone) < len(announced):
            taken = kv.allocate(1, owner="someone else")
            gone += [(block, identity) for block, identity in announced if block in taken]
    except OutOfBlocks:
        pass
    assert gone == announced[: len(gone)]
    for block, _ in announced[len(gone) :]:
        account = kv.ledger.account(kv.owner_of(block) or "") if kv.ledger else None
        assert account is not None
        assert account.committed <= account.quota.reserved


@settings(max_examples=100, deadline=None)
@given(policies=QUOTAS, steps=STEPS)
def test_whoever_comes_to_its_limit_gives_up_what_was_announced(
    policies: dict[str, Quota], steps: list[tuple[str, int, bool]]
) -> None:
    kv = manager_after(policies, steps)
    assert kv.ledger is not None
    for owner in NAMES:
        near = kv.victims_near_limit(owner, 4)
        if near is None or not near[1] or near[0] > kv.usage().free:
            continue
        room, announced = near
        kv.allocate(room, owner=owner)
        before = kv.evictions().get((owner, "limit"), 0)
        kv.allocate(1, owner=owner)
        assert kv.evictions().get((owner, "limit"), 0) == before + 1
        assert kv.match([announced[0][1]]) == 0
