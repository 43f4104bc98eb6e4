"""The Redis tier while its server dies, stalls, lies and garbles: operations end in time, and nothing wrong is OK."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from fixtures.redis import redis_servers, running_redis, tell
from lamina.wiring.valkey import EmbeddedValkey
from lamina_kvtier.block_codec import HEADER_BYTES, BlockCodec
from lamina_kvtier.redis_plane import Backoff, Batch, Fetch, PlaneConfig, RedisAddress, RedisPlane, State
from lamina_kvtier.redis_tier import RedisTier, RedisTierConfig
from lamina_kvtier.tier import BlockKey, Outcome, Tally
from support.fault_proxy import FaultProxy, Faults
from support.scripted_redis import ScriptedRedis
from support.tier_contract import LAYOUT, PATIENCE_S, blocks, ids, keys, load, lookup, put, room

SIZE = 100_000
DEADLINE_S = 1.0
SLACK_S = 2.0  # for a busy machine; what must not happen is a wait without end
PLANE = PlaneConfig(lanes=2, connect_s=0.5, backoff=Backoff(first_s=0.02, limit_s=0.2))
CONFIG = RedisTierConfig(lookup_s=DEADLINE_S, load_s=DEADLINE_S, put_s=DEADLINE_S, delete_s=DEADLINE_S, plane=PLANE)
SICK = {Outcome.UNAVAILABLE, Outcome.TIMEOUT}

Connect = Callable[[RedisAddress | str], RedisTier]


@pytest.fixture
def connect() -> Iterator[Connect]:
    with ExitStack() as made:

        def make(address: RedisAddress | str) -> RedisTier:
            parsed = RedisAddress.parse(address) if isinstance(address, str) else address
            tier = RedisTier(parsed, BlockCodec(LAYOUT, SIZE), CONFIG)
            made.callback(tier.close)
            return tier

        yield make


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedValkey]:
    """One server behind all proxies of this file."""
    found = redis_servers()
    if not found:
        pytest.skip("no server here")
    with running_redis(next(iter(found.values()))) as running:
        yield running


@pytest.fixture
def proxy(server: EmbeddedValkey) -> Iterator[FaultProxy]:
    assert server.address.path is not None
    with FaultProxy(server.address.path) as running:
        yield running


@pytest.fixture
def tier(proxy: FaultProxy, connect: Connect) -> RedisTier:
    return connect(f"redis://127.0.0.1:{proxy.port}")


def _timed(work: Callable[[], object]) -> float:
    start = time.monotonic()
    work()
    return time.monotonic() - start


def _recovers(tier: RedisTier, limit_s: float = 15.0) -> None:
    """By itself: only looking, as requests do."""
    names, values = keys(1), blocks(1, SIZE)
    end = time.monotonic() + limit_s
    while put(tier, names, values) != (Outcome.OK,):
        assert time.monotonic() < end, f"never again: {tier.trouble}"
        time.sleep(0.02)
    into = room(1, SIZE)
    assert load(tier, names, into) == (Outcome.OK,)
    assert into == values


# Death and restart


def test_killed_and_restarted_under_load(redis_binary: Path, connect: Connect) -> None:
    """Four threads at work while the server is killed three times: no exception, no late end, no wrong byte."""
    with running_redis(redis_binary) as server:
        tier = connect(server.address)
        stop = threading.Event()
        seen: Counter[Outcome] = Counter()
        wrong: list[str] = []

        def work(seed: int) -> None:
            names, values, into = keys(6), blocks(6, SIZE), room(6, SIZE)
            try:
                while not stop.is_set():
                    start = time.monotonic()
                    seen.update(put(tier, names, values))
                    lookup(tier, names)
                    outcomes = load(tier, names, into)
                    seen.update(outcomes)
                    if time.monotonic() - start > 3 * (DEADLINE_S + SLACK_S):
                        wrong.append(f"late: {time.monotonic() - start:.2f} s")
                    pairs = zip(outcomes, into, values, strict=True)
                    if any(a != b for outcome, a, b in pairs if outcome is Outcome.OK):
                        wrong.append("other bytes")
            except Exception as error:  # noqa: BLE001 - the test reports it
                wrong.append(repr(error))

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for _ in range(3):
            time.sleep(0.3)
            victim = server.pid
            assert victim is not None
            os.kill(victim, signal.SIGKILL)
            _until(lambda victim=victim: server.pid not in (None, victim))
        time.sleep(0.3)
        stop.set()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert wrong == []
        assert set(seen) <= {Outcome.OK, Outcome.MISSING, *SICK}
        assert seen[Outcome.OK]
        _recovers(tier)
        assert tier.plane.counters().breaker is State.CLOSED


def test_without_a_server_it_fails_at_once_and_finds_one_that_comes_later(
    server: EmbeddedValkey, connect: Connect, tmp_path: Path
) -> None:
    """After a few tries the breaker opens; then nobody waits. When there is a server, it is found without a request."""
    path = tmp_path / "s"
    tier = connect(RedisAddress(path=str(path)))
    assert lookup(tier, keys(3)).outcome in SICK
    _until(lambda: tier.plane.counters().breaker is State.OPEN)
    assert _timed(lambda: put(tier, keys(2), blocks(2, SIZE))) < 0.2
    assert load(tier, keys(2), room(2, SIZE)) == (Outcome.UNAVAILABLE,) * 2
    assert tier.delete(ids(keys(1))).result(PATIENCE_S) == Tally(0, Outcome.UNAVAILABLE)
    assert server.address.path is not None
    path.symlink_to(server.address.path)
    _until(lambda: tier.plane.counters().breaker is State.HALF_OPEN)
    _recovers(tier)


def test_an_idle_connection_that_the_server_closed_costs_nothing(tier: RedisTier, proxy: FaultProxy) -> None:
    names, values = keys(2), blocks(2, SIZE)
    assert put(tier, names, values) == (Outcome.OK,) * 2
    proxy.drop_all()
    time.sleep(0.1)
    assert load(tier, names, room(2, SIZE)) == (Outcome.OK,) * 2
    assert lookup(tier, names) == Tally(2, Outcome.OK)
    # Usually noticed before anything is sent; if the news comes later, what was under way is sent once more.
    assert tier.plane.counters().breaker_opened == 0


def test_a_connection_lost_in_the_middle_is_tried_once_more(tier: RedisTier, proxy: FaultProxy) -> None:
    names, values, into = keys(8), blocks(8, SIZE), room(8, SIZE)
    assert put(tier, names, values) == (Outcome.OK,) * 8
    proxy.faults = Faults(delay_s=0.03)
    operation = tier.load(ids(names), into)
    time.sleep(0.1)
    proxy.faults = Faults()
    proxy.drop_all()
    assert operation.result(PATIENCE_S) == (Outcome.OK,) * 8
    assert into == values
    assert tier.plane.counters().retried > 0


# Slow, silent, cut


def test_a_silent_server_costs_its_deadline_and_then_nothing(tier: RedisTier, proxy: FaultProxy) -> None:
    """Look-ups and loads end at their deadline; the breaker opens; later operations end at once; then it recovers."""
    names, values = keys(4), blocks(4, SIZE)
    assert put(tier, names, values) == (Outcome.OK,) * 4
    assert lookup(tier, names) == Tally(4, Outcome.OK)
    proxy.faults = Faults(silent=True)
    operations = [tier.load(ids(names), room(4, SIZE)) for _ in range(3)]
    probe = tier.lookup(ids(names))
    start = time.monotonic()
    for operation in operations:
        assert set(operation.result(PATIENCE_S)) <= SICK
    assert probe.result(PATIENCE_S).outcome in SICK
    assert time.monotonic() - start < DEADLINE_S + SLACK_S
    _until(lambda: tier.plane.counters().breaker is not State.CLOSED)
    proxy.faults = Faults()
    proxy.drop_all()
    _recovers(tier)
    assert tier.plane.counters().breaker_opened >= 1


def test_a_slow_server_is_late_and_not_wrong(tier: RedisTier, proxy: FaultProxy) -> None:
    names, values, into = keys(20), blocks(20, SIZE), room(20, SIZE)
    assert put(tier, names, values) == (Outcome.OK,) * 20
    proxy.faults = Faults(delay_s=0.15)
    start = time.monotonic()
    outcomes = load(tier, names, into)
    assert time.monotonic() - start < DEADLINE_S + SLACK_S
    assert set(outcomes) <= {Outcome.OK, *SICK}
    assert set(outcomes) & SICK
    assert all(a == b for outcome, a, b in zip(outcomes, into, values, strict=True) if outcome is Outcome.OK)


def test_memory_belongs_to_its_owner_again_once_an_operation_is_done(tier: RedisTier, proxy: FaultProxy) -> None:
    """Even if the bytes come after all."""
    names, into = keys(6), room(6, SIZE)
    assert put(tier, names, blocks(6, SIZE)) == (Outcome.OK,) * 6
    proxy.faults = Faults(delay_s=0.4)
    assert set(load(tier, names, into)) & SICK
    for place in into:
        place[:] = b"\x55" * SIZE
    proxy.faults = Faults()
    time.sleep(0.8)
    assert all(place == b"\x55" * SIZE for place in into)


@pytest.mark.parametrize("cut_after", [0, 3, 200, SIZE // 2, SIZE + HEADER_BYTES + 50])
def test_answers_that_are_always_cut_short(tier: RedisTier, proxy: FaultProxy, cut_after: int) -> None:
    names, values, into = keys(4), blocks(4, SIZE), room(4, SIZE)
    assert put(tier, names, values) == (Outcome.OK,) * 4
    proxy.faults = Faults(cut_after=cut_after)
    proxy.drop_all()
    start = time.monotonic()
    outcomes = load(tier, names, into)
    assert time.monotonic() - start < DEADLINE_S + SLACK_S
    assert set(outcomes) <= {Outcome.OK, *SICK}
    assert all(a == b for outcome, a, b in zip(outcomes, into, values, strict=True) if outcome is Outcome.OK)
    proxy.faults = Faults()
    _recovers(tier)


@pytest.mark.parametrize("seed", range(12))
def test_a_flipped_bit_anywhere_never_passes_for_a_block(tier: RedisTier, proxy: FaultProxy, seed: int) -> None:
    """In a length, a header, a payload, an end of line."""
    names, values, into = keys(3), blocks(3, SIZE), room(3, SIZE)
    assert put(tier, names, values) == (Outcome.OK,) * 3
    random_ = random.Random(seed)
    proxy.faults = Faults(flip_at=random_.choice([random_.randrange(400), random_.randrange(3 * SIZE)]))
    proxy.drop_all()
    start = time.monotonic()
    outcomes = load(tier, names, into)
    assert time.monotonic() - start < DEADLINE_S + SLACK_S
    assert all(a == b for outcome, a, b in zip(outcomes, into, values, strict=True) if outcome is Outcome.OK)
    proxy.faults = Faults()
    proxy.drop_all()
    _recovers(tier)
    assert load(tier, names, into) == (Outcome.OK,) * 3


def test_a_proxy_that_accepts_and_hangs_up(tier: RedisTier, proxy: FaultProxy) -> None:
    proxy.faults = Faults(refuse=True)
    assert _timed(lambda: put(tier, keys(2), blocks(2, SIZE))) < DEADLINE_S + SLACK_S
    _until(lambda: tier.plane.counters().breaker is State.OPEN)
    proxy.faults = Faults()
    _recovers(tier)


def test_cancelling_and_closing_do_not_wait_for_a_silent_server(tier: RedisTier, proxy: FaultProxy) -> None:
    names = keys(4)
    assert put(tier, names, blocks(4, SIZE)) == (Outcome.OK,) * 4
    proxy.faults = Faults(silent=True)
    operation = tier.load(ids(names), room(4, SIZE))
    assert _timed(tier.close) < DEADLINE_S + SLACK_S
    assert operation.done()
    assert set(operation.result(0)) == {Outcome.CANCELLED}


# Servers that are not what they should be


@pytest.fixture
def scripted() -> Iterator[ScriptedRedis]:
    with ScriptedRedis(lambda command: b"+OK\r\n") as running:
        yield running


LIES = {
    "nothing": b"",
    "hang up": None,
    "not RESP": b"HTTP/1.1 400 Bad Request\r\n\r\n",
    "a status": b"+OK\r\n",
    "a number": b":1\r\n",
    "an array": b"*1\r\n$1\r\nx\r\n",
    "a huge length": b"$999999999999\r\n",
    "an impossible length": b"$99999999999999999999999999\r\n",
    "an endless line": b"+" + b"x" * 100_000,
    "a short value": b"$5\r\nhello\r\n",
    "an empty value": b"$0\r\n\r\n",
    "a value too long by one": b"$%d\r\n" % (SIZE + HEADER_BYTES + 1) + bytes(SIZE + HEADER_BYTES + 1) + b"\r\n",
    "a value of zeros": b"$%d\r\n" % (SIZE + HEADER_BYTES) + bytes(SIZE + HEADER_BYTES) + b"\r\n",
    "no end of line": b"$%d\r\n" % (SIZE + HEADER_BYTES) + bytes(SIZE + HEADER_BYTES) + b"xx",
    "moved": b"-MOVED 3999 127.0.0.1:6381\r\n",
    "loading": b"-LOADING Redis is loading the dataset in memory\r\n",
    "two answers": b"$-1\r\n$-1\r\n",
    "deep": b"*1\r\n" * 100,
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lying_server_costs_its_deadline_at_most(scripted: ScriptedRedis, connect: Connect, lie: str) -> None:
    """No operation is OK, none is late, and once it tells the truth it is believed."""
    scripted.script = lambda command: LIES[lie]
    tier = connect(scripted.url)
    for work in (
        lambda: load(tier, keys(3), room(3, SIZE)),
        lambda: put(tier, keys(3), blocks(3, SIZE)) if lie != "a status" else (),
        lambda: (lookup(tier, keys(3)).outcome,),
        lambda: (tier.delete(ids(keys(3))).result(PATIENCE_S).outcome,) if lie != "a number" else (),
    ):
        start = time.monotonic()
        outcomes = work()
        assert time.monotonic() - start < DEADLINE_S + SLACK_S
        assert Outcome.OK not in outcomes
    tier.usage()
    scripted.script = lambda command: b"$-1\r\n"
    _until(lambda: load(tier, keys(2), room(2, SIZE)) == (Outcome.MISSING,) * 2)


def test_answers_out_of_step_are_noticed(scripted: ScriptedRedis, connect: Connect) -> None:
    """A server that answers one command with the value of another: never OK, and the connection is not kept."""
    codec = BlockCodec(LAYOUT, SIZE)
    names, values = keys(4), blocks(4, SIZE)
    stored = [b"".join(bytes(part) for part in codec.encode(*pair)) for pair in zip(names, values, strict=True)]

    def answer(command: list[bytes]) -> bytes:
        at = next(at for at, name in enumerate(names) if command[1].endswith(name.id.hex().encode()))
        value = stored[(at + 1) % 4]
        return b"$%d\r\n%b\r\n" % (len(value), value)

    scripted.script = answer
    tier = connect(scripted.url)
    assert load(tier, names, room(4, SIZE)) == (Outcome.CORRUPT,) * 4
    assert scripted.connections >= 2


@pytest.fixture
def plane(scripted: ScriptedRedis) -> Iterator[RedisPlane]:
    """One lane, so that all replies stand in one queue."""
    plane = RedisPlane(RedisAddress.parse(scripted.url), PlaneConfig(lanes=1, backoff=Backoff(first_s=0.01)))
    yield plane
    plane.close()


def _fetch(*names: bytes) -> Batch[list[bytes | None]]:
    """The values of these keys, one byte each; None where there was no reply."""
    found = {name: bytearray(1) for name in names}
    fetches = [Fetch(name, 1, lambda _, name=name: [memoryview(found[name])]) for name in names]

    def conclude() -> list[bytes | None]:
        return [
            bytes(found[name]) if hasattr(each.result, "taken") else None
            for name, each in zip(names, fetches, strict=True)
        ]

    return Batch(fetches, time.monotonic() + PATIENCE_S, conclude)


def test_a_batch_ends_with_its_own_last_reply(scripted: ScriptedRedis, plane: RedisPlane) -> None:
    """Replies are accounted for many at a time, and yet nobody waits for those of somebody else behind them."""
    both_there, release = threading.Event(), threading.Event()

    def answer(command: list[bytes]) -> bytes:
        (release if command[1].startswith(b"late") else both_there).wait(PATIENCE_S)
        return b"$1\r\n%b\r\n" % command[1][-1:]

    scripted.script = answer
    first, second = _fetch(b"soon-1", b"soon-2", b"soon-3"), _fetch(b"late-1", b"late-2")
    plane.move(first)
    plane.move(second)
    both_there.set()
    assert first.result(PATIENCE_S) == [b"1", b"2", b"3"]
    assert not second.done()
    release.set()
    assert second.result(PATIENCE_S) == [b"1", b"2"]


@pytest.mark.parametrize("replies", [1, 3, 5])
def test_replies_before_a_lost_connection_count_once(scripted: ScriptedRedis, plane: RedisPlane, replies: int) -> None:
    """What was answered is not asked again; the rest is, over a new connection."""
    left = [replies]

    def answer(command: list[bytes]) -> bytes | None:
        left[0] -= 1
        return None if left[0] == -1 else b"$1\r\n%b\r\n" % command[1][-1:]

    scripted.script = answer
    names = [b"key-%d" % number for number in range(6)]
    batch = _fetch(*names)
    plane.move(batch)
    assert batch.result(PATIENCE_S) == [name[-1:] for name in names]
    counters = plane.counters()
    assert (counters.answered, counters.retried, counters.moved_bytes) == (6, 6 - replies, 6)
    asked = [command[1] for command in scripted.commands if command[0] == b"GET"]
    assert all(asked.count(name) == 1 for name in names[:replies])


def test_redis_before_resp3_and_before_users(scripted: ScriptedRedis, connect: Connect) -> None:
    """HELLO is unknown to it, and AUTH takes a password alone."""
    tier = connect(scripted.url.replace("//", "//:pw@"))
    assert put(tier, keys(1), blocks(1, SIZE)) == (Outcome.OK,)
    assert [b"AUTH", b"pw"] in scripted.commands


def test_a_server_that_evicts_between_look_up_and_load(tier: RedisTier, server: EmbeddedValkey) -> None:
    names: list[BlockKey] = keys(3)
    assert put(tier, names, blocks(3, SIZE)) == (Outcome.OK,) * 3
    assert lookup(tier, names) == Tally(3, Outcome.OK)
    tell(server, b"FLUSHALL")
    assert load(tier, names, room(3, SIZE)) == (Outcome.MISSING,) * 3


def _until(condition: Callable[[], bool], limit_s: float = 15.0) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.01)
