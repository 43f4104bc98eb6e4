"""Engines that are closed one after the other over a real server: the next one finds what the last one had."""

from __future__ import annotations

import logging
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from fixtures.engines import drive, request, tiny_core
from lamina.engine.core import EngineCore
from lamina.types import QuotaPolicy, TierQuota
from lamina.wiring.valkey import EmbeddedValkey

STORED = 4096 + 192  # bytes of a stored block of the tiny model
TENANTS = ("a", "b", "c")


def engine(folder: Path, server: EmbeddedValkey, **options: Any) -> EngineCore:
    return tiny_core(folder, kv_store_url=str(server.address), **({"num_blocks": 60} | options))


def ask(core: EngineCore, tenant: str) -> int:
    """How many of four blocks were found."""
    before, tokens = core.stats().prefix_hit_tokens, [3 + at % 200 for at in range(64)]
    drive(core, [request("r", [*tokens, 5, 9], tenant=tenant, max_tokens=4)])
    return (core.stats().prefix_hit_tokens - before) // 16


def said(caplog: pytest.LogCaptureFixture) -> str:
    [record] = [record for record in caplog.records if record.name == "lamina.engine.tier_drain"]
    return record.getMessage()


@pytest.mark.parametrize("quotas", [True, False], ids=["quotas", "no quotas"])
@pytest.mark.parametrize("host", [0, 40], ids=["store alone", "host memory"])
def test_the_next_engine_finds_what_only_the_device_had(
    tmp_path: Path, redis_server: EmbeddedValkey, quotas: bool, host: int
) -> None:
    policies = [QuotaPolicy(namespace="a", store=TierQuota(reserved=8 * STORED))]
    first = engine(tmp_path, redis_server, host_kv_bytes=host * 4096)
    if quotas:
        first.commons.set_quotas(policies)
    assert [ask(first, tenant) for tenant in TENANTS] == [0, 0, 0]
    assert first.stats().stored_blocks == 0
    first.close()
    second = engine(tmp_path, redis_server, host_kv_bytes=host * 4096)
    if quotas:
        second.commons.set_quotas(policies)
    assert [ask(second, tenant) for tenant in TENANTS] == [4, 4, 4]
    assert second.stats().loaded_blocks == 12
    second.check_integrity()
    second.close()


def test_without_time_for_it_the_next_engine_finds_nothing(tmp_path: Path, redis_server: EmbeddedValkey) -> None:
    first = engine(tmp_path, redis_server, kv_store_drain_s=0.0)
    ask(first, "a")
    first.close()
    second = engine(tmp_path, redis_server)
    assert ask(second, "a") == 0
    second.close()


def test_a_server_that_hangs_is_waited_for_no_longer(
    tmp_path: Path, redis_server: EmbeddedValkey, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    core = engine(tmp_path, redis_server, kv_store_drain_s=0.3)
    ask(core, "a")
    assert redis_server.pid is not None
    os.kill(redis_server.pid, signal.SIGSTOP)
    core.close()
    os.kill(redis_server.pid, signal.SIGCONT)
    assert said(caplog).endswith("4 are left: the time was up")


def test_a_server_that_is_gone_is_not_waited_for(
    tmp_path: Path, redis_server: EmbeddedValkey, caplog: pytest.LogCaptureFixture
) -> None:
    """An hour would be a long time to hang."""
    caplog.set_level(logging.INFO)
    core = engine(tmp_path, redis_server, kv_store_drain_s=3600.0)
    ask(core, "a")
    redis_server.stop()
    core.close()
    assert said(caplog).endswith("4 are left: the store failed")
