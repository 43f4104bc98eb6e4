"""Quotas in a real store: the contract of all tiers, and what crashes, other clients and the server itself can do."""

from __future__ import annotations

import math
import os
import random
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from fixtures.redis import running_redis, tell
from lamina.wiring.valkey import EmbeddedValkey
from lamina_kvtier import redis_keeping
from lamina_kvtier.block_codec import BlockCodec
from lamina_kvtier.errors import QuotaNotCoverable
from lamina_kvtier.payload_codecs import EXACT_CODECS
from lamina_kvtier.quota import Quota
from lamina_kvtier.reasons import Reason
from lamina_kvtier.redis_blocks import RedisBlocks
from lamina_kvtier.redis_plane import Backoff, PlaneConfig, RedisAddress
from lamina_kvtier.redis_plane.ledger import Admission, LedgerCalls
from lamina_kvtier.redis_plane.resp import ErrorReply, Reply
from lamina_kvtier.redis_tier import RedisTier, RedisTierConfig
from lamina_kvtier.tier import BlockKey, Outcome, StoreTier, Tally
from support.quota_contract import VALUE_BYTES, QuotaContract, fill, quota, set_quotas, there, used
from support.store_ledger import contradictions, pass_time
from support.tier_contract import BLOCK_BYTES, LAYOUT, PATIENCE_S, MakeTier, blocks, ids, keys, load, lookup, put, room

CONFIG = RedisTierConfig(
    lookup_s=20, load_s=20, put_s=20, delete_s=20, plane=PlaneConfig(backoff=Backoff(first_s=0.02, limit_s=0.2))
)
OK, REFUSED = Outcome.OK, Outcome.REFUSED

Connect = Callable[..., RedisTier]


