"""The in-memory twin keeps the contract of stores, and lets a test choose time, order and damage."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from lamina_kvtier.block_codec import HEADER_BYTES, BlockCodec
from lamina_kvtier.memory_tier import MemoryStore, MemoryTier, Steps
from lamina_kvtier.tier import Outcome, StoreTier, Tally
from support.quota_contract import QuotaContract
from support.tier_contract import (
    BLOCK_BYTES,
    LAYOUT,
    MakeTier,
    TierContract,
    blocks,
    ids,
    keys,
    load,
    lookup,
    put,
    room,
)

VALUE_BYTES = HEADER_BYTES + BLOCK_BYTES
CODEC = BlockCodec(LAYOUT, BLOCK_BYTES)


class Later:
    """Runs operations on a thread of their own, so that they are really under way for a moment."""

    def __call__(self, job: Callable[[], None]) -> None:
        threading.Thread(target=job).start()


@pytest.fixture(params=["at once", "later"])
def make_tier(request: pytest.FixtureRequest) -> Iterator[MakeTier]:
    store = MemoryStore()
    made: list[MemoryTier] = []

    def make(layout: bytes = LAYOUT, block_bytes: int = BLOCK_BYTES) -> StoreTier:
        codec = BlockCodec(layout, block_bytes)
        run = {"run": Later()} if request.param == "later" else {}
        made.append(MemoryTier(store, codec, **run))
        return made[-1]

    yield make
    for tier in made:
        tier.close()


class TestMemoryTier(TierContract):
    """The contract itself, and with operations on other threads."""


class TestMemoryTierUnderQuotas(QuotaContract):
    """The rules of quotas, likewise."""


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_limit_evicts_what_was_used_least_recently() -> None:
    """Loading is using; looking up is not."""
    tier = MemoryTier(MemoryStore(3 * VALUE_BYTES), CODEC)
    names = keys(4)
    put(tier, names[:3], blocks(3))
    load(tier, names[:1], room(1))
    lookup(tier, names[1:2])
    assert put(tier, names[3:], blocks(1)) == (Outcome.OK,)
    assert load(tier, names, room(4)) == (Outcome.OK, Outcome.MISSING, Outcome.OK, Outcome.OK)
    assert tier.usage().bytes == 3 * VALUE_BYTES


def test_what_never_fits_is_refused() -> None:
    """Not reported as kept, and nothing makes room for it."""
    tier = MemoryTier(MemoryStore(VALUE_BYTES - 1), CODEC)
    assert put(tier, keys(2), blocks(2)) == (Outcome.REFUSED,) * 2
    assert tier.usage().puts == {Outcome.REFUSED: 2}


def test_blocks_expire() -> None:
    """So long after they were stored, to the moment."""
    clock = Clock()
    tier = MemoryTier(MemoryStore(ttl_s=10.0, clock=clock), CODEC)
    names = keys(1)
    put(tier, names, blocks(1))
    clock.now = 109.9
    assert lookup(tier, names) == Tally(1, Outcome.OK)
    clock.now = 110.0
    assert load(tier, names, room(1)) == (Outcome.MISSING,)
    put(tier, names, blocks(1))
    clock.now = 120.0
    assert (tier.usage().bytes, tier.usage().blocks) == (0, 0)


def test_only_a_store_with_a_limit_promises_anything() -> None:
    for limit, coverable in ((None, 0), (10 * VALUE_BYTES, 10 * VALUE_BYTES)):
        usage = MemoryTier(MemoryStore(limit=limit), CODEC).usage()
        assert (usage.limit, usage.coverable, usage.keeps_quotas) == (limit, coverable, True)


def test_usage_is_known_by_namespace() -> None:
    tier = MemoryTier(MemoryStore(), CODEC)
    put(tier, [*keys(2, "ann"), *keys(1, "bob")], blocks(3))
    assert tier.usage().by_namespace == {"ann": 2 * VALUE_BYTES, "bob": VALUE_BYTES}
    assert tier.usage().blocks == 3


def test_nothing_runs_before_it_is_told() -> None:
    """Until then an operation is under way, and its memory is its own."""
    steps = Steps()
    tier = MemoryTier(MemoryStore(), CODEC, run=steps)
    names, values, into = keys(1), blocks(1), room(1)
    stored, found, loaded = tier.put(names, values), tier.lookup(ids(names)), tier.load(ids(names), into)
    assert not stored.done()
    with pytest.raises(TimeoutError):
        stored.result(0)
    steps.run(1)
    assert (stored.done(), found.done()) == (True, False)
    loaded.cancel()
    assert not loaded.done()
    steps.run()
    assert found.result() == Tally(1, Outcome.OK)
    assert loaded.result() == (Outcome.CANCELLED,)
    assert into == room(1)


def test_closing_cancels_what_was_not_told_to_run() -> None:
    """And running it later does nothing."""
    steps = Steps()
    tier = MemoryTier(MemoryStore(), CODEC, run=steps)
    names = keys(2)
    operation = tier.put(names, blocks(2))
    tier.close()
    assert operation.result(0) == (Outcome.CANCELLED,) * 2
    steps.run()
    assert len(tier.store) == 0


@pytest.mark.parametrize(
    ("change", "outcome"),
    [
        (lambda value: value[:-1], Outcome.CORRUPT),
        (lambda value: value[:100], Outcome.CORRUPT),
        (lambda value: b"", Outcome.CORRUPT),
        (lambda value: value[:-1] + bytes([value[-1] ^ 1]), Outcome.CORRUPT),
        (lambda value: value[:60] + bytes([value[60] ^ 1]) + value[61:], Outcome.CORRUPT),
        (lambda value: value[:4] + b"\x09" + value[5:], Outcome.WRONG_LAYOUT),
    ],
    ids=["truncated", "no header", "empty", "payload", "identity", "version"],
)
def test_a_damaged_value_is_never_ok(change: Callable[[bytes], bytes], outcome: Outcome) -> None:
    """It is there when it is looked up, and not taken when it is read; a later put repairs it."""
    tier = MemoryTier(MemoryStore(), CODEC)
    names, values, into = keys(1), blocks(1), room(1)
    put(tier, names, values)
    tier.store.tamper(names[0].id, change)
    assert lookup(tier, names) == Tally(1, Outcome.OK)
    assert load(tier, names, into) == (outcome,)
    put(tier, names, values)
    assert load(tier, names, into) == (Outcome.OK,)
    assert into == values
