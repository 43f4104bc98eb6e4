"""Quotas of the store in running engines on a real server: who floods it loses its own blocks, and nothing else."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fixtures.engines import drive, request, tiny_core
from fixtures.redis import running_redis
from lamina.engine.core import EngineCore
from lamina.types import QuotaPolicy, TierQuota
from lamina.wiring.valkey import EmbeddedValkey
from lamina_kvtier.redis_tier import RedisTier

BLOCK, STORED = 16, 4096 + 192  # tokens; bytes of a stored block of the tiny model
SMALL: dict[str, Any] = {"num_blocks": 14, "max_batch_tokens": 64, "host_kv_bytes": 8 * 4096}


@pytest.fixture
def server(redis_binary: Path) -> Iterator[EmbeddedValkey]:
    with running_redis(redis_binary) as running:
        yield running


def engine(folder: Path, server: EmbeddedValkey) -> EngineCore:
    core = tiny_core(folder, kv_store_url=str(server.address), **SMALL)
    few = QuotaPolicy(namespace="flood", store=TierQuota(limit=20 * STORED))
    core.commons.set_quotas([few, QuotaPolicy(namespace="calm", store=TierQuota(reserved=12 * STORED))])
    return core


def say(core: EngineCore, seed: int, tenant: str) -> list[int]:
    """A prompt of five blocks, of one's own."""
    tokens = random.Random(f"{tenant} {seed}").choices(range(3, 211), k=BLOCK * 5)
    said, _ = drive(core, [request("r", [*tokens, 5], tenant=tenant, max_tokens=3)])
    return said["r", 0]


def usage(core: EngineCore) -> dict[str, int]:
    """Blocks in the store by namespace, once all that is on its way has arrived."""
    end = time.monotonic() + 20
    below = core._tiers.below
    assert below is not None
    assert isinstance(below.store, RedisTier)
    before = -1
    while before != (now := sum(below.store.usage().puts.values())):
        assert time.monotonic() < end
        before = now
        for _ in range(5):
            core.step()
            time.sleep(0.01)
    assert below.store.settle(20)
    return {name: taken // STORED for name, taken in below.store.usage().by_namespace.items()}


def test_who_floods_the_store_loses_its_own_blocks(tmp_path: Path, server: EmbeddedValkey) -> None:
    """A calm tenant's prefixes are found by the next engine, however much another one stored since."""
    plain = tiny_core(tmp_path, prefix_caching=False)
    expected = [say(plain, 0, "calm"), say(plain, 1, "calm")]
    first = engine(tmp_path, server)
    assert [say(first, 0, "calm"), say(first, 1, "calm")] == expected
    for seed in range(12):
        say(first, seed, "flood")
    kept = usage(first)
    assert kept["calm"] >= 8
    assert 0 < kept["flood"] <= 20
    report = first.commons.report()
    assert report.store is not None
    first.close()
    second = engine(tmp_path, server)
    assert [say(second, 0, "calm"), say(second, 1, "calm")] == expected
    assert second.stats().loaded_blocks >= 8
    assert second.stats().failed_blocks == 0
    second.close()