@pytest.fixture(scope="module")
def shared_server(redis_binary: Path) -> Iterator[EmbeddedValkey]:
    with running_redis(redis_binary) as server:
        yield server


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Makes tiers and closes them; all of one test share a deployment of their own."""
    deployment = os.urandom(8).hex()
    with ExitStack() as made:

        def make(
            address: RedisAddress,
            config: RedisTierConfig = CONFIG,
            *,
            block_bytes: int = BLOCK_BYTES,
            codec: str = "raw",
        ) -> RedisTier:
            config = replace(config, deployment=deployment)
            tier = RedisTier(address, BlockCodec(LAYOUT, block_bytes, codec=codec), config)
            made.callback(tier.close)
            return tier

        yield make


class TestRedisQuotas(QuotaContract):
    @pytest.fixture
    def make_tier(self, shared_server: EmbeddedValkey, connect: Connect) -> MakeTier:
        def make() -> StoreTier:
            return connect(shared_server.address)

        return make


class _Looker:
    """An operator with a connection of their own."""

    def __init__(self, server: EmbeddedValkey, tier: RedisTier) -> None:
        self._server = server
        blocks = RedisBlocks(tier.plane, BlockCodec(LAYOUT, BLOCK_BYTES), tier.config)
        self.scope, self.values = blocks.scope, blocks.values

    def tell(self, *command: bytes) -> Reply:
        return tell(self._server, *command)

    def commands(self) -> Counter[bytes]:
        """How often each has been run by scripts and connections, but for those that any connection begins with."""
        stats = self.tell(b"INFO", b"commandstats")
        assert isinstance(stats, bytes)
        counted = re.findall(rb"cmdstat_(\S+):calls=(\d+)", stats)
        begins = (b"info", b"hello", b"select", b"ping")
        return Counter({name: int(count) for name, count in counted if name not in begins})

    def contradictions(self) -> list[str]:
        return contradictions(self.tell, self.scope)

    def pass_time(self, seconds: float) -> None:
        pass_time(self.tell, self.scope, round(seconds * 1000))


# Room, and the server's own eviction


def test_the_server_never_evicts_by_itself(redis_binary: Path, connect: Connect) -> None:
    """Three times of what fits, from two namespaces and in an awkward size: the ledger makes room in time."""
    size = 512 * 1024  # and a header: the allocator's next size is a quarter larger
    with running_redis(redis_binary, 48 * 2**20) as server:
        tier = connect(server.address, block_bytes=size)
        tier.set_quotas({"ann": Quota(10 * 2**20, 2**40)})
        for start in range(0, 200, 20):
            names = keys(20, "ann" if start % 40 else "bob")
            assert put(tier, names, blocks(20, size)) == (OK,) * 20
        assert tier.settle(PATIENCE_S)
        usage = tier.usage()
        stats = tell(server, b"INFO", b"stats")
        assert isinstance(stats, bytes)
        assert b"evicted_keys:0\r\n" in stats
        assert usage.limit is not None
        assert usage.limit / 2 < usage.bytes <= usage.limit < 48 * 2**20
        assert usage.by_namespace["ann"] >= 10 * 2**20 - size


def test_a_server_without_maxmemory_promises_nothing(redis_server: EmbeddedValkey, connect: Connect) -> None:
    """Reservations are not coverable there, unless it is said how much of it is ours; limits hold."""
    tell(redis_server, b"CONFIG", b"SET", b"maxmemory", b"0")
    tier = connect(redis_server.address)
    with pytest.raises(QuotaNotCoverable):
        tier.set_quotas({"ann": quota(reserved=1)})
    tier.set_quotas({"ann": quota(limit=2)})
    assert put(tier, keys(3, "ann"), blocks(3)) == (OK, OK, REFUSED)
    told = connect(redis_server.address, replace(CONFIG, server_bytes=2**26))
    told.set_quotas({"ann": quota(reserved=1)})
    with pytest.raises(QuotaNotCoverable):
        told.set_quotas({"ann": quota(reserved=10_000, limit=10_000)})


def test_what_is_said_to_be_coverable_is_what_is_taken_over(redis_server: EmbeddedValkey, connect: Connect) -> None:
    """Before any quotas and under them; of a server without maxmemory nothing is, and it has no limit."""
    tier = connect(redis_server.address)
    coverable = tier.usage().coverable
    assert coverable is not None
    tier.set_quotas({"ann": Quota(coverable, coverable)})
    with pytest.raises(QuotaNotCoverable):
        tier.set_quotas({"ann": Quota(coverable + 1, coverable + 1)})
    assert tier.settle(PATIENCE_S)
    usage = tier.usage()
    assert (usage.limit, usage.coverable, usage.keeps_quotas) == (coverable, coverable, True)
    tell(redis_server, b"CONFIG", b"SET", b"maxmemory", b"0")
    unbounded = connect(redis_server.address)
    assert (unbounded.usage().limit, unbounded.usage().coverable) == (None, 0)
    unbounded.set_quotas({"ann": quota(limit=2)})
    assert unbounded.settle(PATIENCE_S)
    assert (unbounded.usage().limit, unbounded.usage().coverable) == (None, 0)


def test_a_server_that_is_away_says_nothing(connect: Connect) -> None:
    """Unless the settings do."""
    nowhere = RedisAddress(host="127.0.0.1", port=9)
    brief = replace(CONFIG, lookup_s=0.2)
    assert connect(nowhere, brief).usage().coverable is None
    told = connect(nowhere, replace(brief, server_bytes=2**26)).usage()
    assert told.coverable is not None
    assert 0 < told.coverable < 2**26


def test_what_was_there_before_is_nobodys_and_goes_first(shared_server: EmbeddedValkey, connect: Connect) -> None:
    """Blocks of a time without quotas count, and can be found; who puts one again pays for it."""
    plain, tier = connect(shared_server.address), connect(shared_server.address)
    names, values = keys(5, "ann"), blocks(5)
    put(plain, names, values)
    set_quotas(tier, 6)
    assert tier.reconcile(PATIENCE_S)
    assert used(tier) == {"": 5}
    assert put(tier, names[:1], values[:1]) == (OK,)
    assert used(tier) == {"": 4, "ann": 1}
    fill(tier, 4, "ann")
    assert used(tier) == {"": 1, "ann": 5}
    assert there(tier, names[:1]) == [True]


def test_a_smaller_store_is_emptied_at_leisure(shared_server: EmbeddedValkey, connect: Connect) -> None:
    """Also if nobody puts anything."""
    tier = connect(shared_server.address)
    set_quotas(tier, 10)
    fill(tier, 10, "ann")
    set_quotas(tier, 4)
    _until(lambda: used(tier) == {"ann": 4})
    assert tier.usage().evictions == {("ann", Reason.PRESSURE): 6}


# Time to live


@pytest.mark.parametrize("with_quotas", [False, True], ids=["without quotas", "with quotas"])
def test_a_load_begins_the_time_to_live_anew(
    shared_server: EmbeddedValkey, connect: Connect, with_quotas: bool
) -> None:
    tier = connect(shared_server.address, replace(CONFIG, ttl_s=1000.0))
    if with_quotas:
        set_quotas(tier, 100)
    look = _Looker(shared_server, tier)
    names = fill(tier, 3, "ann")
    look.pass_time(600)
    assert load(tier, names[:2], room(2)) == (OK, OK)
    assert tier.settle(PATIENCE_S)
    look.pass_time(600)
    assert there(tier, names) == [True, True, False]
    if with_quotas:
        assert used(tier) == {"ann": 2}
        assert look.contradictions() == []


# Crashes


def test_a_put_that_was_cut_off_leaves_nothing(shared_server: EmbeddedValkey, connect: Connect) -> None:
    """Neither its promise of room nor a value that it wrote outlives the lease; who puts it again is not hurt."""
    tier = connect(shared_server.address)
    set_quotas(tier, 4)
    look = _Looker(shared_server, tier)
    calls = LedgerCalls(look.scope, ttl_ms=None, lease_ms=5000)
    names = keys(4, "ann")
    blocks_ = RedisBlocks(tier.plane, BlockCodec(LAYOUT, BLOCK_BYTES), tier.config)
    reserve = calls.reserve(b"ghost", [(name.id, VALUE_BYTES, "ann") for name in names])
    blocks_.ask([reserve], 10, lambda: None).result()
    stores = [blocks_.store(name, value, 5000) for name, value in zip(names[:2], blocks(2), strict=True)]
    blocks_.move(stores, 10, lambda: None).result()
    assert used(tier) == {"ann": 4}
    assert put(tier, keys(1, "bob"), blocks(1)) == (REFUSED,)
    assert put(tier, names[1:3], blocks(2)) == (OK, OK)
    look.pass_time(6)
    assert used(tier) == {"ann": 2}
    assert there(tier, names) == [False, True, True, False]
    assert look.contradictions() == []
    fill(tier, 2, "bob")


def test_a_value_that_comes_after_its_lease_does_not_stay(shared_server: EmbeddedValkey, connect: Connect) -> None:
    """Its commit finds no promise, and removes it."""
    tier = connect(shared_server.address)
    set_quotas(tier, 4)
    look = _Looker(shared_server, tier)
    calls = LedgerCalls(look.scope, ttl_ms=None, lease_ms=5000)
    blocks_ = RedisBlocks(tier.plane, BlockCodec(LAYOUT, BLOCK_BYTES), tier.config)
    (name,) = keys(1, "ann")
    blocks_.ask([calls.reserve(b"late", [(name.id, VALUE_BYTES, "ann")])], 10, lambda: None).result()
    look.pass_time(6)
    assert used(tier) == {}
    blocks_.move([blocks_.store(name, blocks(1)[0], 5000)], 10, lambda: None).result()
    commit = calls.commit(b"late", [(name.id, 1)], [])
    blocks_.ask([commit], 10, lambda: None).result()
    assert commit.result == "x"
    assert there(tier, [name]) == [False]
    assert look.contradictions() == []


def test_a_server_that_lost_everything_gets_its_quotas_again(redis_server: EmbeddedValkey, connect: Connect) -> None:
    """With the next put; also a server that only forgot the script."""
    tier = connect(redis_server.address)
    set_quotas(tier, 10, ann=quota(limit=2))
    fill(tier, 2, "ann")
    tell(redis_server, b"SCRIPT", b"FLUSH")
    fill(tier, 1, "ann")
    tell(redis_server, b"FLUSHALL")
    assert put(tier, keys(3, "ann"), blocks(3)) == (OK, OK, REFUSED)
    assert used(tier) == {"ann": 2}


@pytest.mark.parametrize("part", [b"meta", b"used", b"block", b"use:ann", b"quota", b"over"])
def test_a_ledger_that_lost_a_part_mends_itself(redis_server: EmbeddedValkey, connect: Connect, part: bytes) -> None:
    """A server that does evict may take any key. Blocks may become nobody's; what is counted is what is there."""
    tier = connect(redis_server.address)
    set_quotas(tier, 10)
    look = _Looker(redis_server, tier)
    names = fill(tier, 4, "ann")
    tell(redis_server, b"DEL", look.scope + b"ledger1:" + part)
    fill(tier, 2, "bob")
    assert tier.reconcile(PATIENCE_S)
    assert sum(used(tier).values()) == 6
    assert there(tier, names) == [True] * 4
    assert look.contradictions() == []
    fill(tier, 10, "bob")
    assert look.contradictions() == []


