"""Quotas of a store: the ledger in a real server and the twin in memory keep the same blocks, whatever happens.

The twin's rules are plain Python; the server's are Lua. Both are told the same, and time passes for both alike: for the
server by moving everything that expires.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from fixtures.redis import redis_servers, running_redis
from lamina.wiring.valkey import EmbeddedValkey
from lamina_kvtier.block_codec import BlockCodec
from lamina_kvtier.errors import QuotaNotCoverable
from lamina_kvtier.memory_tier import MemoryStore, MemoryTier
from lamina_kvtier.quota import Quota
from lamina_kvtier.redis_blocks import RedisBlocks
from lamina_kvtier.redis_plane.connection import Connection
from lamina_kvtier.redis_plane.resp import Bounds, Reply, encode
from lamina_kvtier.redis_tier import RedisTier, RedisTierConfig
from lamina_kvtier.tier import BlockKey, Outcome, StoreTier
from support.store_ledger import contradictions, pass_time

LAYOUT, BLOCK_BYTES = b"\x03" * 32, 64
VALUE_BYTES = BLOCK_BYTES + 192
PATIENCE_S, TTL_S = 30.0, 1000.0
NAMES = ["ann", "bob", "cat"]
IDS = [bytes([number]) * 32 for number in range(24)]
OWNERS = {identity: NAMES[number % 3] for number, identity in enumerate(IDS)}  # an identity has one namespace

some_ids = st.lists(st.sampled_from(IDS), min_size=1, max_size=6)
small = st.integers(0, 10)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(scope="module", params=["valkey", "redis"])
def server(request: pytest.FixtureRequest) -> Iterator[EmbeddedValkey]:
    binary = redis_servers().get(request.param)
    if binary is None:
        pytest.skip(f"no {request.param} server here")
    with running_redis(binary) as running:
        yield running


def test_server_and_twin_agree(server: EmbeddedValkey) -> None:
    """On what is kept, what each namespace pays, what was refused and evicted, and why; and the ledger adds up."""
    run_state_machine_as_test(
        lambda: Machine(server),
        settings=settings(
            max_examples=25,
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        ),
    )


class Machine(RuleBasedStateMachine):
    def __init__(self, server: EmbeddedValkey) -> None:
        super().__init__()
        self.resources = ExitStack()
        self.clock = Clock()
        codec = BlockCodec(LAYOUT, BLOCK_BYTES)
        config = RedisTierConfig(
            deployment=os.urandom(8).hex(),
            ttl_s=TTL_S,
            lookup_s=PATIENCE_S,
            load_s=PATIENCE_S,
            put_s=PATIENCE_S,
            delete_s=PATIENCE_S,
        )
        self.redis = RedisTier(server.address, codec, config)
        self.replica = RedisTier(server.address, codec, config)
        self.twin = MemoryTier(MemoryStore(ttl_s=TTL_S, clock=self.clock), codec)
        for tier in (self.redis, self.replica, self.twin):
            self.resources.callback(tier.close)
        self.line = Connection.open(server.address, None, Bounds(), time.monotonic() + PATIENCE_S)
        self.resources.callback(self.line.close)
        names = RedisBlocks(self.redis.plane, codec, config)
        self.scope, self.values = names.scope, names.values

    def teardown(self) -> None:
        self.resources.close()

    @initialize(capacity=st.integers(1, 12))
    def first_quotas(self, capacity: int) -> None:
        for tier in (self.redis, self.replica, self.twin):
            tier.set_quotas({}, capacity=capacity * VALUE_BYTES)

    @rule(
        capacity=st.integers(1, 12),
        rights=st.dictionaries(
            st.sampled_from(NAMES), st.tuples(small, small, st.sampled_from([0.5, 1.0, 3.0])), max_size=3
        ),
    )
    def set_quotas(self, capacity: int, rights: dict[str, tuple[int, int, float]]) -> None:
        quotas = {
            name: Quota(min(one, other) * VALUE_BYTES, max(one, other) * VALUE_BYTES, 0, weight)
            for name, (one, other, weight) in rights.items()
        }
        refused = []
        for tier in (self.redis, self.replica, self.twin):
            try:
                tier.set_quotas(quotas, capacity=capacity * VALUE_BYTES)
            except QuotaNotCoverable:
                refused.append(tier)
        assert len(refused) in (0, 3)
        assert self.redis.reconcile(PATIENCE_S)  # what is too much now goes at leisure; the twin has none

    @rule(ids=some_ids)
    def put(self, ids: list[bytes]) -> None:
        self.both(lambda tier: self._put(tier, ids))

    @rule(ids=some_ids)
    def put_by_a_replica(self, ids: list[bytes]) -> None:
        assert self._put(self.replica, ids) == self._put(self.twin, ids)

    @rule(ids=some_ids)
    def load(self, ids: list[bytes]) -> None:
        into = [memoryview(bytearray(BLOCK_BYTES)) for _ in ids]
        self.both(lambda tier: tier.load(ids, into).result(PATIENCE_S))
        assert self.redis.settle(PATIENCE_S)

    @rule(ids=some_ids)
    def look_up(self, ids: list[bytes]) -> None:
        self.both(lambda tier: tier.lookup(ids).result(PATIENCE_S))

    @rule(ids=some_ids)
    def delete(self, ids: list[bytes]) -> None:
        self.both(lambda tier: tier.delete(ids).result(PATIENCE_S))

    @rule(name=st.sampled_from(NAMES))
    def forget(self, name: str) -> None:
        self.both(lambda tier: tier.forget(name).result(PATIENCE_S))

    @rule(part=st.sampled_from([0.1, 0.4, 0.6, 1.0]))
    def time_passes(self, part: float) -> None:
        """A little more, so that nothing is due at this very moment."""
        seconds = TTL_S * part + 1.0
        self.clock.now += seconds
        pass_time(self.tell, self.scope, round(seconds * 1000))

    @rule(ids=some_ids)
    def others_delete(self, ids: list[bytes]) -> None:
        """Past the ledger: a server that evicts, an operator. It is found out when both are compared."""
        for identity in ids:
            self.tell(b"DEL", self.values + identity.hex().encode())
            self.twin.store.delete(identity)
        assert self.redis.reconcile(PATIENCE_S)

    @invariant()
    def they_keep_the_same(self) -> None:
        """And the ledger adds up, once what is due was struck: asking for its numbers does that."""
        assert self.redis.settle(PATIENCE_S)
        ours, theirs = self.redis.usage(), self.twin.usage()
        assert (ours.bytes, ours.blocks, dict(ours.by_namespace)) == (
            theirs.bytes,
            theirs.blocks,
            dict(theirs.by_namespace),
        )
        for identity in IDS:
            assert self.twin.store.has(identity) == (
                self.tell(b"EXISTS", self.values + identity.hex().encode()) == 1
            ), identity.hex()[:2]
        assert contradictions(self.tell, self.scope) == []

    def both(self, work: Callable[[StoreTier], object]) -> None:
        assert work(self.redis) == work(self.twin)

    def _put(self, tier: StoreTier, ids: list[bytes]) -> tuple[Outcome, ...]:
        keys = [BlockKey(identity, OWNERS[identity]) for identity in ids]
        values = [memoryview(identity[:1] * BLOCK_BYTES) for identity in ids]
        return tier.put(keys, values).result(PATIENCE_S)

    def tell(self, *command: bytes) -> Reply:
        self.line.until(time.monotonic() + PATIENCE_S)
        return self.line.ask(encode(*command))
