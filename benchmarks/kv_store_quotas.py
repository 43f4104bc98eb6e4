"""What quotas in the store cost: the Redis tier with and without, by turns, each on a full server of its own.

    python benchmarks/kv_store_quotas.py                     # about a minute
    python benchmarks/kv_store_quotas.py --server /usr/bin/redis-server
    python benchmarks/kv_store_quotas.py --quick

Every put is of new blocks, and something has to go for them: without quotas the server evicts by itself, since its
memory is full; with quotas the ledger does, which is asked twice for a whole put. Goal: put keeps at least 80 % of its
speed. The best round counts. A get is the same request either way, but it follows a put whose victims the server may
still be freeing, on the same cores; of a full server without quotas some of the newest blocks are gone already, and
only those that came count.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

from harness import Goal, add_quick, finish
from lamina.wiring.cores import store_lanes
from lamina.wiring.valkey import EmbeddedValkey, ValkeyConfig
from lamina_kvtier.block_codec import BlockCodec
from lamina_kvtier.quota import Quota
from lamina_kvtier.redis_plane import PlaneConfig
from lamina_kvtier.redis_tier import RedisTier, RedisTierConfig
from lamina_kvtier.tier import BlockKey, Operation, Outcome

SIZES = {"360 KiB (SmolLM2-135M)": 368_640, "1 MiB": 1 << 20}
COLUMNS = ["block", "blocks in a put", "put MB/s", "with quotas", "get MB/s", "with quotas "]
TENANTS = 50
FULL = 512 << 20  # bytes of blocks
PATIENCE_S = 60.0
SPARE = 1 << 30  # what a server has beyond that if quotas keep it from being full


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--server", type=Path, help="a server's binary; by default the embedded Valkey")
    add_quick(parser, rounds=4)
    options = parser.parse_args()
    rows = []
    for name, size in SIZES.items():
        for count in (16, 150):
            row: dict[str, Any] = {"block": name, "blocks in a put": count}
            rows.append(row | _measure(size, count, options))
    goals = [_goal(row) for row in rows]
    server_name = options.server.name if options.server else "valkey (embedded)"
    finish("kv-store-quotas", rows, COLUMNS, goals, options, {"server": server_name})


def _goal(row: dict[str, Any]) -> Goal:
    which = f"put under quotas, {row['block']}, {row['blocks in a put']} in a put"
    kept = row["with quotas"] / row["put MB/s"]
    return Goal.at_least(which, kept, 0.8, "of the speed without quotas", percent=True)


def _measure(size: int, count: int, options: argparse.Namespace) -> dict[str, Any]:
    values = [memoryview(os.urandom(size)) for _ in range(count)]
    into = [memoryview(bytearray(size)) for _ in values]
    best: dict[tuple[str, bool], float] = {}
    with ExitStack() as stack:
        tiers = {ruled: stack.enter_context(_full_tier(options.server, values, ruled=ruled)) for ruled in (False, True)}
        for round_ in range(options.rounds):
            for quotas in (False, True) if round_ % 2 else (True, False):
                timed = _round(tiers[quotas], values, into)
                best |= {(what, quotas): max(best.get((what, quotas), 0.0), speed) for what, speed in timed.items()}
    row: dict[str, Any] = {}
    for what, space in (("put", ""), ("get", " ")):
        row |= {f"{what} MB/s": round(best[what, False]), f"with quotas{space}": round(best[what, True])}
    return row


def _round(tier: RedisTier, values: list[memoryview], into: list[memoryview]) -> dict[str, float]:
    """A put of new blocks and a get of the same: MB/s."""
    keys = _keys(len(values))
    put_s, stored = _timed(lambda: tier.put(keys, values))
    get_s, found = _timed(lambda: tier.load([key.id for key in keys], into))
    tier.settle(PATIENCE_S)  # what it says at leisure shall not slow the other one down
    came = [at for at, outcome in enumerate(found) if outcome is Outcome.OK]
    if set(stored) != {Outcome.OK} or not set(found) <= {Outcome.OK, Outcome.MISSING} or not came:
        raise SystemExit(f"the tier failed: {set(stored)}, {set(found)}")
    if any(into[at] != values[at] for at in came):
        raise SystemExit("other bytes came back")
    size = len(values[0])
    return {"put": size * len(values) / put_s / 1e6, "get": size * len(came) / get_s / 1e6}


def _keys(count: int) -> list[BlockKey]:
    return [BlockKey(os.urandom(32), f"tenant {at % TENANTS}") for at in range(count)]


@contextmanager
def _full_tier(binary: Path | None, values: list[memoryview], *, ruled: bool) -> Iterator[RedisTier]:
    """Holds FULL bytes; `ruled`: by quotas, else by the server's own memory."""
    size = len(values[0])
    plane = PlaneConfig(lanes=store_lanes())  # as the product has it
    config = RedisTierConfig(deployment=os.urandom(8).hex(), put_s=PATIENCE_S, load_s=PATIENCE_S, plane=plane)
    server = ValkeyConfig(maxmemory_bytes=FULL + SPARE if ruled else FULL)
    with (
        EmbeddedValkey(server, binary=binary) as running,
        closing(RedisTier(running.address, BlockCodec(bytes(32), size), config)) as tier,
    ):
        if ruled:
            rights = Quota(size // 2, 2**53)
            tier.set_quotas({f"tenant {at}": rights for at in range(TENANTS)}, capacity=FULL)
        for _ in range(FULL // (size * len(values)) + 2):
            tier.put(_keys(len(values)), values).result(PATIENCE_S)
        tier.settle(PATIENCE_S)
        yield tier


def _timed(
    start: Callable[[], Operation[tuple[Outcome, ...]]],
) -> tuple[float, tuple[Outcome, ...]]:
    began = time.perf_counter()
    outcomes = start().result(PATIENCE_S)
    return time.perf_counter() - began, outcomes


if __name__ == "__main__":
    main()