@pytest.mark.parametrize("how", ["load", "put", "commit", "reconcile"])
def test_who_lost_its_queue_of_use_gives_again_with_the_first_block_that_is_known(
    redis_server: EmbeddedValkey, connect: Connect, how: str
) -> None:
    """The server took the set, and a deletion found the owner without a kept block: that does not last until its next
    charge. Else others would lose within their shares what it has beyond its own."""
    tier = connect(redis_server.address)
    set_quotas(tier, 8, ann=quota(reserved=1), bob=quota(reserved=1))
    look = _Looker(redis_server, tier)
    (gone, *names), values = fill(tier, 5, "ann"), blocks(4)
    bob = fill(tier, 2, "bob")
    tell(redis_server, b"DEL", look.scope + b"ledger1:use:ann")
    tier.delete([gone.id]).result(PATIENCE_S)
    assert tell(redis_server, b"ZSCORE", look.scope + b"ledger1:over", b"ann") in (b"inf", math.inf)
    match how:
        case "load":
            load(tier, names, room(4))
            assert tier.settle(PATIENCE_S)
        case "put":
            assert put(tier, names, values) == (OK,) * 4
        case "commit":
            calls = LedgerCalls(look.scope, ttl_ms=None, lease_ms=5000)
            late = calls.commit(b"another", [(name.id, 10**12 - at) for at, name in enumerate(names)], [])
            RedisBlocks(tier.plane, BlockCodec(LAYOUT, BLOCK_BYTES), tier.config).ask([late], 10, lambda: None).result()
        case "reconcile":
            assert tier.reconcile(PATIENCE_S)
    assert look.contradictions() == []
    fill(tier, 4, "cat")
    assert used(tier) == {"ann": 2, "bob": 2, "cat": 4}
    assert there(tier, bob) == [True, True]
    assert look.contradictions() == []


