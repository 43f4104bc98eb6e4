"""A prefix that is always in use is never evicted, and is in the store all the same: once, and at nobody's cost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fixtures.engines import drive, identities, request, tiny_core
from lamina.engine.core import EngineCore
from lamina.engine.store_memory import StoreMemory
from lamina.engine.tier_hot import HotPrefixes
from lamina.types import QuotaPolicy, TierQuota
from lamina_kvtier.identity import BlockId
from lamina_kvtier.manager import KvManager
from lamina_kvtier.memory_tier import MemoryStore, Steps
from lamina_kvtier.reasons import Reason
from lamina_kvtier.tier import BlockKey
from support.below import Below
from support.fixed_rates import HandClock

ROOMY: dict[str, Any] = {"num_blocks": 60, "max_batch_tokens": 128}  # nothing is ever evicted


def name(number: int) -> BlockId:
    return number.to_bytes(32, "big")


class Finds:
    """HotPrefixes over a store that is told of by hand."""

    def __init__(self, most: int = 100) -> None:
        self.clock = HandClock()
        self.memory = StoreMemory(clock=self.clock)
        self.hot = HotPrefixes(self.memory, self.clock, most=most)

    def rest(self) -> list[BlockId]:
        found: list[BlockId] = []
        while not self.hot.is_empty:
            found += self.hot.next(100)[1]
        return found


PREFIX = [name(at) for at in range(4)]


def test_what_two_requests_found_is_hot_head_first() -> None:
    finds = Finds()
    finds.hot.found("a", 1, PREFIX)
    finds.hot.found("a", 1, PREFIX)  # the same one, while it computes
    assert finds.hot.is_empty
    finds.hot.found("a", 2, PREFIX[:3])
    assert finds.hot.next(2) == ("a", PREFIX[:2])
    assert finds.hot.next(2) == ("a", PREFIX[2:3])
    assert finds.hot.is_empty


def test_what_the_store_has_is_not_named_until_it_has_it_no_more() -> None:
    finds = Finds()
    finds.memory.note(PREFIX[:2])
    for number in range(5):
        finds.hot.found("a", number, PREFIX)
    assert finds.rest() == PREFIX[2:]
    finds.memory.note(PREFIX)
    finds.clock.now += 1000
    finds.hot.found("a", 10, PREFIX)
    assert finds.hot.is_empty
    finds.memory.missed(PREFIX[3:])
    finds.hot.found("a", 11, PREFIX)
    assert finds.rest() == PREFIX[3:]


def test_what_could_not_be_saved_is_named_again_a_minute_later() -> None:
    finds = Finds()
    for number in range(100):
        finds.hot.found("a", number, PREFIX)
    assert finds.rest() == PREFIX
    finds.hot.found("a", 200, PREFIX)
    assert finds.hot.is_empty
    finds.clock.now += 60
    finds.hot.found("a", 201, PREFIX)
    assert finds.rest() == PREFIX


def test_namespaces_take_turns_and_what_has_no_room_waits_no_more() -> None:
    finds = Finds()
    for number in range(2):
        finds.hot.found("a", number, PREFIX)
        finds.hot.found("b", 10 + number, [name(at) for at in range(10, 14)])
    assert [finds.hot.next(1)[0] for _ in range(4)] == ["a", "b", "a", "b"]
    finds.hot.drop("a")
    assert finds.rest() == [name(12), name(13)]


def test_it_remembers_no_more_than_it_was_told() -> None:
    finds = Finds(most=8)
    for number in range(2):
        finds.hot.found("a", number, PREFIX)
    for block in range(100, 200):
        finds.hot.found("b", block, [name(block)])
        finds.hot.found("b", 1000 + block, [name(block)])
    assert finds.rest() == [*PREFIX, *map(name, range(100, 104))]
    assert len(finds.hot._finds) == 8


# In an engine


def prompt(seed: int, blocks: int = 4) -> list[int]:
    return [(7 * at + seed) % 200 + 3 for at in range(16 * blocks)]


def ask(core: EngineCore, token_ids: list[int], tenant: str = "t", times: int = 1) -> int:
    """How many tokens the last of so many requests found, which all end differently."""
    found = 0
    for _ in range(times):
        before, number = core.stats().prefix_hit_tokens, core._arrivals
        drive(core, [request(f"r{number}", [*token_ids, 5 + number, 9], tenant=tenant, max_tokens=4)])
        found = core.stats().prefix_hit_tokens - before
    return found


def go_on(core: EngineCore, steps: int = 12) -> None:
    """Steps in which somebody else computes a little."""
    drive(core, [request(f"other{core._arrivals}", [3, 4, 5], tenant="other", max_tokens=steps)])


@pytest.mark.parametrize("shared", [True, False], ids=["host memory is a tier", "a store alone"])
def test_a_hot_prefix_is_found_by_another_engine(tmp_path: Path, shared: bool) -> None:
    """Neither evicted nor pinned; the first engine still runs, or was killed: it does nothing at its end."""
    store = MemoryStore()
    below = Below(store=store, shared=shared)
    first = tiny_core(tmp_path, tiers=below, **ROOMY)
    ids = identities(first, prompt(1))
    ask(first, prompt(1), times=2)
    go_on(first)
    assert first.stats().spilled_blocks == first.stats().stored_blocks == 0, "found once is not hot"
    assert ask(first, prompt(1)) == 64
    go_on(first)
    assert sum(map(store.has, ids)) == 4
    second = tiny_core(tmp_path, tiers=below, **ROOMY)
    assert ask(second, prompt(1)) == 64
    assert second.stats().loaded_blocks == 4
    assert ask(second, prompt(1), tenant="stranger") == 0
    ask(first, prompt(1), times=10)
    go_on(first)
    assert first.stats().spilled_blocks == first.stats().stored_blocks == 4
    assert first.scheduler.kv.evicted_blocks == 0
    for core, tiers in zip((first, second), below.made, strict=True):
        core.check_integrity()
        tiers.check_integrity()
        core.close()


def test_requests_that_start_together_make_a_prefix_hot(tmp_path: Path) -> None:
    """One computes, and the others take its blocks on the way."""
    store = MemoryStore()
    core = tiny_core(tmp_path, tiers=Below(store=store), **ROOMY)
    ids = identities(core, prompt(1))
    drive(core, [request(f"r{number}", [*prompt(1), 5 + number], max_tokens=6) for number in range(3)])
    go_on(core)
    assert sum(map(store.has, ids)) == 4
    core.close()


def test_one_that_comes_back_after_it_gave_way_has_found_nothing_new(tmp_path: Path) -> None:
    """Only what it computed itself."""
    below = Below(store=MemoryStore())
    core = tiny_core(tmp_path, tiers=below, **ROOMY)
    core.submit(request("back", prompt(1), max_tokens=60))
    for _ in range(4):
        core.step()
    core.scheduler._preempt(core.scheduler.running[0], core.scheduler.plan())
    core.step()
    [choice] = core.scheduler.running
    assert len(choice.table) >= 4
    assert below.made[0]._saves._hot._finds == {}
    core.close()


def test_what_came_to_the_store_while_it_waited_is_not_copied(tmp_path: Path) -> None:
    """A pin, another replica's look-up or a load told of it."""
    below = Below(store=MemoryStore())
    core = tiny_core(tmp_path, tiers=below, **ROOMY)
    ids = identities(core, prompt(1))
    ask(core, prompt(1))
    tiers = below.made[0]
    for number in range(2):
        tiers._saves.found("t", number, ids)
    tiers.store_memory.note(ids[:3])
    go_on(core)
    assert core.stats().spilled_blocks == 1
    core.close()


