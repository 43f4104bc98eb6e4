"""What the KV manager's bookkeeping costs per block, from a thousand blocks to a million, and by number of tenants.

A full pool, all of it cached: each request finds half its prompt, evicts for the other half, publishes and leaves. That
is the dearest steady state there is. Processor time of this thread, best of a few rounds; no model, no tensors.

And the look-up of what to spill, after each such request, with every tenant at its own limit and beyond its
reservation: which blocks go next in the pool as a whole, and which ones of the tenant that just changed.

    python benchmarks/kv_bookkeeping.py
    python benchmarks/kv_bookkeeping.py --quick

Goals: a block costs no more of a million than of a thousand, a look-up no more among 1024 tenants than among 16. What
is left is the processor's caches: twice is flat.
"""

from __future__ import annotations

import argparse
import itertools
import random
import time
from collections.abc import Iterator
from typing import Any

from harness import Goal, Progress, add_quick, finish
from lamina_kvtier import KvManager, Quota, QuotaBook

BLOCKS_PER_REQUEST = 32
POOLS = ((10**3, 8), (10**4, 8), (10**5, 8), (10**6, 8), (10**6, 64), (10**6, 4096))  # blocks, tenants
LOOK_UPS = ((2**16, 2), (2**16, 16), (2**16, 64), (2**16, 1024))
HIGH_WATER = 128  # blocks: what two steps of 512 tokens may evict, twice
COLUMNS = ["blocks", "tenants", "no quotas, us per block", "quotas, us per block", "spill look-up, us"]
FLAT = 2.0


def manager_of(num_blocks: int, tenants: int, quotas: bool) -> KvManager:
    if not quotas:
        return KvManager(num_blocks)
    book = QuotaBook(num_blocks, num_blocks // 10)
    reserved = num_blocks // 2 // tenants
    book.load({f"t{at}": Quota(reserved, num_blocks, reserved // 2, 1.0 + at % 3) for at in range(tenants)})
    return KvManager(num_blocks, quotas=book)


def manager_of_limits(num_blocks: int, tenants: int) -> KvManager:
    """Each tenant may have its part of the pool, and half of that is promised to it."""
    book = QuotaBook(num_blocks)
    limit = num_blocks // tenants
    book.load({f"t{at}": Quota(limit // 2, limit, 0, 1.0 + at % 3) for at in range(tenants)})
    return KvManager(num_blocks, quotas=book)


def serve(manager: KvManager, owner: str, ids: list[bytes]) -> None:
    """One request, as the scheduler does it."""
    table = manager.acquire(ids)
    known = len(table)
    table += manager.allocate(len(ids) - known, owner=owner)
    for block, identity in zip(table[known:], ids[known:], strict=True):
        manager.publish(block, identity)
    manager.release(table)


def requests(tenants: int, seed: int) -> Iterator[tuple[str, list[bytes]]]:
    """Owners at random, each with fresh contents behind the half that its last request left."""
    chance = random.Random(seed)
    names = (number.to_bytes(32, "big") for number in itertools.count(1))
    heads: dict[str, list[bytes]] = {}
    for _ in itertools.count():
        owner = f"t{chance.randrange(tenants)}"
        head = heads.get(owner, [])
        ids = head + list(itertools.islice(names, BLOCKS_PER_REQUEST - len(head)))
        heads[owner] = ids[: BLOCKS_PER_REQUEST // 2]
        yield owner, ids


def microseconds_per_block(num_blocks: int, tenants: int, quotas: bool, *, count: int, rounds: int) -> float:
    manager = manager_of(num_blocks, tenants, quotas)
    work = requests(tenants, seed=num_blocks + tenants)
    while manager.usage().free:
        serve(manager, *next(work))
    best = float("inf")
    for _ in range(rounds):
        batch = list(itertools.islice(work, count))
        start = time.thread_time()
        for owner, ids in batch:
            serve(manager, owner, ids)
        best = min(best, time.thread_time() - start)
    manager.check_integrity([])
    return best / (count * BLOCKS_PER_REQUEST) * 1e6


def microseconds_per_look_up(num_blocks: int, tenants: int, *, count: int, rounds: int) -> float:
    manager = manager_of_limits(num_blocks, tenants)
    work = requests(tenants, seed=num_blocks + tenants)
    while manager.usage().free:
        serve(manager, *next(work))
    best = float("inf")
    for _ in range(rounds):
        seconds = 0.0
        for owner, ids in itertools.islice(work, count):
            serve(manager, owner, ids)
            start = time.thread_time()
            victims, near = manager.next_victims(HIGH_WATER), manager.victims_near_limit(owner, HIGH_WATER)
            seconds += time.thread_time() - start
            assert near is not None, "every tenant is at its limit"
            assert len(victims) == HIGH_WATER
        best = min(best, seconds)
    return best / count * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=400, help="in each round")
    parser.add_argument("--rounds", type=int, default=5)
    add_quick(parser, requests=200, rounds=3)
    options = parser.parse_args()
    sizes = {"count": options.requests, "rounds": options.rounds}
    rows: list[dict[str, Any]] = []
    progress = Progress("bookkeeping", len(POOLS) + len(LOOK_UPS))
    for num_blocks, tenants in POOLS:
        costs = [microseconds_per_block(num_blocks, tenants, quotas, **sizes) for quotas in (False, True)]
        rows.append(dict(zip(COLUMNS[:4], (num_blocks, tenants, *(round(cost, 2) for cost in costs)), strict=True)))
        progress.step(f"{num_blocks} blocks, {tenants} tenants")
    look_ups: dict[int, float] = {}
    for num_blocks, tenants in LOOK_UPS:
        look_ups[tenants] = microseconds_per_look_up(num_blocks, tenants, **sizes)
        rows.append({"blocks": num_blocks, "tenants": tenants, COLUMNS[4]: round(look_ups[tenants], 1)})
        progress.step(f"look-ups among {tenants} tenants")
    small, large = (next(row for row in rows if row["blocks"] == blocks) for blocks in (POOLS[0][0], 10**6))
    goals = [
        Goal.at_most(f"a block's bookkeeping, {what}, 1M blocks", large[column] / small[column], FLAT, "x 1k blocks")
        for what, column in (("no quotas", COLUMNS[2]), ("quotas", COLUMNS[3]))
    ]
    goals.append(Goal.at_most("a spill look-up, 1024 tenants", look_ups[1024] / look_ups[16], FLAT, "x 16 tenants"))
    finish("kv-bookkeeping", rows, COLUMNS, goals, options)


if __name__ == "__main__":
    main()
