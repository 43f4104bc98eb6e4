"""A crowded engine over a real server that is killed, or goes deaf: no request notices, and it is used again after.

What a request may wait for the store is bounded by the tier's own deadlines, one look-up and one load for each start of
a choice: `RedisTierConfig.lookup_s + load_s`, 2.25 s. After a few failures in a row the breaker makes that nothing. So
the tests count: who waited for a deadline, who was turned away at once, and that every operation has ended.
"""

from __future__ import annotations

import math
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fixtures.engines import drive, publish_adapter, request, tiny_core, write_adapter
from fixtures.redis import tell
from lamina.config import EngineConfig
from lamina.engine.core import EngineCore
from lamina.engine.pool import BlockPool
from lamina.engine.tiers import KvTiers
from lamina.types import FinishReason
from lamina.wiring.backends import TorchBackend
from lamina.wiring.valkey import EmbeddedValkey, ValkeyConfig
from lamina_kvtier.block_codec import BlockCodec
from lamina_kvtier.identity import IdentityChain, Layout
from lamina_kvtier.manager import KvManager
from lamina_kvtier.redis_plane import Backoff
from lamina_kvtier.redis_plane.breaker import State
from lamina_kvtier.redis_tier import RedisTier, RedisTierConfig
from lamina_kvtier.tier import BlockKey, Operation, Outcome, StoreTier, Tally
from support.ahead import AheadBackend
from support.below import Below
from support.replay import Replay
from support.soak import SMALL, Crowd

BACKENDS = {"plain": TorchBackend(), "ahead": AheadBackend()}
CONFIG = RedisTierConfig()
_LIMIT_S = 60.0  # a test that hangs


class Recorder:
    """A RedisTier that remembers its operations."""

    def __init__(self, tier: RedisTier) -> None:
        self.tier = tier
        self.lookups: list[Operation[Tally]] = []
        self.loads: list[Operation[tuple[Outcome, ...]]] = []
        self.puts: list[Operation[tuple[Outcome, ...]]] = []

    def lookup(self, ids: Sequence[bytes]) -> Operation[Tally]:
        self.lookups.append(self.tier.lookup(ids))
        return self.lookups[-1]

    def load(
        self, ids: Sequence[bytes], into: Sequence[memoryview], *, adapter: bytes | None = None
    ) -> Operation[tuple[Outcome, ...]]:
        self.loads.append(self.tier.load(ids, into, adapter=adapter))
        return self.loads[-1]

    def put(self, keys: Sequence[BlockKey], values: Sequence[memoryview]) -> Operation[tuple[Outcome, ...]]:
        self.puts.append(self.tier.put(keys, values))
        return self.puts[-1]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tier, name)

    @property
    def operations(self) -> list[Operation[Any]]:
        return [*self.lookups, *self.loads, *self.puts]

    def found(self) -> Counter[Outcome]:
        return Counter(lookup.result(0).outcome for lookup in self.lookups)

    def blocks(self, operations: Sequence[Operation[tuple[Outcome, ...]]]) -> Counter[Outcome]:
        return Counter(outcome for operation in operations for outcome in operation.result(0))


class OverRedis(Below):
    """Host memory, and a real server below it."""

    def __init__(self, server: EmbeddedValkey, *, host: int = 12) -> None:
        super().__init__(host=host)
        self.server = server
        self.recorders: list[Recorder] = []

    def __call__(self, config: EngineConfig, pool: BlockPool, kv: KvManager, layout: Layout) -> KvTiers:
        tiers, recorder = super().__call__(config, pool, kv, layout), self.recorders[-1]
        assert tiers._puts._renewals is not None
        tiers._puts._renewals._store = recorder.tier  # its own looks are no request's
        return tiers

    def store_tier(self, codec: BlockCodec) -> StoreTier | None:
        self.recorders.append(Recorder(RedisTier(self.server.address, codec, CONFIG)))
        return self.recorders[-1]