def test_uses_of_known_blocks_rank_nobody_anew(redis_server: EmbeddedValkey, connect: Connect) -> None:
    """A touch costs the server no more than the touch."""
    tier = connect(redis_server.address)
    set_quotas(tier, 8)
    look = _Looker(redis_server, tier)
    names = fill(tier, 4, "ann")
    assert tier.reconcile(PATIENCE_S)
    calls = LedgerCalls(look.scope, ttl_ms=None, lease_ms=5000)
    blocks_ = RedisBlocks(tier.plane, BlockCodec(LAYOUT, BLOCK_BYTES), tier.config)
    before = look.commands()
    blocks_.ask([calls.touch(ids(names))], PATIENCE_S, lambda: None).result()
    ran = look.commands() - before
    assert ran[b"zadd"] == 4, "one for each block in its owner's queue, and none for the order of victims"
    assert ran[b"hset"] == 1, "the tick"


@pytest.mark.parametrize("total", [b"+-5", b"-5", b"+0", b"+1", b"many", b"", b"+nan", b"+inf"])
def test_a_total_that_cannot_be_is_counted_anew(redis_server: EmbeddedValkey, connect: Connect, total: bytes) -> None:
    """Also one that becomes negative only when blocks go: whatever was written is read, and mended."""
    tier = connect(redis_server.address)
    set_quotas(tier, 4)
    look = _Looker(redis_server, tier)
    names = fill(tier, 3, "ann")
    tell(redis_server, b"HSET", look.scope + b"ledger1:meta", b"total", total)
    assert tier.delete(ids(names[:2])).result(PATIENCE_S) == Tally(2, OK)
    assert tier.delete(ids(keys(1))).result(PATIENCE_S) == Tally(0, OK)
    assert used(tier) == {"ann": 1}
    assert look.contradictions() == []
    fill(tier, 4, "bob")
    assert look.contradictions() == []
    assert used(tier) == {"bob": 4}


def test_a_ledger_without_an_order_of_victims_gets_one(redis_server: EmbeddedValkey, connect: Connect) -> None:
    """As engines wrote it that knew none. Each of their calls is noticed, also beside those of others."""
    tier = connect(redis_server.address)
    set_quotas(tier, 6, ann=quota(reserved=4))
    look = _Looker(redis_server, tier)
    meta, over = look.scope + b"ledger1:meta", look.scope + b"ledger1:over"
    ann, bob = fill(tier, 2, "ann"), fill(tier, 4, "bob")
    total = b"%d" % (6 * VALUE_BYTES)
    for left in ([], [b"-1e9", b"ann"], [b"-1e9", b"long gone", b"1e9", b"bob"]):
        tell(redis_server, b"HSET", meta, b"total", total)
        tell(redis_server, b"DEL", over)
        if left:
            tell(redis_server, b"ZADD", over, *left)
        fill(tier, 1, "cat")
        assert look.contradictions() == []
    assert there(tier, ann) == [True, True]
    assert used(tier) == {"ann": 2, "bob": 1, "cat": 3}
    assert there(tier, bob) == [True, False, False, False]


