"""A put under quotas against a server that answers as a test wants: what is not surely kept is never OK."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from lamina_kvtier import redis_keeping
from lamina_kvtier.block_codec import HEADER_BYTES, BlockCodec
from lamina_kvtier.namespace_counts import FOLDED, MAX_NAMESPACES
from lamina_kvtier.quota import Quota
from lamina_kvtier.reasons import Reason
from lamina_kvtier.redis_blocks import COMMIT_GRACE_S
from lamina_kvtier.redis_plane import Backoff, PlaneConfig, RedisAddress
from lamina_kvtier.redis_tier import RedisTier, RedisTierConfig
from lamina_kvtier.redis_usage import room_for_values
from lamina_kvtier.tier import BlockKey, Outcome
from support.scripted_redis import ScriptedRedis
from support.tier_contract import BLOCK_BYTES, LAYOUT, PATIENCE_S, blocks, keys, put

CONFIG = RedisTierConfig(
    lookup_s=5, load_s=5, put_s=5, delete_s=5, plane=PlaneConfig(lanes=1, backoff=Backoff(first_s=0.01, limit_s=0.02))
)
SICK = {Outcome.UNAVAILABLE, Outcome.TIMEOUT}
Answer = Callable[[list[bytes]], bytes | None]


def bulk(text: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(text), text)


class Server:
    """Grants every put, unless told otherwise by operation."""

    def __init__(self) -> None:
        self.answers: dict[bytes, Answer] = {
            b"install": lambda _: bulk(b"OK"),
            b"reserve": lambda a: b"*3\r\n" + bulk(b"7") + bulk(b"w" * ((len(a) - 9) // 3)) + b"*0\r\n",
            b"commit": lambda a: bulk(b"k" * int(a[8])),
            b"sweep": lambda _: b"*3\r\n" + bulk(b"done") + bulk(b"done") + b"*0\r\n",
            b"SET": lambda _: b"+OK\r\n",
            b"INFO": lambda _: bulk(b"used_memory:1\r\nmaxmemory:2\r\n"),
            b"usage": lambda _: b"*5\r\n" + bulk(b"0") + bulk(b"0") + bulk(b"9") + b":0\r\n*0\r\n",
        }
        self.seen: list[list[bytes]] = []

    def __call__(self, command: list[bytes]) -> bytes | None:
        name = command[5] if command[0] in (b"EVALSHA", b"EVAL") else command[0]
        self.seen.append(command)
        return self.answers[name](command)

    def calls(self, name: bytes) -> list[list[bytes]]:
        return [command for command in self.seen if name in (command[0], command[5] if len(command) > 5 else b"")]


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
def tier(server: Server) -> Iterator[RedisTier]:
    with ScriptedRedis(server) as scripted:
        tier = RedisTier(RedisAddress.parse(scripted.url), BlockCodec(LAYOUT, BLOCK_BYTES), CONFIG)
        tier.set_quotas({"tenant": Quota(0, 10**6)}, capacity=10**6)
        yield tier
        tier.close()


def test_a_put_is_reserved_written_and_committed(server: Server, tier: RedisTier) -> None:
    """In one call each for all blocks, the tail older than the head, and written for a short time only."""
    names = keys(3)
    assert put(tier, names, blocks(3)) == (Outcome.OK,) * 3
    (reserve,), (commit,) = server.calls(b"reserve"), server.calls(b"commit")
    assert reserve[9::3] == commit[9::2] == [b"kv1:" + name.id.hex().encode() for name in names]
    assert set(reserve[10::3]) == {b"%d" % (BLOCK_BYTES + HEADER_BYTES)}
    assert commit[10::2] == [b"10", b"9", b"8"]
    assert {tuple(command[3:]) for command in server.calls(b"SET")} == {(b"PX", b"11000")}


@pytest.mark.parametrize("operation", [b"reserve", b"commit"])
@pytest.mark.parametrize(
    "nonsense",
    [
        b":7\r\n",
        b"*0\r\n",
        b"$-1\r\n",
        b"+OK\r\n",
        b"$3\r\nkkz\r\n",
        b"*3\r\n+7\r\n+ww\r\n:0\r\n",
        b"*3\r\n+x\r\n+wwww\r\n*0\r\n",
    ],
)
def test_nonsense_is_never_ok(server: Server, tier: RedisTier, operation: bytes, nonsense: bytes) -> None:
    """Such an answer costs the connection, and the blocks are as good as not stored."""
    server.answers[operation] = lambda _: nonsense
    assert set(put(tier, keys(4), blocks(4))) <= SICK


@pytest.mark.parametrize("operation", [b"reserve", b"SET", b"commit"])
def test_a_server_that_hangs_up_is_never_ok(server: Server, tier: RedisTier, operation: bytes) -> None:
    server.answers[operation] = lambda _: None
    assert set(put(tier, keys(3), blocks(3))) <= SICK


def test_what_could_not_be_written_is_given_back(server: Server, tier: RedisTier) -> None:
    """In the same call that commits the others."""
    names = keys(3)
    full = b"kv1:" + names[1].id.hex().encode()
    server.answers[b"SET"] = lambda a: b"-OOM command not allowed\r\n" if a[1].endswith(full) else b"+OK\r\n"
    assert put(tier, names, blocks(3)) == (Outcome.OK, Outcome.REFUSED, Outcome.OK)
    (commit,) = server.calls(b"commit")
    assert commit[8] == b"2"
    assert commit[13:] == [full]


def test_a_block_that_is_gone_when_it_is_committed_is_refused(server: Server, tier: RedisTier) -> None:
    """And counted as such."""
    server.answers[b"commit"] = lambda _: bulk(b"kx")
    assert put(tier, keys(2), blocks(2)) == (Outcome.OK, Outcome.REFUSED)
    assert tier.usage().refusals == {("tenant", Reason.PRESSURE): 1}


def test_only_what_is_granted_is_written(server: Server, tier: RedisTier) -> None:
    """What is kept already is OK without that; victims are counted."""
    victims = b"*2\r\n" + bulk(b"pneighbour") + b":3\r\n"
    server.answers[b"reserve"] = lambda _: b"*3\r\n" + bulk(b"7") + bulk(b"kwqp") + victims
    names = keys(4)
    assert put(tier, names, blocks(4)) == (Outcome.OK, Outcome.OK, Outcome.REFUSED, Outcome.REFUSED)
    assert [command[1][-64:] for command in server.calls(b"SET")] == [names[1].id.hex().encode()]
    usage = tier.usage()
    assert usage.refusals == {("tenant", Reason.OWN_QUOTA): 1, ("tenant", Reason.PRESSURE): 1}
    assert usage.evictions == {("neighbour", Reason.PRESSURE): 3}


def test_counts_of_many_namespaces_take_bounded_memory(server: Server, tier: RedisTier) -> None:
    """Those without a quota are one after a while, and nothing is lost of the sums."""
    names: list[BlockKey] = []

    def refuse(_: list[bytes]) -> bytes:
        lost = b"".join(bulk(b"p" + key.namespace.encode()) + b":1\r\n" for key in names)
        return b"*3\r\n" + bulk(b"7") + bulk(b"q" * len(names)) + b"*%d\r\n" % (2 * len(names)) + lost

    server.answers[b"reserve"] = refuse
    (value,) = blocks(1)
    most, asked = MAX_NAMESPACES + 256, 0
    while asked < most + 500:
        names = [BlockKey(bytes(32), f"t{asked + at}") for at in range(100)]
        names += [] if asked else [BlockKey(bytes(32), "tenant")]
        assert set(put(tier, names, [value] * len(names))) == {Outcome.REFUSED}
        asked += len(names)
    usage = tier.usage()
    for counts, reason in ((usage.refusals, Reason.OWN_QUOTA), (usage.evictions, Reason.PRESSURE)):
        assert len(counts) <= most
        assert counts["tenant", reason] == 1, "who has a quota keeps a row, however old"
        assert counts[FOLDED, reason] > 0
        assert sum(counts.values()) == asked


def test_a_script_that_the_server_does_not_know_is_sent_whole(server: Server, tier: RedisTier) -> None:
    answer = server.answers[b"reserve"]
    server.answers[b"reserve"] = lambda a: answer(a) if a[0] == b"EVAL" else b"-NOSCRIPT No matching script.\r\n"
    assert put(tier, keys(2), blocks(2)) == (Outcome.OK,) * 2
    by_hash, whole = server.calls(b"reserve")
    assert (by_hash[0], whole[0]) == (b"EVALSHA", b"EVAL")
    assert by_hash[2:] == whole[2:]


def test_a_server_without_a_ledger_gets_one(server: Server, tier: RedisTier) -> None:
    """Once; if that does not help, the put is given up."""
    server.answers[b"reserve"] = lambda _: b"-NOLEDGER there is none here\r\n"
    assert put(tier, keys(2), blocks(2)) == (Outcome.UNAVAILABLE,) * 2
    operations = [command[5] for command in server.seen if command[0] == b"EVALSHA"]
    first, second = (at for at, operation in enumerate(operations) if operation == b"reserve")
    assert b"install" in operations[first:second]


def test_a_put_that_is_cancelled_while_it_waits_for_room_writes_nothing(server: Server, tier: RedisTier) -> None:
    """What it was granted is given back."""
    asked, go_on = threading.Event(), threading.Event()
    grant = server.answers[b"reserve"]

    def reserve(command: list[bytes]) -> bytes | None:
        asked.set()
        go_on.wait(PATIENCE_S)
        return grant(command)

    server.answers[b"reserve"] = reserve
    operation = tier.put(keys(2), blocks(2))
    assert asked.wait(PATIENCE_S)
    with pytest.raises(TimeoutError):
        operation.result(0.01)
    operation.cancel()
    assert not operation.done()
    go_on.set()
    assert operation.result(PATIENCE_S) == (Outcome.CANCELLED,) * 2
    assert server.calls(b"SET") == []
    (commit,) = server.calls(b"commit")
    assert commit[8] == b"0"
    assert len(commit[9:]) == 2


# Late, or cancelled


class Stall:
    """The n-th value from now on is not answered until the test lets it be."""

    def __init__(self, server: Server, nth: int) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()
        self._left = nth
        server.answers[b"SET"] = self._answer

    def _answer(self, _: list[bytes]) -> bytes:
        self._left -= 1
        if self._left == 0:
            self.begun.set()
            self.go_on.wait(PATIENCE_S)
        return b"+OK\r\n"


@pytest.fixture
def late(server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[RedisTier]:
    """A tier whose puts have little time, one value under way at once, and as much as it takes for their commits."""
    monkeypatch.setattr(redis_keeping, "COMMIT_GRACE_S", PATIENCE_S)
    plane = PlaneConfig(lanes=1, window_requests=1, backoff=Backoff(first_s=0.01, limit_s=0.02))
    with ScriptedRedis(server) as scripted:
        config = RedisTierConfig(lookup_s=5, load_s=5, put_s=1, delete_s=5, plane=plane)
        tier = RedisTier(RedisAddress.parse(scripted.url), BlockCodec(LAYOUT, BLOCK_BYTES), config)
        tier.set_quotas({"tenant": Quota(0, 10**6)}, capacity=10**6)
        yield tier
        tier.close()


def settled(server: Server) -> tuple[list[bytes], list[bytes]]:
    """Which blocks its only commit kept, and which ones it gave back."""
    (commit,) = server.calls(b"commit")
    end = 9 + 2 * int(commit[8])
    return commit[9:end:2], commit[end:]


@pytest.mark.parametrize("looks", [True, False], ids=["looked at", "waited for"])
@pytest.mark.parametrize("in_time", [0, 1, 2])
def test_what_came_in_time_is_committed_after_the_deadline(
    server: Server, late: RedisTier, in_time: int, looks: bool
) -> None:
    """And the room for the rest is given back: nothing is left to the lease."""
    stall = Stall(server, in_time + 1)
    names = keys(4)
    operation = late.put(names, blocks(4))
    end = time.monotonic() + PATIENCE_S
    while looks and not operation.done():
        assert time.monotonic() < end, "it never ends"
        time.sleep(0.01)
    outcomes = operation.result(PATIENCE_S)
    stall.go_on.set()
    assert outcomes == (Outcome.OK,) * in_time + (Outcome.TIMEOUT,) * (4 - in_time)
    spelled = [b"kv1:" + name.id.hex().encode() for name in names]
    assert settled(server) == (spelled[:in_time], spelled[in_time:])
    assert len(server.calls(b"SET")) == in_time + 1, "no value is sent after the deadline"


def test_a_put_that_is_cancelled_keeps_what_it_has_written(server: Server, late: RedisTier) -> None:
    """Also if the value that was under way takes until after the deadline."""
    stall = Stall(server, 2)
    names = keys(4)
    operation = late.put(names, blocks(4))
    assert stall.begun.wait(PATIENCE_S)
    operation.cancel()
    outcomes = operation.result(PATIENCE_S)
    stall.go_on.set()
    assert outcomes == (Outcome.OK, Outcome.TIMEOUT, Outcome.CANCELLED, Outcome.CANCELLED)
    spelled = [b"kv1:" + name.id.hex().encode() for name in names]
    assert settled(server) == (spelled[:1], spelled[1:])


@pytest.mark.parametrize("cancelled", [False, True])
def test_a_commit_that_is_not_answered_ends_with_its_grace(
    server: Server, late: RedisTier, monkeypatch: pytest.MonkeyPatch, cancelled: bool
) -> None:
    """What is not surely kept is not OK, and nobody waits for ever."""
    monkeypatch.setattr(redis_keeping, "COMMIT_GRACE_S", 0.1)
    begun, go_on = threading.Event(), threading.Event()

    def commit(_: list[bytes]) -> bytes | None:
        begun.set()
        go_on.wait(PATIENCE_S)
        return None

    server.answers[b"commit"] = commit
    operation = late.put(keys(3), blocks(3))
    assert begun.wait(PATIENCE_S)
    if cancelled:
        operation.cancel()
        assert not operation.done(), "a commit is brought to its end"
    outcomes = operation.result(PATIENCE_S)
    go_on.set()
    assert set(outcomes) <= SICK


def test_a_second_part_is_not_begun_after_the_deadline(
    server: Server, late: RedisTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a put of many blocks: the grace is for what was written, and for nothing new."""
    monkeypatch.setattr(redis_keeping, "_MOST_TOGETHER", 2)
    stall = Stall(server, 2)
    names = keys(6)
    outcomes = late.put(names, blocks(6)).result(PATIENCE_S)
    stall.go_on.set()
    assert outcomes == (Outcome.OK, *[Outcome.TIMEOUT] * 5)
    assert len(server.calls(b"reserve")) == 1
    assert len(server.calls(b"SET")) == 2
    assert [len(part) for part in settled(server)] == [1, 1]


@pytest.mark.parametrize("put_s", [0.001, 0.1, 5.0, 60.0])
def test_a_lease_outlives_any_put(put_s: float) -> None:
    """Deadline, grace and all."""
    assert RedisTierConfig(put_s=put_s).lease_ms / 1000 > put_s + COMMIT_GRACE_S


@pytest.mark.parametrize("value_bytes", [368_640 + 192, 2**20 + 192, 2**21 + 192, 2**21])
def test_room_leaves_space_for_the_allocator_and_the_server(value_bytes: int) -> None:
    """A value a little longer than a power of two takes a quarter more than that."""
    server = 2**30
    room = room_for_values(server, value_bytes, 16 * 2**20)
    taken = {2**20 + 192: 1.25 * 2**20, 2**21 + 192: 1.25 * 2**21, 368_640 + 192: 393_216}.get(value_bytes, value_bytes)
    assert room / value_bytes * taken <= server * 15 / 16
    assert room > server * 0.6
    assert room_for_values(server, value_bytes, 16 * 2**20, equal_lengths=False) <= server * 0.75
