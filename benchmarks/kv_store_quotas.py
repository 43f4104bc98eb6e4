"""What quotas in the store cost: the Redis tier with and without, by turns, on the same server.

    python benchmarks/kv_store_quotas.py                     # about a minute
    python benchmarks/kv_store_quotas.py --server /usr/bin/redis-server

Every put is of new blocks, into a store that is full: under quotas each of them evicts another one, and the ledger is
asked twice for a whole put. Goal: put keeps at least 80 % of its speed. The best round counts. A get is the same
request either way, but it follows a put whose victims the server still frees, on the same cores.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from harness import Goal, add_quick, finish
from lamina.wiring.valkey import EmbeddedValkey, ValkeyConfig
from lamina_kvtier.block_codec import HEADER_BYTES, BlockCodec
from lamina_kvtier.quota import Quota
from lamina_kvtier.redis_plane import RedisAddress
from lamina_kvtier.redis_tier import RedisTier, RedisTierConfig
from lamina_kvtier.tier import BlockKey, Outcome

SIZES = {"360 KiB (SmolLM2-135M)": 368_640, "1 MiB": 1 << 20}
COLUMNS = ["block", "blocks in a put", "put MB/s", "with quotas", "get MB/s", "with quotas "]
TENANTS = 50


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--server", type=Path, help="a server's binary; by default the embedded Valkey")
    add_quick(parser, rounds=4)
    options = parser.parse_args()
    rows = []
    with EmbeddedValkey(ValkeyConfig(maxmemory_bytes=4 << 30), binary=options.server) as server:
        for name, size in SIZES.items():
            for count in (16, 150):
                rows.append({"block": name, "blocks in a put": count} | _measure(server.address, size, count, options))
    goals = [_goal(row) for row in rows]
    server_name = options.server.name if options.server else "valkey (embedded)"
    finish("kv-store-quotas", rows, COLUMNS, goals, options, {"server": server_name})


def _goal(row: dict[str, Any]) -> Goal:
    which = f"put under quotas, {row['block']}, {row['blocks in a put']} in a put"
    kept = row["with quotas"] / row["put MB/s"]
    return Goal.at_least(which, kept, 0.8, "of the speed without quotas", percent=True)


def _measure(address: RedisAddress, size: int, count: int, options: argparse.Namespace) -> dict[str, Any]:
    values = [memoryview(os.urandom(size)) for _ in range(count)]
    into = [memoryview(bytearray(size)) for _ in values]
    best: dict[tuple[str, bool], float] = {}
    with ExitStack() as stack:
        tiers = {ruled: _tier(address, size, 3 * count, quotas=ruled) for ruled in (False, True)}
        for tier in tiers.values():
            stack.callback(tier.close)
        for round_ in range(options.rounds):
            for quotas in (False, True) if round_ % 2 else (True, False):
                keys = [BlockKey(os.urandom(32), f"tenant {at % TENANTS}") for at in range(count)]
                tier, ids = tiers[quotas], [key.id for key in keys]
                timed = {
                    "put": _seconds(lambda tier=tier, keys=keys: tier.put(keys, values).result()),
                    "get": _seconds(lambda tier=tier, ids=ids: tier.load(ids, into).result()),
                }
                tier.settle(10)  # what it says at leisure shall not slow the other one down
                if into != values:
                    raise SystemExit("other bytes came back")
                for what, seconds in timed.items():
                    best[what, quotas] = max(best.get((what, quotas), 0.0), size * count / seconds / 1e6)
    row: dict[str, Any] = {}
    for what, space in (("put", ""), ("get", " ")):
        plain, ruled = best[what, False], best[what, True]
        row |= {f"{what} MB/s": round(plain), f"with quotas{space}": round(ruled)}
    return row


def _tier(address: RedisAddress, size: int, room: int, *, quotas: bool) -> RedisTier:
    """room: blocks."""
    config = RedisTierConfig(deployment=os.urandom(8).hex(), put_s=60, load_s=60)
    tier = RedisTier(address, BlockCodec(bytes(32), size), config)
    if quotas:
        rights = Quota(size // 2, 2**53)
        tier.set_quotas({f"tenant {at}": rights for at in range(TENANTS)}, capacity=room * (size + HEADER_BYTES))
    return tier


def _seconds(run: Callable[[], tuple[Outcome, ...]]) -> float:
    start = time.perf_counter()
    outcomes = run()
    seconds = time.perf_counter() - start
    if set(outcomes) != {Outcome.OK}:
        raise SystemExit(f"the tier failed: {set(outcomes)}")
    return seconds


if __name__ == "__main__":
    main()
