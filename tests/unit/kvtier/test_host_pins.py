"""Pins with floor `host`: guarded on the device until saved, never evicted below, and what can be asked meanwhile."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from lamina_kvtier import IdentityChain, IntegrityError, KvManager, Ledger, OutOfBlocks, Quota, QuotaBook
from lamina_kvtier.host_pins import HostPins
from lamina_kvtier.host_tier import HostTier
from lamina_kvtier.quota_policy import QuotaPolicy
from lamina_kvtier.reasons import Reason
from lamina_kvtier.reclaim import ReclaimOrder
from lamina_kvtier.tier import BlockKey


class Machine:
    """A pool of 6 blocks above 4 slots, without bytes."""

    def __init__(self, *, loaded: bool = True) -> None:
        device, below = QuotaBook(6), QuotaBook(4)
        if loaded:
            device.load({"a": Quota(3, 6, 0)})
            below.load({"a": Quota(2, 4, 2)})
        self.kv = KvManager(6, 1, quotas=device)
        self.host = HostTier(4, 1, policy=QuotaPolicy(ReclaimOrder(4, Ledger(below))))
        self.pins = HostPins(self.kv, self.host)

    def compute(self, *tokens: int, name: str = "a") -> list[bytes]:
        """A request comes and goes."""
        ids = identities(*tokens, name=name)
        table = self.kv.acquire(ids)
        try:
            table += self.kv.allocate(len(ids) - len(table), owner=name)
            for block, identity in zip(table, ids, strict=True):
                self.kv.publish(block, identity)
        finally:
            self.kv.release(table)
        return ids

    def save(self) -> list[bytes]:
        """Everything that is due."""
        keys = [key for _, key in self.pins.due(10)]
        self.host.commit([reserved for reserved in self.host.reserve(keys) if reserved is not None])
        return [key.id for key in keys]

    def check(self) -> None:
        self.kv.check_integrity()
        self.host.check_integrity()
        self.pins.check_integrity()


def identities(*tokens: int, name: str = "a") -> list[bytes]:
    chain = IdentityChain(name.encode().ljust(32), 1)
    chain.extend(tokens)
    return chain.ids


def test_a_computed_block_stays_until_it_is_saved() -> None:
    """Then the device may lose it: host memory does not."""
    machine = Machine()
    pinned = machine.compute(1, 2)
    machine.pins.pin(pinned, "a")
    machine.check()
    assert machine.kv.usage().pinned == 2
    machine.compute(3, 4, 5, 6)
    with pytest.raises(OutOfBlocks):
        machine.compute(1, 7, 8, 9, 10, 11, 12)
    assert machine.kv.match(pinned) == 2
    assert machine.save() == pinned
    machine.check()
    assert machine.kv.usage().pinned == 0
    machine.compute(7, 8, 9, 10, 11, 12)
    assert machine.kv.match(pinned) == 0
    for token in range(20, 30):
        machine.host.commit([r for r in machine.host.reserve([BlockKey(identities(token)[0], "a")]) if r])
    assert len(machine.host.find(pinned)) == machine.pins.resident(pinned) == 2
    machine.check()


def test_a_pin_waits_for_its_block() -> None:
    """Guarded from the moment of publication, also while it is in use."""
    machine = Machine()
    ids = identities(1, 2)
    machine.pins.pin(ids, "a")
    assert machine.pins.due(10) == []
    assert machine.pins.resident(ids) == 0
    [block] = machine.kv.allocate(1, owner="a")
    machine.kv.publish(block, ids[0])
    assert machine.pins.due(10) == [(block, BlockKey(ids[0], "a"))]
    machine.check()
    machine.kv.release([block])
    assert machine.kv.usage().pinned == 1
    assert machine.pins.resident(ids) == 1
    machine.check()


def test_what_is_being_saved_is_not_due() -> None:
    """And is again if that fails, until it is there."""
    machine = Machine()
    ids = machine.compute(1, 2)
    machine.pins.pin(ids, "a")
    written = machine.host.reserve([key for _, key in machine.pins.due(1)])
    assert [key.id for _, key in machine.pins.due(10)] == ids[1:]
    machine.host.abandon([reserved for reserved in written if reserved])
    assert [key.id for _, key in machine.pins.due(10)] == ids
    machine.check()
    machine.save()
    assert machine.pins.due(10) == []
    machine.check()


def test_the_last_of_several_pins_lets_go() -> None:
    machine = Machine()
    ids = machine.compute(1, 2)
    machine.pins.pin(ids, "a")
    machine.pins.pin(ids[:1], "a")
    machine.pins.unpin(ids, "a")
    machine.check()
    assert (machine.kv.usage().pinned, [key.id for _, key in machine.pins.due(10)]) == (1, ids[:1])
    machine.pins.unpin(ids[:1], "a")
    machine.check()
    assert (machine.kv.usage().pinned, machine.pins.due(10)) == (0, [])


def test_what_host_memory_has_to_forget_is_guarded_again() -> None:
    """A block that turned out to be wrong is saved anew, from the device or once it has been computed again."""
    machine = Machine()
    ids = machine.compute(1, 2)
    machine.pins.pin(ids, "a")
    machine.save()
    machine.host.forget(ids, Reason.INTEGRITY)
    machine.check()
    assert [key.id for _, key in machine.pins.due(10)] == ids
    machine.kv.forget(ids)
    assert machine.pins.due(10) == []
    machine.check()
    machine.compute(1, 2)
    assert machine.save() == ids
    machine.check()


def test_another_tenants_pin_keeps_nothing() -> None:
    """Of blocks that it does not pay for, on no tier."""
    machine = Machine()
    ids = machine.compute(1, 2)
    machine.pins.pin(ids, "b")
    assert machine.kv.usage().pinned == 0
    assert machine.pins.due(10) == []
    machine.check()
    machine.host.commit([r for r in machine.host.reserve([BlockKey(i, "a") for i in ids]) if r])
    assert machine.host.usage().cached == 2


def test_admission_counts_on_pins_but_not_on_guards() -> None:
    """A guard ends in a moment: a request that needs it to last would be admitted and could never run."""
    machine = Machine()
    ids = machine.compute(1, 2, 3)
    machine.kv.pin(ids[:1], "a")
    machine.pins.pin(ids[:2], "a")
    found = machine.kv.preview(ids)
    assert (found.known, found.pinned, found.cached) == (3, 1, 1)
    machine.kv.unguard(ids[0], "a")
    assert machine.kv.preview(ids).pinned == 1


BREAKS: dict[str, tuple[Callable[[Machine], object], str]] = {
    "unguarded": (lambda machine: machine.pins._guarded.popitem(), "have to be saved"),
    "not due": (lambda machine: machine.pins._due.clear(), "neither kept nor to be saved"),
    "not kept": (lambda machine: machine.kv.unguard(identities(1)[0], "a"), "neither kept nor to be saved"),
}


@pytest.mark.parametrize("name", BREAKS)
def test_each_broken_rule_is_named(name: str) -> None:
    """The proof itself must be able to fail."""
    machine = Machine()
    machine.pins.pin(machine.compute(1, 2), "a")
    machine.check()
    damage, message = BREAKS[name]
    damage(machine)
    with pytest.raises(IntegrityError, match=message):
        machine.pins.check_integrity()
