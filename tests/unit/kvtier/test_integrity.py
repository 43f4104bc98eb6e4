"""The proof itself must be able to fail: each rule is broken by hand and has to be named."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from lamina_kvtier import IntegrityError, KvManager

Break = Callable[[KvManager], object]


def pool() -> KvManager:
    """Eight blocks: 0 active twice, 1 active and known, 2 and 3 cached (3 is older), 4 ... 7 free."""
    manager = KvManager(8)
    blocks = manager.allocate(4)
    for block in blocks[1:]:
        manager.publish(block, bytes([block]) * 32)
    manager.fork([0])
    manager.release([2, 3])
    return manager


def counts(manager: KvManager, block: int, count: int) -> None:
    manager._references._counts[block] = count


def rename(manager: KvManager, block: int, identity: bytes | None) -> None:
    manager._index._identities[block] = identity


BREAKS: dict[str, tuple[Break, str]] = {
    "held block in the free list": (lambda m: counts(m, 4, 1), "block 4: reference count 1, but in the free"),
    "unheld block outside the free list": (
        lambda m: counts(m, 1, 0),
        "block 1: reference count 0, but not in",
    ),
    "negative count": (lambda m: counts(m, 0, -1), "block 0: reference count -1"),
    "active counter": (
        lambda m: setattr(m._references, "active", 3),
        "2 blocks are active, but 3 were counted",
    ),
    "cached counter": (lambda m: setattr(m, "_cached", 1), "2 blocks are cached, but 1 were counted"),
    "free behind cached": (lambda m: m._index.drop(2), "block 2: free, but queued behind a cached"),
    "identity lost by block": (lambda m: rename(m, 1, None), "points to block 1, which does not have it"),
    "identity lost by index": (
        lambda m: m._index._blocks.clear(),
        "3 blocks have an identity, but 0 identities",
    ),
    "two blocks, one identity": (lambda m: rename(m, 0, b"\1" * 32), "4 blocks have an identity, but 3"),
    "broken ring": (lambda m: m._unheld._following.__setitem__(4, 4), "free list: "),
    "free list counter": (lambda m: setattr(m._unheld, "_length", 5), "free list: "),
}


def test_a_sound_pool_passes() -> None:
    """No rule cries wolf."""
    pool().check_integrity()
    pool().check_integrity([[0, 1], [0]])
    KvManager(1).check_integrity([])


@pytest.mark.parametrize("name", BREAKS)
def test_each_broken_rule_is_named(name: str) -> None:
    """Every kind of damage is found and described."""
    manager = pool()
    damage, message = BREAKS[name]
    damage(manager)
    with pytest.raises(IntegrityError) as caught:
        manager.check_integrity()
    assert any(message in violation for violation in caught.value.violations), caught.value.violations


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ([[0, 1]], "block 0: reference count 2, but 1 table entries"),
        ([[0, 1], [0], [0]], "block 0: reference count 2, but 3 table entries"),
        ([[0, 1], [0], [5]], "block 5: reference count 0, but 1 table entries"),
        ([], "block 1: reference count 1, but 0 table entries"),
        ([[0, 1], [0, 8]], "block 8: in a table, but there is no such block"),
        ([[0, 1], [0, -1]], "block -1: in a table, but there is no such block"),
    ],
)
def test_tables_must_account_for_every_reference(tables: list[list[int]], message: str) -> None:
    """A leaked reference and a table entry without one are both found."""
    with pytest.raises(IntegrityError) as caught:
        pool().check_integrity(tables)
    assert message in caught.value.violations


def test_all_violations_are_listed_and_the_message_stays_short() -> None:
    """Programs get every violation; people get the first twenty and how many more there are."""
    with pytest.raises(IntegrityError, match=r"100 violations.*and 80 more") as caught:
        KvManager(100).check_integrity([range(100)])
    assert len(caught.value.violations) == 100