@contextmanager
def valkey(**options: Any) -> Iterator[EmbeddedValkey]:
    config = ValkeyConfig(maxmemory_bytes=32 * 2**20, backoff=Backoff(first_s=0.05, limit_s=0.1), **options)
    with EmbeddedValkey(config) as server:
        yield server


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("killed")


@pytest.fixture(scope="module")
def adapters(folder: Path) -> list[str | None]:
    return [None, publish_adapter(folder, write_adapter(folder / "peft", rank=5, seed=5))]


@pytest.fixture(scope="module")
def replay(folder: Path) -> Replay:
    return Replay(lambda: tiny_core(folder, prefix_caching=False, max_batch_tokens=512))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_killed_server_costs_no_request_and_is_used_again(
    folder: Path, adapters: list[str | None], replay: Replay, backend: str
) -> None:
    """SIGKILL three times under load: every request says what it says alone, every operation has ended, the counts are
    those of the operations, and blocks that are stored afterwards serve the next engine."""
    with valkey() as server:
        below = OverRedis(server)
        core = tiny_core(folder, backend=BACKENDS[backend], tiers=below, **SMALL)
        recorder = below.recorders[0]
        crowd = Crowd(1, adapters, count=45)
        due = [8, 18, 28]

        def kill_now_and_then() -> None:
            busy = any(not operation.done() for operation in recorder.operations)
            asked = len(crowd.requests)
            late = bool(due) and asked >= due[0] + 8
            if late:  # nothing is under way at the end of any step: then between two of them
                server.wait_up(_LIMIT_S)
            if due and server.pid is not None and (late or (busy and asked >= due[0])):
                due.pop(0)
                os.kill(server.pid, signal.SIGKILL)

        crowd.run(core, kill_now_and_then)
        assert not due
        assert crowd.differences(replay) == []
        counts_are_right(core, below)
        starts = len(crowd.requests) + core.stats().preemptions
        assert len(recorder.loads) <= len(recorder.lookups) <= starts
        assert recorder.found()[Outcome.TIMEOUT] == 0  # a connection that breaks is no deadline

        assert server.wait_up(_LIMIT_S)
        prefix = stored_again(core, below)
        tell(server, b"FLUSHALL")
        comes_back(core, below, prefix)
        core.close()
        fresh = tiny_core(folder, tiers=below, **SMALL)
        item = request("again", prefix, max_tokens=6)
        tokens, _ = drive(fresh, [item])
        assert tokens["again", 0] == replay.expected(item)[0]
        assert fresh.stats().loaded_blocks == len(identities(core, prefix))
        fresh.close()


def test_a_deaf_server_costs_a_few_deadlines(folder: Path, replay: Replay) -> None:
    """It takes connections and never answers. Look-ups run into their deadline until as many connections as the breaker
    wants failures could not be made; whoever comes later is turned away at once, and is served all the same."""
    with valkey(health_s=600.0) as server:
        below = OverRedis(server)
        core = tiny_core(folder, tiers=below, **SMALL)
        pid = server.pid
        assert pid is not None
        prefix = stored_again(core, below)
        recorder = below.recorders[0]
        before = len(recorder.lookups)
        os.kill(pid, signal.SIGSTOP)
        try:
            for number in range(20):
                item = request(f"deaf{number}", [50 + number, *prefix], max_tokens=2)
                tokens, endings = drive(core, [item])
                assert tokens[item.request_id, 0] == replay.expected(item)[0]
                assert endings[item.request_id, 0] is FinishReason.LENGTH
        finally:
            os.kill(pid, signal.SIGCONT)
        outcomes = [lookup.result(0).outcome for lookup in recorder.lookups[before:]]
        waited = sum(outcome is Outcome.TIMEOUT for outcome in outcomes)
        assert len(outcomes) == 20
        assert 1 <= waited <= CONFIG.plane.breaker_failures * math.ceil(CONFIG.plane.connect_s / CONFIG.lookup_s)
        assert outcomes.count(Outcome.UNAVAILABLE) == 20 - waited
        counts_are_right(core, below)
        stored_again(core, below)  # it hears again
        core.close()


