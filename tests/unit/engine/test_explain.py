"""Each full block of a prompt was found in one tier, or was missing for one reason."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from fixtures.engines import drive, request, tiny_core
from lamina.engine.commons import Commons
from lamina.engine.explain import Explainer
from lamina.engine.inspector import Inspector
from lamina.engine.request import BlockTable, Choice, RequestState
from lamina.engine.sampling_state import SamplingState
from lamina.engine.store_memory import StoreMemory
from lamina.engine.tier_protocol import Below as BelowDevice
from lamina.types import CachedTokens, GenerationRequest, PrefixOrder, SamplingParams, VerifyOrder
from lamina_kvtier.ghosts import Ghosts, segments_for
from lamina_kvtier.host_tier import HostTier
from lamina_kvtier.identity import IdentityChain
from lamina_kvtier.manager import KvManager
from lamina_kvtier.memory_tier import MemoryStore
from lamina_kvtier.quota import Quota, QuotaBook
from lamina_kvtier.reasons import Reason
from lamina_kvtier.tier import BlockKey, TierUsage
from support.below import Below

BLOCK = 1000  # bytes
ROOT = b"r" * 32


class World:
    """A pool of 8 blocks of 4 tokens, host memory of 4, and an explainer; prompts of one block are computed at once."""

    def __init__(self, *, host: int = 4, **options: Any) -> None:
        self.quotas = QuotaBook(8)
        self.kv = KvManager(8, 4, quotas=self.quotas, ghosts=Ghosts(segments_for(8)))
        self.host = HostTier(host, BLOCK) if host else None
        self.explainer = Explainer(self.kv, self.host, block_bytes=BLOCK, **options)
        self.arrivals = count()

    def choice(self, tokens: list[int], namespace: str = "ann") -> Choice:
        """Of a prompt with one more token than these, so that all their blocks may be found."""
        sampling, prompt = SamplingParams(), [*tokens, 0]
        wanted = GenerationRequest(
            request_id="r", prompt_token_ids=tuple(prompt), sampling=sampling, namespace=namespace
        )
        chain = IdentityChain(ROOT, 4)
        chain.extend(prompt)
        state = SamplingState(
            sampling, seed=0, index=0, prompt_token_ids=tuple(prompt), eos_token_ids=frozenset(), vocab_size=99
        )
        return Choice(RequestState(wanted, next(self.arrivals), 0), 0, prompt, chain, state, limit=99)

    def begin(self, choice: Choice) -> None:
        choice.table = BlockTable(self.kv.acquire(choice.known_ids(4)))
        self.explainer.began(choice)
        choice.request.cached_tokens = 4 * len(choice.table)

    def end(self, choice: Choice) -> None:
        """Computes what is missing, and lets go of all."""
        ids = choice.known_ids(4)
        fresh = self.kv.allocate(len(ids) - len(choice.table), owner=choice.request.request.namespace)
        for block, identity in zip(fresh, ids[len(choice.table) :], strict=True):
            self.kv.publish(block, identity)
        self.explainer.settle(choice.request)
        self.kv.release([*choice.table, *fresh])

    def ask(self, tokens: list[int], namespace: str = "ann") -> CachedTokens:
        choice = self.choice(tokens, namespace)
        self.begin(choice)
        self.end(choice)
        return choice.request.cached_by_tier

    def misses(self, namespace: str = "ann") -> dict[tuple[str, str], int]:
        return {(tier, reason): number for tier, reason, number in self.explainer.of(namespace).misses}


def prompt(seed: int, blocks: int = 2) -> list[int]:
    return random.Random(seed).choices(range(1, 99), k=4 * blocks)


def test_what_is_in_the_pool_is_a_hit() -> None:
    """And a prompt that is found whole leaves nothing behind."""
    world = World()
    assert world.ask(prompt(1)) == CachedTokens()
    choice = world.choice(prompt(1))
    world.begin(choice)
    assert choice.request.lookup is None
    assert choice.request.cached_by_tier == CachedTokens(gpu=8)
    world.end(choice)
    assert world.explainer.of("ann").hits == (("gpu", 2),)
    assert world.misses() == {("none", "never_stored"): 2}
    assert world.explainer.of("bob").hits == ()


def test_what_the_pool_evicted_was_lost_there() -> None:
    """With as much more room as would have kept it."""
    world = World()
    for seed in range(5):
        world.ask(prompt(seed))
    world.ask(prompt(0))
    assert world.misses() == {("none", "never_stored"): 10, ("gpu", "pressure"): 2}
    assert world.explainer.of("ann").ghost_hits == (("gpu", 1 * BLOCK, 1), ("gpu", 2 * BLOCK, 1))


def test_a_tenant_at_its_limit_lost_it_to_itself() -> None:
    world = World()
    world.quotas.load({"ann": Quota(0, 4)})
    for seed in (1, 2, 3, 1):
        world.ask(prompt(seed))
    assert world.misses()["gpu", "own_quota"] == 2


def test_the_deepest_tier_has_the_last_word() -> None:
    """Fetch before host memory before pool; each with its own tier."""
    world = World()
    assert world.host is not None
    choice = world.choice(prompt(1, 4))
    first, second, third, _ = choice.known_ids(4)
    for identity in (first, second, third):
        world.kv.publish(world.kv.allocate(1, owner="ann")[0], identity)
    world.kv.forget([first, second, third], Reason.PRESSURE)
    for identity in (first, second):
        (reservation,) = world.host.reserve([BlockKey(identity, "ann")])
        assert reservation is not None
        world.host.commit([reservation])
    world.host.forget([first, second], Reason.TTL)
    world.explainer.arrived(choice, {}, {first: Reason.INTEGRITY, second: Reason.NEVER_STORED})
    world.begin(choice)
    world.explainer.settle(choice.request)
    assert world.misses() == {
        ("store", "integrity"): 1,
        ("host", "ttl"): 1,
        ("gpu", "pressure"): 1,
        ("none", "never_stored"): 1,
    }


@pytest.mark.parametrize(
    ("fate", "tier"),
    [(Reason.REMOTE_DOWN, "store"), (Reason.CHEAPER, "store"), (Reason.PRESSURE, "host"), (Reason.OWN_QUOTA, "store")],
)
def test_a_fetch_has_its_fate(fate: Reason, tier: str) -> None:
    """What was declined because computing is cheaper is counted as that, too."""
    world = World()
    choice = world.choice(prompt(1, 1))
    world.explainer.arrived(choice, {}, dict.fromkeys(choice.known_ids(4), fate))
    world.begin(choice)
    world.end(choice)
    assert world.misses() == {(tier, fate.value): 1}
    declined = (("store", "recompute_cheaper", 1),) if fate is Reason.CHEAPER else ()
    assert world.explainer.of("ann").declined == declined


def test_what_was_brought_up_counts_for_its_tier() -> None:
    world = World()
    choice = world.choice(prompt(1, 3))
    ids = choice.known_ids(4)
    for identity in ids:
        world.kv.publish(world.kv.allocate(1, owner="ann")[0], identity)
    world.explainer.arrived(choice, {ids[1]: "host", ids[2]: "store"}, {})
    world.begin(choice)
    assert choice.request.cached_by_tier == CachedTokens(gpu=4, host=4, store=4)
    assert world.explainer.of("ann").hits == (("gpu", 1), ("host", 1), ("store", 1))
    assert choice.request.lookup is None


def test_what_comes_while_it_prefills_is_found_after_all() -> None:
    """Each block is counted once: as what it was in the end."""
    world = World()
    choice = world.choice(prompt(1, 4))
    ids = choice.known_ids(4)
    world.begin(choice)
    world.explainer.arrived(choice, {ids[3]: "store"}, {ids[1]: Reason.INTEGRITY})
    world.explainer.taken(choice, [ids[2], ids[3]])
    world.explainer.taken(choice, [ids[3]])
    assert world.misses() == {}
    world.explainer.settle(choice.request)
    world.explainer.settle(choice.request)
    assert choice.request.cached_by_tier == CachedTokens(gpu=4, store=4)
    assert world.misses() == {("none", "never_stored"): 1, ("store", "integrity"): 1}
    assert world.explainer.of("ann").hits == (("gpu", 1), ("store", 1))


def test_a_resumed_choice_counts_no_more() -> None:
    """After a preemption it finds its own blocks, and those are no hits."""
    world = World()
    choice = world.choice(prompt(1))
    world.begin(choice)
    world.end(choice)
    world.explainer.arrived(choice, {choice.known_ids(4)[0]: "host"}, {})
    assert choice.request.lookup is None


def test_a_prompt_shorter_than_a_block_has_none() -> None:
    world = World()
    assert world.ask([]) == CachedTokens()
    assert world.explainer.report().tenants == ()


def test_namespaces_are_bounded() -> None:
    """Those that are gone longest are folded into one without a name, and nothing is lost."""
    world = World(host=0, max_namespaces=3)
    for number in range(6):
        world.ask(prompt(number, 1), f"n{number}")
    report = world.explainer.report()
    assert [found.namespace for found in report.tenants] == ["", "n3", "n4", "n5"]
    assert sum(number for found in report.tenants for *_, number in found.misses) == 6


def test_refusals_of_host_memory_are_declines() -> None:
    world = World(host=1)
    assert world.host is not None
    (held,) = world.host.reserve([BlockKey(b"1" * 32, "ann")])
    assert held is not None
    assert world.host.reserve([BlockKey(b"2" * 32, "ann")]) == [None]
    assert world.explainer.of("ann").declined == (("host", "pressure", 1),)


def test_the_store_counts_what_it_refuses_and_gives_up() -> None:
    """By namespace, also of those that nobody asks for here."""
    world = World()
    usage = TierUsage(0, None, refusals={("ann", Reason.OWN_QUOTA): 2}, evictions={("bob", Reason.PRESSURE): 3})
    world.explainer = Explainer(world.kv, world.host, block_bytes=BLOCK, store_usage=lambda: usage)
    ann, bob = world.explainer.report().tenants
    assert (ann.namespace, ann.declined, ann.store_evictions) == ("ann", (("store", "own_quota", 2),), ())
    assert (bob.namespace, bob.declined, bob.store_evictions) == ("bob", (), (("pressure", 3),))


# In an engine


SMALL: dict[str, Any] = {"num_blocks": 14, "max_batch_tokens": 64}


def long(seed: int, name: str, tail: int = 0) -> GenerationRequest:
    prefix = random.Random(seed).choices(range(3, 211), k=16 * 5)
    return request(name, [*prefix, 5 + tail, 9], tenant="ann", max_tokens=4)


def settled(core: Any) -> None:
    """Lets spills and puts under way end."""
    for _ in range(50):
        core._tiers.settle()


def test_an_engine_counts_by_tier_and_explains(tmp_path: Path) -> None:
    """What was spilled is found in host memory, and the events say so; every prompt block is counted once."""
    below = Below(store=MemoryStore())
    core = tiny_core(tmp_path, tiers=below, **SMALL)
    for seed in range(4):
        drive(core, [long(seed, f"a{seed}")])
    settled(core)
    core.submit(long(0, "again", tail=1))
    events = []
    while core.has_work():
        events += core.step()
    cached = max((event.cached_by_tier for event in events), key=lambda found: found.total)
    assert cached.host > 0
    (ann,) = core.inspector.prefixes().tenants
    blocks = sum(number for _, number in ann.hits) + sum(number for *_, number in ann.misses)
    assert blocks == 5 * 5
    assert core.stats().prefix_hit_tokens == 16 * sum(number for _, number in ann.hits)
    core.close()


def test_a_prompt_is_located_block_by_block(tmp_path: Path) -> None:
    """Where each block is, and why the others are nowhere; the same as a request would find."""
    below = Below(store=MemoryStore())
    core = tiny_core(tmp_path, tiers=below, **SMALL)
    for seed in range(4):
        drive(core, [long(seed, f"a{seed}")])
    settled(core)
    item = long(0, "again")
    order = PrefixOrder(namespace=item.namespace, token_ids=(*item.prompt_token_ids[:80], *range(20, 60)))
    errand = core.inspector.explain(order)
    explanation = errand.advance()
    assert explanation is not None
    assert (explanation.blocks, explanation.block_tokens, explanation.store) == (7, 16, "ok")
    assert sum(run.blocks for run in explanation.runs) == 7
    assert all(run.tiers for run in explanation.runs if run.first < 5)
    last = explanation.runs[-1]
    assert (last.first, last.blocks, last.lost_by, last.reason) == (5, 2, "none", "never_stored")
    assert {tier for tier, _ in explanation.rooms} == {"gpu", "host"}
    core.close()


def test_what_lies_in_the_tiers_is_verified(tmp_path: Path) -> None:
    """Books, host memory, the store; a block that somebody wrote over is found in each."""
    memory = MemoryStore()
    below = Below(store=memory)
    core = tiny_core(tmp_path, tiers=below, **SMALL)
    for seed in range(4):
        drive(core, [long(seed, f"a{seed}")])
    settled(core)
    for tier in ("gpu", "host", "store"):
        found = core.inspector.verify(VerifyOrder(tier=tier)).advance()
        assert found is not None
        assert found.violations == ()
        assert found.checked > 0
    stored = core.explainer.in_store()
    assert len(stored) > 0
    value = memory._values[stored[0]]
    memory._values[stored[0]] = replace(value, data=value.data[:-1] + bytes([value.data[-1] ^ 1]))
    found = core.inspector.verify(VerifyOrder(tier="store")).advance()
    assert found is not None
    assert found.violations == (f"store: block {stored[0].hex()[:12]} is corrupt",)
    lower = core._tiers.below
    assert isinstance(lower, BelowDevice)
    slot = lower.host.stored()[0]
    lower.arena.bytes_of(slot)[:] = bytes(lower.arena.block_bytes)
    found = core.inspector.verify(VerifyOrder(tier="host")).advance()
    assert found is not None
    assert len(found.violations) == 1
    core.close()


def test_verifying_goes_on_in_batches() -> None:
    """By position until the end, or at random."""
    kv = KvManager(8, 4, ghosts=None)
    host = HostTier(6, BLOCK, seal=lambda slot: slot)
    for number in range(5):
        (reservation,) = host.reserve([BlockKey(bytes([number]) * 32, "ann")])
        assert reservation is not None
        host.commit([reservation])
    lower = BelowDevice(host, None, None)  # type: ignore[arg-type]
    commons = Commons(kv, lambda adapter, namespace: ROOT)
    explainer = Explainer(kv, host, block_bytes=BLOCK)
    inspector = Inspector(
        kv,
        lower,
        explainer,
        commons,
        lambda adapter, namespace: ROOT,
        block_bytes=BLOCK,
        check_integrity=kv.check_integrity,
    )
    seen, start = 0, 0
    for _ in range(3):
        report = inspector.verify(VerifyOrder(tier="host", start=start, count=2)).advance()
        assert report is not None
        seen += report.checked
        start = report.following or -1
    assert (seen, start) == (5, -1)
    sample = inspector.verify(VerifyOrder(tier="host", count=3, seed=1)).advance()
    assert sample is not None
    assert (sample.checked, sample.total, sample.following) == (3, 5, None)


def test_what_the_store_lost_was_lost_by_the_store() -> None:
    """If we know that it was there: by its time to live, or because the server needed room."""
    now = 0.0
    world = World()
    memory = StoreMemory(ttl_s=10.0, max_blocks=2, clock=lambda: now)
    world.explainer = Explainer(world.kv, world.host, block_bytes=BLOCK, store=memory)
    choice = world.choice(prompt(1, 4))
    oldest, first, second, never = choice.known_ids(4)
    memory.note([oldest, first])
    now = 9.0
    memory.note([second])
    now = 12.0
    world.explainer.arrived(choice, {}, dict.fromkeys((oldest, first, second, never), Reason.NEVER_STORED))
    world.begin(choice)
    world.end(choice)
    assert world.misses() == {("store", "ttl"): 1, ("store", "pressure"): 1, ("none", "never_stored"): 2}


@pytest.mark.parametrize("seed", range(4))
def test_in_a_crowd_each_block_is_counted_once(tmp_path: Path, seed: int) -> None:
    """Whatever the store does, whoever shares, is preempted or cancelled: found or missing, once, as usage says."""
    below = Below(host=10, store=MemoryStore(), seed=seed or None)
    core = tiny_core(tmp_path, tiers=below, num_blocks=20, max_batch_tokens=48, max_running=4)
    dice = random.Random(seed)
    items, events = [], []
    for number in range(24):
        item = long(dice.randrange(5), f"r{number}", tail=dice.randrange(3))
        items.append(item)
        core.submit(item)
        for _ in range(dice.randrange(6)):
            events += core.step()
        if dice.random() < 0.1:
            core.cancel(dice.choice(items).request_id)
    while core.has_work():
        events += core.step()
        core.check_integrity()
    (ann,) = core.inspector.prefixes().tenants
    hits, misses = sum(number for _, number in ann.hits), sum(number for *_, number in ann.misses)
    cached: dict[str, int] = {}
    for event in events:
        cached[event.request_id] = max(cached.get(event.request_id, 0), event.cached_tokens)
    assert sum(cached.values()) == 16 * hits
    begun = {event.request_id for event in events if event.token_ids}
    assert 5 * len(begun) <= hits + misses <= 5 * len(items)
    assert core.scheduler.running == []
    core.close()
