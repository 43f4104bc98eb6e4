"""The Redis data plane against a bare socket loop and against redis-py: same server, same values, by turns.

    python benchmarks/kv_redis.py                     # about a minute
    python benchmarks/kv_redis.py --quick
    python benchmarks/kv_redis.py --server /usr/bin/redis-server

Three goals, put and get each: at least 80 % of the socket loop, at least twice redis-py's best path, and at least 3 GB
for each second of this process's CPU. Every path moves every value in every round, in an order that changes, and its
best round counts: noise only ever slows down. What comes back is compared, byte for byte, once for each path.

`plane` is what the goals are about. `tier` adds the header and the checksum of each block (BLAKE3, or XXH3 where it is
installed), which redis-py and the socket loop do not have.
"""

from __future__ import annotations

import argparse
import os
import resource
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

from harness import Goal, add_quick, finish
from kv_redis_peers import RawSocket, redis_py_paths
from lamina.wiring.cores import store_lanes
from lamina.wiring.valkey import EmbeddedValkey, ValkeyConfig
from lamina_kvtier.block_codec import CHECKSUMS, BlockCodec
from lamina_kvtier.redis_plane import Batch, Fetch, PlaneConfig, RedisAddress, RedisPlane, Store
from lamina_kvtier.redis_tier import RedisTier, RedisTierConfig
from lamina_kvtier.tier import BlockKey, Outcome

SIZES = {"360 KiB (SmolLM2-135M)": 368_640, "1 MiB": 1 << 20}
COLUMNS = ["block", "path", "put MB/s", "get MB/s", "put GB/CPU-s", "get GB/CPU-s"]
Views = Sequence[memoryview]


class Mover(Protocol):
    """One way to move values. Both return when all are there; get fills `into`."""

    def put(self, keys: Sequence[bytes], values: Views) -> None: ...

    def get(self, keys: Sequence[bytes], into: Views) -> None: ...


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--blocks", type=int, default=150)
    parser.add_argument("--lanes", type=int, default=store_lanes(), help="by default as many as the engine takes")
    parser.add_argument("--server", type=Path, help="a server's binary; by default the embedded Valkey")
    add_quick(parser, rounds=3, blocks=60)
    options = parser.parse_args()

    rows: list[dict[str, Any]] = []
    config = ValkeyConfig(maxmemory_bytes=4 << 30)
    with EmbeddedValkey(config, binary=options.server) as server:
        for name, size in SIZES.items():
            rows += _measure(name, size, server.address, options)
    goals = [goal for name in SIZES for goal in _goals([row for row in rows if row["block"] == name])]
    server_name = options.server.name if options.server else "valkey (embedded)"
    finish("kv-redis", rows, COLUMNS, goals, options, {"server": server_name, "lanes": options.lanes})


def _measure(name: str, size: int, address: RedisAddress, options: argparse.Namespace) -> list[dict[str, Any]]:
    values = [memoryview(os.urandom(size)) for _ in range(options.blocks)]
    into = [memoryview(bytearray(size)) for _ in values]
    keys = [os.urandom(32) for _ in values]
    with ExitStack() as stack:
        paths = _paths(size, address, options.lanes, stack)
        best: dict[str, dict[str, tuple[float, float]]] = {path: {} for path in paths}
        for round_ in range(options.rounds):
            names = list(paths)
            for path in names[round_ % len(names) :] + names[: round_ % len(names)]:
                _keep(best[path], "put", lambda path=path: paths[path].put(keys, values), size * len(keys))
                _keep(best[path], "get", lambda path=path: paths[path].get(keys, into), size * len(keys))
                if round_ == 0 and into != values:
                    raise SystemExit(f"{path} gave back other bytes")
    return [_row(name, path, figures) for path, figures in best.items()]


def _paths(size: int, address: RedisAddress, lanes: int, stack: ExitStack) -> dict[str, Mover]:
    assert address.path is not None
    paths: dict[str, Mover] = {
        "raw socket": stack.enter_context(RawSocket(address.path, connections=1)),
        "raw socket, 2 connections": stack.enter_context(RawSocket(address.path, connections=2)),
        f"plane, {lanes} {'lane' if lanes == 1 else 'lanes'}": stack.enter_context(_Plane(address, lanes)),
    }
    for checksum in ("blake3", "xxh3-128"):
        if checksum in CHECKSUMS:
            paths[f"tier, {checksum}"] = stack.enter_context(_Tier(address, size, checksum, lanes))
    return paths | redis_py_paths(address.path)