def test_a_server_that_never_was_costs_nothing(folder: Path, adapters: list[str | None], replay: Replay) -> None:
    """An address where nobody listens: a crowd is served."""
    with valkey() as server:
        below = OverRedis(server)
    core = tiny_core(folder, tiers=below, **SMALL)
    crowd = Crowd(2, adapters, count=20)
    crowd.run(core, lambda: None)
    assert crowd.differences(replay) == []
    counts_are_right(core, below)
    assert core.stats().stored_blocks == core.stats().loaded_blocks == 0
    assert set(below.recorders[0].found()) == {Outcome.UNAVAILABLE}
    core.close()


def counts_are_right(core: EngineCore, below: OverRedis) -> None:
    """Nothing is under way any more, nothing is held, and the engine counted what the store's operations said."""
    tiers, recorder = below.made[-1], below.recorders[-1]
    until(lambda: is_quiet(tiers, recorder))
    stats, host = core.stats(), tiers._host.usage()
    puts, loads = recorder.blocks(recorder.puts), recorder.blocks(recorder.loads)
    assert (host.writing, host.held, stats.blocks_active) == (0, 0, 0)
    assert stats.stored_blocks == puts[Outcome.OK]
    assert stats.loaded_blocks <= loads[Outcome.OK]  # what comes after a block that is missing is of no use
    assert stats.failed_blocks >= puts.total() - puts[Outcome.OK]
    core.check_integrity()


def is_quiet(tiers: KvTiers, recorder: Recorder) -> bool:
    """What has ended is taken in, which may start more."""
    tiers.settle()
    host = tiers._host.usage()
    return host.writing == host.held == 0 and all(operation.done() for operation in recorder.operations)


def stored_again(core: EngineCore, below: OverRedis) -> list[int]:
    """Asks for new prefixes until one of them is in the store, whole; returns that."""
    recorder, tried = below.recorders[-1], 0
    end = time.monotonic() + _LIMIT_S
    while time.monotonic() < end:
        prefix = [9 + tried % 190, 7 + tried // 190, *range(3, 3 + 46)]
        before = len(recorder.puts)
        drive(core, [request(f"s{tried}", prefix, max_tokens=2)])
        for filler in range(3):  # what fills the pool pushes it down
            drive(
                core,
                [request(f"f{tried}-{filler}", [*range(60 + filler, 124 + filler), tried % 190 + 3], max_tokens=2)],
            )
        tried += 1
        until(lambda: all(operation.done() for operation in recorder.operations))
        hears = recorder.tier.plane.counters().breaker is State.CLOSED and len(recorder.puts) > before
        if hears and recorder.tier.lookup(identities(core, prefix)).result(_LIMIT_S).outcome is Outcome.OK:
            return prefix
    raise AssertionError("nothing is stored any more")


def comes_back(core: EngineCore, below: OverRedis, prefix: list[int]) -> None:
    """Into the store, while it is asked for again and there is something to do."""
    recorder, end, number = below.recorders[-1], time.monotonic() + _LIMIT_S, 0
    while recorder.tier.lookup(identities(core, prefix)).result(_LIMIT_S).outcome is not Outcome.OK:
        assert time.monotonic() < end, "it never came back"
        number += 1
        drive(core, [request(f"again{number}", prefix if number % 20 == 1 else [5, 6], max_tokens=2)])


def identities(core: EngineCore, prompt: Sequence[int], tenant: str = "t") -> list[bytes]:
    """Of the prompt's full blocks that a look-up may use."""
    chain = IdentityChain(core._root(None, tenant), 16)
    chain.extend(prompt)
    return chain.ids[: (len(prompt) - 1) // 16]


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + _LIMIT_S
    while not condition():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.005)