def test_without_a_store_nothing_is_counted(tmp_path: Path) -> None:
    below = Below(shared=True)
    core = tiny_core(tmp_path, tiers=below, **ROOMY)
    ask(core, prompt(1), times=6)
    assert below.made[0]._saves._hot._finds == {}
    assert core.stats().spilled_blocks == 0
    core.close()


def test_steps_in_which_nothing_new_is_hot_look_at_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the size of the pool, and however much in it is hot and saved."""
    core = tiny_core(tmp_path, tiers=Below(store=MemoryStore()), **ROOMY)
    ask(core, prompt(1), times=4)
    go_on(core)
    assert core.stats().stored_blocks == 4
    looks: list[str] = []
    for owner, method in ((HotPrefixes, "found"), (HotPrefixes, "next"), (KvManager, "known"), (KvManager, "find")):
        monkeypatch.setattr(owner, method, lambda *_, method=method: looks.append(method) or [])
    core.submit(request("long", [3, 4, 5], max_tokens=40))
    core.step()
    looks.clear()
    for _ in range(30):
        core.step()
    assert looks == []
    core.close()


# At nobody's cost


def crowded(below: Below, core: EngineCore, owner: str, *, leave: int = 0) -> list[BlockKey]:
    """Fills host memory with blocks of one namespace."""
    host = below.made[-1]._host
    keys = [BlockKey(name(10_000 + at), owner) for at in range(below.host - leave)]
    host.commit([room for room in host.reserve(keys) if room is not None])
    core.check_integrity()
    return keys


@pytest.mark.parametrize(
    ("reserved", "others", "stored", "lost"),
    [(0, "b", 0, 0), (0, "t", 4, 2), (4, "b", 4, 4), (2, "b", 4, 2), (1, "b", 1, 1)],
    ids=["no room", "in place of its own", "within its reservation", "the same slots again", "a part"],
)
def test_nobody_else_loses_a_block_in_host_memory(
    tmp_path: Path, reserved: int, others: str, stored: int, lost: int
) -> None:
    store = MemoryStore()
    below = Below(host=8, store=store, shared=True)
    core = tiny_core(tmp_path, tiers=below, **ROOMY)
    unit = core.info.block_bytes
    core.commons.set_quotas([QuotaPolicy(namespace="t", host=TierQuota(reserved=reserved * unit))])
    ids = identities(core, prompt(1))
    keys = crowded(below, core, others)
    ask(core, prompt(1), times=3)
    for _ in range(4):
        go_on(core)
    host = below.made[-1]._host
    assert [store.has(identity) for identity in ids] == [at < stored for at in range(4)]
    assert sum(not host.knows(key.id) for key in keys) == lost  # two slots at a time: a quarter of host memory
    assert not host.refusals
    core.check_integrity()
    core.close()


@pytest.mark.parametrize(("first_dirty", "stored", "lost"), [(0, 0, 0), (1, 1, 1), (8, 4, 2)])
def test_others_lose_copies_of_what_the_store_has(tmp_path: Path, first_dirty: int, stored: int, lost: int) -> None:
    """To a quiet tenant that has no reservation, and nothing in a host memory that is full. Of the blocks there the
    store has those that go before `first_dirty`."""
    store = MemoryStore()
    below = Below(host=8, store=store, shared=True)
    core = tiny_core(tmp_path, tiers=below, **ROOMY)
    core.commons.set_quotas([QuotaPolicy(namespace="t")])
    ids = identities(core, prompt(1))
    keys = crowded(below, core, "b")[::-1]  # the tail goes first
    below.made[-1].store_memory.note([key.id for key in keys[:first_dirty]])
    ask(core, prompt(1), times=3)
    for _ in range(4):
        go_on(core)
    host = below.made[-1]._host
    assert [store.has(identity) for identity in ids] == [at < stored for at in range(4)]
    # Two at a time, a quarter of host memory, and then the same slots again.
    assert [host.knows(key.id) for key in keys] == [at >= lost for at in range(8)]
    assert not host.refusals
    core.check_integrity()
    core.close()


def test_a_limit_of_host_memory_is_kept(tmp_path: Path) -> None:
    store = MemoryStore()
    below = Below(host=40, store=store, shared=True)
    core = tiny_core(tmp_path, tiers=below, **ROOMY)
    core.commons.set_quotas([QuotaPolicy(namespace="t", host=TierQuota(limit=3 * core.info.block_bytes))])
    ids = identities(core, prompt(1))
    tiers = below.made[-1]
    ask(core, prompt(1), times=3)
    most = 0
    for _ in range(6):
        go_on(core)
        most = max(most, tiers._host.slots_of("t"))
    assert most <= 3
    stored = [store.has(identity) for identity in ids]
    assert stored == sorted(stored, reverse=True), "a tail without its head"
    assert stored[0]
    core.close()


def test_few_are_on_their_way_and_only_while_nothing_new_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lamina.engine.tier_puts._PUT_BYTES", 2 * 4096)
    store, steps = MemoryStore(), Steps()
    below = Below(host=16, store=store)
    below.run = steps
    core = tiny_core(tmp_path, tiers=below, **ROOMY)
    assert core.info.block_bytes == 4096
    ids = identities(core, prompt(1, 12))
    ask(core, prompt(1, 12), times=3)
    tiers = below.made[-1]
    for _ in range(20):
        go_on(core, 4)
        assert tiers._host.usage().held <= 4  # a quarter of host memory, in puts of two
    assert core.stats().spilled_blocks == 4
    new = crowded(below, core, "b", leave=8)
    steps.run()
    tiers._puts.want(new)
    for _ in range(5):  # those are under way now, and as much as others may have
        go_on(core, 4)
    assert tiers._host.usage().held == 8
    assert core.stats().spilled_blocks == 4
    for _ in range(20):
        steps.run()
        go_on(core, 4)
    assert sum(map(store.has, ids)) == 12
    assert all(store.has(key.id) for key in new)
    core.close()


def test_what_host_memory_has_already_is_put_without_a_copy(tmp_path: Path) -> None:
    """It did not get to the store before, for want of room in the line."""
    store = MemoryStore()
    below = Below(store=store)
    core = tiny_core(tmp_path, tiers=below, **ROOMY)
    ids = identities(core, prompt(1))
    ask(core, prompt(1))
    host = below.made[-1]._host
    tiers = below.made[-1]
    tiers._spills.save_now(
        [(block, identity) for identity in ids if (block := core.scheduler.kv.find(identity)) is not None]
    )
    tiers._puts.want = lambda keys, *, passing=False: None  # type: ignore[method-assign]
    go_on(core)
    del tiers._puts.want
    assert all(map(host.stores, ids))
    assert not any(map(store.has, ids))
    spilled = core.stats().spilled_blocks
    ask(core, prompt(1), times=2)
    go_on(core)
    assert all(map(store.has, ids))
    assert core.stats().spilled_blocks == spilled == 4
    core.close()


def test_room_for_a_tail_is_not_made_of_its_head(tmp_path: Path) -> None:
    """Host memory is full of the tenant's own blocks, and the oldest of them are the head, which the store lacks."""
    store = MemoryStore()
    below = Below(host=16, store=store, shared=True)
    core = tiny_core(tmp_path, tiers=below, **ROOMY)
    tiers, kv = below.made[-1], core.scheduler.kv
    ids = identities(core, prompt(1))
    ask(core, prompt(1))
    for seed in range(2, 6):
        ask(core, prompt(seed))
    tiers._puts.want = lambda keys, *, passing=False: None  # type: ignore[method-assign]
    others = [identity for seed in range(2, 6) for identity in identities(core, prompt(seed))]
    for wanted in (ids[:2], others[:7], others[7:14]):
        tiers._spills.save_now([(block, identity) for identity in wanted if (block := kv.find(identity)) is not None])
        go_on(core)
    del tiers._puts.want
    host = tiers._host
    assert [host.stores(identity) for identity in ids] == [True, True, False, False]
    assert host.usage().free == 0
    ask(core, prompt(1), times=2)
    go_on(core)
    assert [store.has(identity) for identity in ids] == [True] * 4
    core.close()