def test_an_old_order_of_an_empty_store_is_not_believed(redis_server: EmbeddedValkey, connect: Connect) -> None:
    """An engine that knew none has deleted the last block."""
    tier = connect(redis_server.address)
    set_quotas(tier, 2)
    assert tier.delete(ids(fill(tier, 1, "long gone"))).result(PATIENCE_S) == Tally(1, OK)
    look = _Looker(redis_server, tier)
    tell(redis_server, b"HSET", look.scope + b"ledger1:meta", b"total", b"0", b"tick", b"1")
    tell(redis_server, b"ZADD", look.scope + b"ledger1:over", b"-1e9", b"long gone")
    fill(tier, 2, "ann")
    fill(tier, 2, "bob")
    assert look.contradictions() == []
    assert used(tier) == {"bob": 2}


def test_a_put_that_evicts_asks_no_more_among_many(redis_server: EmbeddedValkey, connect: Connect) -> None:
    """Whoever else there is: the server runs the same commands."""
    tier = connect(redis_server.address)
    look = _Looker(redis_server, tier)
    calls = LedgerCalls(look.scope, ttl_ms=None, lease_ms=5000)
    blocks_ = RedisBlocks(tier.plane, BlockCodec(LAYOUT, BLOCK_BYTES), tier.config)

    asked: list[Counter[bytes]] = []
    for others in (1, 200):
        look.tell(b"FLUSHALL")
        blocks_.ask([calls.install((others + 5) * VALUE_BYTES, {})], PATIENCE_S, lambda: None).result()
        for number in range(others):
            _put_alone(blocks_, calls, keys(1, f"t{number:03}"))
        _put_alone(blocks_, calls, keys(5, "ann"))
        before = look.commands()
        assert _put_alone(blocks_, calls, keys(3, "bob")) == {("ann", Reason.PRESSURE): 3}
        asked.append(look.commands() - before)
        assert look.contradictions() == []
    few, many = asked
    assert few == many
    assert not {b"hgetall", b"hkeys"} & few.keys()


@pytest.mark.parametrize(("tenants", "most"), [(1, 17.5), (4, 19.5), (16, 23.5)])
def test_a_put_that_evicts_runs_few_commands_for_each_block(
    redis_server: EmbeddedValkey, connect: Connect, tenants: int, most: float
) -> None:
    """And its victim, without the value itself: charges and places are written at once."""
    tier = connect(redis_server.address)
    look = _Looker(redis_server, tier)
    calls = LedgerCalls(look.scope, ttl_ms=None, lease_ms=5000)
    blocks_ = RedisBlocks(tier.plane, BlockCodec(LAYOUT, BLOCK_BYTES), tier.config)
    quotas = {f"t{number}": quota(reserved=1) for number in range(tenants)}
    blocks_.ask([calls.install(64 * VALUE_BYTES, quotas)], PATIENCE_S, lambda: None).result()
    for _ in range(5):
        names = [BlockKey(os.urandom(32), f"t{number % tenants}") for number in range(16)]
        before = look.commands()
        victims = _put_alone(blocks_, calls, names)
    assert victims.total() == 16
    ran = look.commands() - before
    del ran[b"set"], ran[b"evalsha"]
    assert ran.total() <= most * 16, dict(ran)
    assert look.contradictions() == []


@pytest.mark.parametrize("evicts", [False, True], ids=["with room", "full"])
def test_a_server_short_of_memory_leaves_the_ledger_right(
    redis_server: EmbeddedValkey, connect: Connect, evicts: bool
) -> None:
    """It refuses the first write of a script, or none: all of a call is done or nothing. What evicts is done."""
    tier = connect(redis_server.address)
    set_quotas(tier, 4)
    look = _Looker(redis_server, tier)
    names = fill(tier, 4 if evicts else 2, "ann")
    assert tier.settle(PATIENCE_S)
    calls = LedgerCalls(look.scope, ttl_ms=None, lease_ms=5000)
    blocks_ = RedisBlocks(tier.plane, BlockCodec(LAYOUT, BLOCK_BYTES), tier.config)
    look.tell(b"CONFIG", b"SET", b"maxmemory-policy", b"noeviction")
    look.tell(b"CONFIG", b"SET", b"maxmemory", b"1")
    new = keys(2, "bob")
    reserve = calls.reserve(b"put", [(name.id, VALUE_BYTES, "bob") for name in new])
    blocks_.ask([reserve], PATIENCE_S, lambda: None).result()
    if evicts:
        assert isinstance(reserve.result, Admission)
    else:
        assert isinstance(reserve.result, ErrorReply)
    blocks_.ask([calls.commit(b"put", [], ids(new))], PATIENCE_S, lambda: None).result()
    assert tier.delete(ids(names[:1])).result(PATIENCE_S) == Tally(1, OK)
    look.tell(b"CONFIG", b"SET", b"maxmemory", b"0")
    assert used(tier) == {"ann": 1}
    assert there(tier, names) == [False, True, False, False] if evicts else [False, True]
    assert look.contradictions() == []