def _keep(best: dict[str, tuple[float, float]], what: str, run: Callable[[], None], moved: int) -> None:
    """MB/s and GB per CPU second; the best of each."""
    cpu, start = _cpu_s(), time.perf_counter()
    run()
    seconds, cpu_s = time.perf_counter() - start, _cpu_s() - cpu
    speed, thrift = best.get(what, (0.0, 0.0))
    best[what] = max(speed, moved / seconds / 1e6), max(thrift, moved / max(cpu_s, 1e-9) / 1e9)


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _row(block: str, path: str, figures: dict[str, tuple[float, float]]) -> dict[str, Any]:
    row: dict[str, Any] = {"block": block, "path": path}
    for what, (speed, thrift) in figures.items():
        row |= {f"{what} MB/s": round(speed), f"{what} GB/CPU-s": round(thrift, 2)}
    return row


def _goals(rows: Sequence[dict[str, Any]]) -> list[Goal]:
    plane = next(row for row in rows if row["path"].startswith("plane"))
    goals = []
    for what in ("put", "get"):
        which = f"Redis {what}, {plane['block'].split(' (')[0]}"
        raw = max(row[f"{what} MB/s"] for row in rows if row["path"].startswith("raw"))
        peers = [row[f"{what} MB/s"] for row in rows if row["path"].startswith("redis-py")]
        speed, thrift = plane[f"{what} MB/s"], plane[f"{what} GB/CPU-s"]
        goals.append(Goal.at_least(which, speed / raw, 0.8, "of a raw socket loop", percent=True))
        if peers:
            goals.append(Goal.at_least(which, speed / max(peers), 2, "x redis-py's best"))
        goals.append(Goal.at_least(which, thrift, 3, "GB per CPU-second"))
    return goals


class _Plane:
    """Values as they are, without header or checksum."""

    def __init__(self, address: RedisAddress, lanes: int) -> None:
        self._plane = RedisPlane(address, PlaneConfig(lanes=lanes))

    def put(self, keys: Sequence[bytes], values: Views) -> None:
        stores = [Store(key, lambda v=value: (v,), len(value), None) for key, value in zip(keys, values, strict=True)]
        self._run(Batch(stores, time.monotonic() + 60, lambda: all(store.result == b"OK" for store in stores)))

    def get(self, keys: Sequence[bytes], into: Views) -> None:
        fetches = [Fetch(key, len(at), lambda _, at=at: (at,)) for key, at in zip(keys, into, strict=True)]
        self._run(Batch(fetches, time.monotonic() + 60, lambda: all(_arrived(fetch) for fetch in fetches)))

    def _run(self, batch: Batch[bool]) -> None:
        self._plane.move(batch)
        if not batch.result():
            raise SystemExit(f"the plane failed: {self._plane.counters()}")

    def __enter__(self) -> _Plane:
        return self

    def __exit__(self, *_: object) -> None:
        self._plane.close()


def _arrived(fetch: Fetch) -> bool:
    return getattr(fetch.result, "taken", False) is True


class _Tier:
    """What the engine uses."""

    def __init__(self, address: RedisAddress, size: int, checksum: str, lanes: int) -> None:
        codec = BlockCodec(bytes(32), size, checksum=checksum)
        config = RedisTierConfig(deployment=checksum, put_s=60, load_s=60, plane=PlaneConfig(lanes=lanes))
        self._tier = RedisTier(address, codec, config)

    def put(self, keys: Sequence[bytes], values: Views) -> None:
        self._must(self._tier.put([BlockKey(key, "tenant") for key in keys], values).result())

    def get(self, keys: Sequence[bytes], into: Views) -> None:
        self._must(self._tier.load(keys, into).result())

    def _must(self, outcomes: Sequence[Outcome]) -> None:
        if set(outcomes) != {Outcome.OK}:
            raise SystemExit(f"the tier failed: {set(outcomes)} {self._tier.trouble}")

    def __enter__(self) -> _Tier:
        return self

    def __exit__(self, *_: object) -> None:
        self._tier.close()


if __name__ == "__main__":
    main()