def test_a_hot_prefix_that_was_deleted_is_saved_no_more(tmp_path: Path) -> None:
    store = MemoryStore()
    core = tiny_core(tmp_path, tiers=Below(store=store), **ROOMY)
    ids = identities(core, prompt(1))
    ask(core, prompt(1), times=2)
    core.submit(request("third", [*prompt(1), 7], max_tokens=20))
    tiers = core._tiers
    tiers._saves.hot = lambda: None  # type: ignore[attr-defined]
    core.step()
    core.step()
    core.cancel("third")
    core.erase_namespace("t")
    del tiers._saves.hot  # type: ignore[attr-defined]
    go_on(core)
    assert not any(map(store.has, ids))
    assert core.stats().spilled_blocks == 0
    core.close()


def test_a_store_that_refuses_is_asked_once_a_minute(tmp_path: Path) -> None:
    clock = HandClock()
    below = Below(store=MemoryStore(limit=1))
    below.clock = clock
    core = tiny_core(tmp_path, tiers=below, **ROOMY)
    host = below.made[-1]._host
    for _ in range(20):
        ask(core, prompt(1), times=2)
        host.clear(Reason.PRESSURE)
    assert core.stats().spilled_blocks == 4
    clock.now += 60
    ask(core, prompt(1), times=2)
    go_on(core)
    assert core.stats().spilled_blocks == 8
    assert core.stats().stored_blocks == 0
    core.close()