def test_more_than_go_into_one_command(redis_server: EmbeddedValkey, connect: Connect) -> None:
    """Blocks of a call, their payers, all payers when quotas change: a command names no more than 1,000."""
    tier = connect(redis_server.address)
    set_quotas(tier, 1200)
    look = _Looker(redis_server, tier)
    for part in range(3):
        names = [BlockKey(os.urandom(32), f"t{part}-{number}") for number in range(512)]
        assert put(tier, names, blocks(512)) == (OK,) * 512
    assert look.contradictions() == []
    set_quotas(tier, 1200, **{f"t2-{number}": quota(reserved=1) for number in range(512)})
    assert tier.settle(PATIENCE_S)
    assert look.contradictions() == []
    assert tier.delete(ids(names)).result(PATIENCE_S) == Tally(512, OK)
    assert len(used(tier)) == 1200 - 512
    assert look.contradictions() == []


def _put_alone(blocks_: RedisBlocks, calls: LedgerCalls, names: list[BlockKey]) -> Counter[tuple[str, Reason]]:
    """What a tier says in a put, and nothing that it says beside it. Answered with the victims."""
    reserve = calls.reserve(b"put", [(name.id, VALUE_BYTES, name.namespace) for name in names])
    blocks_.ask([reserve], PATIENCE_S, lambda: None).result()
    assert isinstance(reserve.result, Admission)
    assert reserve.result.fates == "w" * len(names)
    stores = [blocks_.store(name, value, 5000) for name, value in zip(names, blocks(len(names)), strict=True)]
    blocks_.move(stores, PATIENCE_S, lambda: None).result()
    written = [(name.id, reserve.result.base + len(names) - at) for at, name in enumerate(names)]
    blocks_.ask([calls.commit(b"put", written, [])], PATIENCE_S, lambda: None).result()
    return Counter(reserve.result.victims)


def test_killed_and_restarted(redis_binary: Path, connect: Connect) -> None:
    """Puts fail for a while and then work again, under the same quotas."""
    with running_redis(redis_binary) as server:
        tier = connect(server.address, replace(CONFIG, put_s=1.0, lookup_s=1.0))
        set_quotas(tier, 100, ann=quota(limit=5))
        fill(tier, 5, "ann")
        victim = server.pid
        assert victim is not None
        os.kill(victim, signal.SIGKILL)
        _until(lambda: server.pid not in (None, victim))
        names, values = keys(7, "ann"), blocks(7)
        _until(lambda: put(tier, names, values) == (OK,) * 5 + (REFUSED,) * 2)
        _until(lambda: used(tier) == {"ann": 5})
        assert _Looker(server, tier).contradictions() == []


def test_quotas_set_while_the_server_is_away(server_path: Path, redis_server: EmbeddedValkey, connect: Connect) -> None:
    """They are taken over, and until the server is there nothing is stored, in bounded time."""
    tier = connect(RedisAddress(path=str(server_path)), replace(CONFIG, put_s=1.0, lookup_s=0.2))
    tier.set_quotas({"ann": quota(limit=2)})
    assert set(put(tier, keys(2), blocks(2))) <= {Outcome.UNAVAILABLE, Outcome.TIMEOUT}
    assert redis_server.address.path is not None
    server_path.symlink_to(redis_server.address.path)
    names, values = keys(3, "ann"), blocks(3)
    _until(lambda: put(tier, names, values) == (OK, OK, REFUSED))


@pytest.fixture
def server_path(tmp_path: Path) -> Path:
    """Where there is no server yet."""
    return tmp_path / "s"


def test_a_server_that_stalls_costs_the_deadline(redis_server: EmbeddedValkey, connect: Connect) -> None:
    """Not three of them, for the three parts of a put."""
    tier = connect(redis_server.address, replace(CONFIG, put_s=0.5))
    set_quotas(tier, 10)
    fill(tier, 1, "ann")
    tell(redis_server, b"CLIENT", b"PAUSE", b"60000")
    start = time.monotonic()
    assert set(put(tier, keys(2), blocks(2))) <= {Outcome.TIMEOUT, Outcome.UNAVAILABLE}
    assert time.monotonic() - start < 10


