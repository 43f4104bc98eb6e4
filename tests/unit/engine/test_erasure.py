"""Deleted tenants and adapters leave no blocks: not in the pool, not in host memory, not in the store."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fixtures.engines import drive, publish_adapter, request, tiny_core, write_adapter
from lamina.engine.core import EngineCore
from lamina.engine.erasure import Erasure
from lamina.engine.tier_quotas import PoolOnly
from lamina.types import PinOrder, QuotaPolicy, TierQuota
from lamina_kvtier import KvManager, QuotaBook
from lamina_kvtier.block_codec import HEADER_BYTES, _unpack
from lamina_kvtier.block_codec import Header as StoredHeader
from lamina_kvtier.memory_tier import MemoryStore
from lamina_kvtier.reasons import Reason
from lamina_kvtier.tier import NO_ADAPTER, BlockKey
from support.below import Below

BLOCK = 16
SMALL: dict[str, Any] = {"num_blocks": 14, "max_batch_tokens": 64}


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def digest(store: Path, tmp_path: Path) -> str:
    return publish_adapter(store, write_adapter(tmp_path / "adapter", rank=4, seed=1))


def prompt(name: str) -> list[int]:
    return [*random.Random(name).choices(range(3, 211), k=BLOCK * 5), 7]


def say(core: EngineCore, tenant: str, text: str = "", adapter: str | None = None) -> list[int]:
    said, _ = drive(core, [request("r", prompt(tenant + text), tenant=tenant, adapter=adapter, max_tokens=3)])
    return said["r", 0]


def places(core: EngineCore, tenant: str) -> dict[str, int]:
    """Its blocks by tier."""
    (share,) = [t for t in core.commons.report().tenants if t.namespace == tenant] or [None]
    if share is None:
        return {"gpu": 0, "host": 0}
    return {"gpu": share.active + share.cached + share.pinned, "host": share.host_bytes // core.info.block_bytes}


def settled(core: EngineCore) -> None:
    for _ in range(20):
        core.step()
    core.check_integrity()


def test_a_deleted_tenant_leaves_nothing(store: Path) -> None:
    """Neither in the pool nor below; the others keep theirs, and what it left is told as deleted."""
    kept = MemoryStore()
    below = Below(host=24, store=kept, shared=True)
    core = tiny_core(store, tiers=below, **SMALL)
    core.commons.set_quotas([QuotaPolicy(namespace="ann", store=TierQuota(limit=1 << 20))])
    for turn in range(2):
        say(core, "ann", str(turn))
        say(core, "bob", str(turn))
    settled(core)
    before = kept.by_namespace()
    assert before["ann"] > 0
    assert places(core, "ann")["host"] > 0
    others = places(core, "bob")
    core.erase_namespace("ann")
    settled(core)
    assert places(core, "ann") == {"gpu": 0, "host": 0}
    assert places(core, "bob") == others
    assert kept.by_namespace().keys() == {"bob"}
    assert kept.by_namespace()["bob"] >= before["bob"]
    assert not core.commons.erasure.is_pending
    found = core.stats().prefix_hit_tokens
    say(core, "ann", "0")
    assert core.stats().prefix_hit_tokens == found
    reasons: Counter[str] = Counter()
    for share in core.inspector.prefixes().tenants:
        if share.namespace == "ann":
            reasons.update({reason: count for _, reason, count in share.misses})
    assert reasons[Reason.DELETED.value] >= 5, reasons
    core.close()


def test_a_running_request_of_a_deleted_tenant_ends_and_takes_its_blocks_along(store: Path) -> None:
    """It is served out; what it computed and was granted to keep is gone with it."""
    below = Below(host=24, shared=True)
    core = tiny_core(store, tiers=below, **SMALL)
    core.commons.set_quotas([QuotaPolicy(namespace="ann", gpu=TierQuota(reserved=6, pin_limit=6))])
    expected = say(core, "ann")
    pinned = core.commons.pin(
        PinOrder(
            namespace="ann", adapter=None, token_ids=tuple(prompt("ann")), floor="gpu", ttl_s=60.0, hard_max_s=60.0
        )
    )
    assert pinned.pin is not None
    core.submit(request("r", prompt("ann"), tenant="ann", max_tokens=40))
    tokens: list[int] = []
    while len(tokens) < 3:
        tokens += [token for event in core.step() for token in event.token_ids]
    assert tokens[:3] == expected
    core.erase_namespace("ann")
    assert core.commons.report().pins == ()
    core.check_integrity()
    assert core.commons.erasure.is_pending
    while core.has_work():
        tokens += [token for event in core.step() for token in event.token_ids]
    settled(core)
    assert len(tokens) == 40
    assert places(core, "ann") == {"gpu": 0, "host": 0}
    assert core.scheduler.kv.usage().free == 14
    assert not core.commons.erasure.is_pending
    core.close()


def test_a_deleted_adapter_leaves_nothing_in_the_engine(store: Path, digest: str) -> None:
    """What others computed stays; who uses it knows before that it has blocks, even if it is not loaded any more."""
    core = tiny_core(store, tiers=Below(host=24), **SMALL)
    say(core, "ann", adapter=digest)
    say(core, "ann", "plain")
    say(core, "bob", adapter=digest)
    settled(core)
    (running,) = core.stats().adapters
    assert (running.digest, running.loaded) == (digest, True)
    assert running.blocks > 0
    kept = core.scheduler.kv.match(_ids(core, "ann", "plain"))
    core.unload_adapter(digest)
    settled(core)
    assert core.stats().adapters == ()
    assert core.scheduler.kv.match(_ids(core, "ann", "plain")) == kept
    assert core.scheduler.kv.blocks_by_adapter() == {}
    core.close()


class Moving(PoolOnly):
    """Transfers of whatever is asked about are under way, and another one begins as long as there is what to move."""

    moving = True

    def __init__(self) -> None:
        self.drops: list[str] = []

    def forget_where(self, wanted: Callable[[BlockKey], bool]) -> None:
        self.drops.append("host")

    def forget_in_store(self, namespace: str) -> None:
        self.drops.append(namespace)

    def moves(self, wanted: Callable[[BlockKey], bool]) -> bool:
        return self.moving


def test_what_waits_to_be_moved_is_dropped_before_it_moves() -> None:
    """When the last request has ended, not after the last transfer: each would begin the next one."""
    below = Moving()
    erasure = Erasure(KvManager(4, quotas=QuotaBook(4)), below)
    erasure.erase_namespace("ann")
    assert below.drops == ["host", "ann"]
    erasure.go_on({"ann"}, set())
    assert below.drops == ["host", "ann"]
    for _ in range(3):  # and once is enough: looking through all tiers in every step would not be
        erasure.go_on({"bob"}, set())
    assert below.drops == ["host", "ann"] * 2
    assert erasure.is_pending
    below.moving = False
    erasure.go_on({"bob"}, set())
    assert below.drops == ["host", "ann"] * 3
    assert not erasure.is_pending


@pytest.mark.parametrize("lost", ["adapter", "tenant", "step"])
def test_what_gives_way_saves_nothing_that_was_deleted(store: Path, digest: str, lost: str) -> None:
    """Its blocks lost their identity, and who computed them is forgotten: saved under it, they would stay for ever."""
    below = Below(host=24, store=MemoryStore(), shared=True)
    core = tiny_core(store, tiers=below, **SMALL)
    core.submit(request("r", prompt("ann"), tenant="ann", adapter=digest, max_tokens=40))
    tokens = 0
    while tokens < 3:
        tokens += sum(len(event.token_ids) for event in core.step())
    (choice,) = core.scheduler.running
    ids = choice.chain.ids[: choice.published]
    settled_tiers(core)
    if lost == "adapter":
        core.unload_adapter(digest)
    elif lost == "tenant":
        core.erase_namespace("ann")
    else:  # of another request with the same prefix
        core.scheduler.kv.forget(ids, Reason.INTEGRITY)
        core._tiers.forget(ids)
    tiers = below.made[-1]
    tiers.gives_way(choice)
    settled_tiers(core)
    assert [identity for identity in ids if tiers.below is not None and tiers.below.host.knows(identity)] == []
    core.cancel("r")
    settled(core)
    assert core.scheduler.kv.usage().free == 14
    assert not core.commons.erasure.is_pending
    core.close()


def settled_tiers(core: EngineCore) -> None:
    """What is on its way down has arrived, without a step."""
    until = time.monotonic() + 10
    while core.idle() == 0.25:
        assert time.monotonic() < until


def test_stored_blocks_say_which_adapter_computed_them(store: Path, digest: str) -> None:
    """Spilled or pinned, from the pool to host memory and on to the store; what comes up again does, too. A block of
    another one is not believed."""
    kept = MemoryStore()
    core = tiny_core(store, tiers=Below(host=6, store=kept), **SMALL)
    expected = say(core, "ann", adapter=digest)
    say(core, "ann", "1")
    say(core, "bob", "2")
    say(core, "bob", "3")
    settled(core)
    counted = Counter(header.adapter for header in headers(kept))
    assert counted.keys() == {bytes.fromhex(digest), NO_ADAPTER}
    assert counted[bytes.fromhex(digest)] >= 5
    again = tiny_core(store, tiers=Below(host=24, store=kept), **SMALL)
    assert say(again, "ann", adapter=digest) == expected
    assert again.scheduler.kv.blocks_by_adapter()[bytes.fromhex(digest)] >= 5
    again.check_integrity()
    for value in kept._values.values():
        header = _unpack(value.data[:HEADER_BYTES])
        assert isinstance(header, StoredHeader)
        if header.adapter == bytes.fromhex(digest):
            value.data = replace(header, adapter=b"\x07" * 32).pack() + value.data[HEADER_BYTES:]
    wary = tiny_core(store, tiers=Below(host=24, store=kept), **SMALL)
    assert say(wary, "ann", adapter=digest) == expected
    assert wary.stats().loaded_blocks == 0
    for engine in (core, again, wary):
        engine.close()


def headers(kept: MemoryStore) -> list[StoredHeader]:
    found = [_unpack(value.data[:HEADER_BYTES]) for value in kept._values.values()]
    return [header for header in found if isinstance(header, StoredHeader)]


def _ids(core: EngineCore, tenant: str, text: str) -> list[bytes]:
    order = PinOrder(
        namespace=tenant, adapter=None, token_ids=tuple(prompt(tenant + text)), floor="gpu", ttl_s=1.0, hard_max_s=1.0
    )
    return core.commons._identities(order)