@pytest.mark.parametrize("cancelled", [False, True], ids=["late", "cancelled"])
def test_a_late_put_keeps_what_it_has_written_and_gives_back_the_rest(
    redis_server: EmbeddedValkey, connect: Connect, monkeypatch: pytest.MonkeyPatch, cancelled: bool
) -> None:
    """At once, and not with the lease: others have that room."""
    monkeypatch.setattr(redis_keeping, "COMMIT_GRACE_S", PATIENCE_S)
    plane = replace(CONFIG.plane, lanes=1, window_requests=1)
    tier = connect(redis_server.address, replace(CONFIG, put_s=1.0, plane=plane))
    set_quotas(tier, 4)
    begun, go_on = threading.Event(), threading.Event()
    encode = BlockCodec.encode

    def encode_slowly(codec: BlockCodec, key: BlockKey, view: memoryview) -> object:
        if key.id == names[2].id:
            begun.set()
            go_on.wait(PATIENCE_S)
        return encode(codec, key, view)

    monkeypatch.setattr(BlockCodec, "encode", encode_slowly)
    names = keys(4, "ann")
    start = time.monotonic()
    operation = tier.put(names, blocks(4))
    assert begun.wait(PATIENCE_S)
    if cancelled:
        operation.cancel()
    time.sleep(max(0.0, start + 1.1 - time.monotonic()))
    assert not operation.done(), "a lane has the third block"
    go_on.set()
    last = Outcome.CANCELLED if cancelled else Outcome.TIMEOUT
    assert operation.result(PATIENCE_S) == (OK, OK, Outcome.TIMEOUT, last)
    assert used(tier) == {"ann": 2}
    assert there(tier, names) == [True, True, False, False]
    assert _Looker(redis_server, tier).contradictions() == []
    fill(tier, 2, "bob")
    assert used(tier) == {"ann": 2, "bob": 2}


# Several at once


def test_many_replicas_at_once_agree(shared_server: EmbeddedValkey, connect: Connect) -> None:
    """Putting, loading and deleting the same blocks: whatever the order, the ledger adds up, and limits hold."""
    tiers = [connect(shared_server.address, replace(CONFIG, ttl_s=1000.0)) for _ in range(3)]
    for tier in tiers:
        set_quotas(tier, 24, ann=quota(reserved=8, limit=12), bob=quota(limit=16))
    names = [BlockKey(os.urandom(32), name) for name in ["ann", "bob", "cat"] * 16]
    values = dict(zip(ids(names), blocks(len(names)), strict=True))
    wrong: list[str] = []

    def work(tier: RedisTier, seed: int) -> None:
        dice = random.Random(seed)
        for _ in range(60):
            some = dice.sample(names, dice.randint(1, 8))
            match dice.choice(["put", "put", "load", "delete", "forget"]):
                case "put":
                    put(tier, some, [values[name.id] for name in some])
                case "load":
                    into = room(len(some))
                    outcomes = load(tier, some, into)
                    fared = zip(some, outcomes, into, strict=True)
                    wrong.extend("bytes" for name, outcome, at in fared if outcome is OK and at != values[name.id])
                case "delete":
                    tier.delete(ids(some[:2])).result(PATIENCE_S)
                case "forget":
                    tier.forget("cat").result(PATIENCE_S)

    threads = [threading.Thread(target=work, args=(tier, seed)) for seed, tier in enumerate([*tiers, *tiers])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S * 2)
    assert wrong == []
    for tier in tiers:
        assert tier.settle(PATIENCE_S)
    now = used(tiers[0])
    assert now.get("ann", 0) <= 12
    assert now.get("bob", 0) <= 16
    assert _Looker(shared_server, tiers[0]).contradictions() == []


# Rights, damage, keys


def test_a_user_with_the_rights_that_the_docs_name_is_enough(redis_server: EmbeddedValkey, connect: Connect) -> None:
    page = (Path(__file__).parents[2] / "docs" / "kv.md").read_text()
    (rights,) = re.findall(r"ACL SETUSER lamina on >\S+ ~lamina:\* -@all ([^`]*)", page)
    tell(redis_server, b"ACL", b"SETUSER", b"kv", b"on", b">pw", b"~lamina:*", b"-@all", *rights.encode().split())
    tier = connect(replace(redis_server.address, user="kv", password="pw"), replace(CONFIG, ttl_s=1000.0))
    plain = fill(tier, 2, "ann")
    assert load(tier, plain, room(2)) == (OK, OK)
    assert tier.settle(PATIENCE_S)
    assert tier.delete(ids(plain[:1])).result(PATIENCE_S) == Tally(1, OK)
    assert tier.trouble == ""
    tier.set_quotas({"ann": quota(reserved=1)})
    names = fill(tier, 3, "ann")
    assert load(tier, names, room(3)) == (OK,) * 3
    assert tier.reconcile(PATIENCE_S)
    assert used(tier) == {"": 1, "ann": 3}
    assert tier.delete(ids(names[:1])).result(PATIENCE_S) == Tally(1, OK)
    assert tier.forget("ann").result(PATIENCE_S) == Tally(2, OK)
    set_quotas(tier, 2, ann=quota(limit=1))
    fill(tier, 1, "ann")
    fill(tier, 1, "ann")
    set_quotas(connect(replace(redis_server.address, user="kv", password="pw")), 2)
    assert tier.trouble == ""


def test_without_the_right_to_run_scripts_blocks_are_still_loaded(
    redis_server: EmbeddedValkey, connect: Connect
) -> None:
    """Nothing is stored then, and the tier says why."""
    names = fill(connect(redis_server.address), 2, "ann")
    rights = b"+hello +ping +select +get +set +exists +unlink +info".split()
    tell(redis_server, b"ACL", b"SETUSER", b"kv", b"on", b">pw", b"~lamina:*", b"-@all", *rights)
    tier = connect(replace(redis_server.address, user="kv", password="pw"))
    tier.set_quotas({})
    assert put(tier, keys(2), blocks(2)) == (Outcome.UNAVAILABLE,) * 2
    assert "NOPERM" in tier.trouble
    assert lookup(tier, names) == Tally(2, OK)
    assert load(tier, names, room(2)) == (OK, OK)
    assert tier.usage().by_namespace == {}


@pytest.mark.parametrize("damage", ["flipped", "truncated", "list"])
def test_a_damaged_value_is_not_paid_for(redis_server: EmbeddedValkey, connect: Connect, damage: str) -> None:
    """Once somebody noticed, it is gone, and a put of the same block is not answered with "it is there"."""
    tier = connect(redis_server.address)
    set_quotas(tier, 10)
    look = _Looker(redis_server, tier)
    names, values, into = keys(3, "ann"), blocks(3), room(3)
    put(tier, names, values)
    key = look.values + names[1].id.hex().encode()
    stored = tell(redis_server, b"GET", key)
    assert isinstance(stored, bytes)
    tell(redis_server, b"DEL", key)
    flipped = stored[:500] + bytes([stored[500] ^ 1]) + stored[501:]
    written = {
        "flipped": (b"SET", key, flipped),
        "truncated": (b"SET", key, stored[:-1]),
        "list": (b"RPUSH", key, b"x"),
    }
    tell(redis_server, *written[damage])
    first, second, third = load(tier, names, into)
    assert (first, third) == (OK, OK)
    assert second in (Outcome.CORRUPT, Outcome.MISSING)  # a comparison of lengths may have been first to notice
    assert tier.settle(PATIENCE_S)
    assert used(tier) == {"ann": 2}
    assert put(tier, names, values) == (OK,) * 3
    assert load(tier, names, into) == (OK,) * 3
    assert into == values
    assert look.contradictions() == []


def test_all_keys_share_a_cluster_slot(redis_server: EmbeddedValkey, connect: Connect) -> None:
    """Blocks and ledger: a script may touch all of them."""
    tier = connect(redis_server.address, replace(CONFIG, ttl_s=1000.0))
    set_quotas(tier, 100, ann=quota(limit=3))
    fill(tier, 3, "ann")
    fill(tier, 2, "bob")
    names = tell(redis_server, b"KEYS", b"*")
    assert isinstance(names, list)
    tags = {bytes(name).partition(b"{")[2].partition(b"}")[0] for name in names if isinstance(name, bytes)}
    assert len(tags) == 1
    assert all(bytes(name).startswith(b"lamina:{") for name in names if isinstance(name, bytes))


def test_compressed_blocks_are_charged_what_they_take(redis_server: EmbeddedValkey, connect: Connect) -> None:
    """Not what they might have taken."""
    if "zstd" not in EXACT_CODECS:
        pytest.skip("zstandard is not installed")
    tier = connect(redis_server.address, codec="zstd")
    set_quotas(tier, 10)
    names = keys(3, "ann")
    assert put(tier, names, [memoryview(bytes(BLOCK_BYTES))] * 3) == (OK,) * 3
    assert used(tier) == {"ann": 0}
    assert 0 < tier.usage().bytes < 1000
    assert _Looker(redis_server, tier).contradictions() == []


def test_closing_leaves_no_thread(shared_server: EmbeddedValkey, connect: Connect) -> None:
    tier = RedisTier(shared_server.address, BlockCodec(LAYOUT, BLOCK_BYTES), CONFIG, name="leak")
    set_quotas(tier, 10)
    names = fill(tier, 2, "ann")
    load(tier, names, room(2))
    tier.close()
    tier.close()
    assert not any(thread.name.startswith("lamina-leak") for thread in threading.enumerate())


def _until(condition: Callable[[], bool], limit_s: float = 20.0) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.01)
