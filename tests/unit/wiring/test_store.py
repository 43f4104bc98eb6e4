"""The embedded store's size: what the configuration says, and what quotas may then give out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fixtures.redis import redis_servers
from lamina.config import EngineConfig
from lamina.wiring.block_store import open_store
from lamina.wiring.store import EMBEDDED, embedded_store
from lamina_kvtier.errors import QuotaNotCoverable
from lamina_kvtier.identity import Layout
from lamina_kvtier.quota import Quota

LAYOUT = Layout(layers=2, kv_heads=1, head_dim=8, dtype="float32", block_size=16, rope="none")


def config(**values: Any) -> EngineConfig:
    return EngineConfig(model=Path("m"), adapters=Path("a"), **values)


def test_another_store_is_left_alone() -> None:
    wanted = config(kv_store_url="redis://localhost", kv_store_bytes=2**26)
    with embedded_store(wanted) as engine:
        assert engine is wanted


@pytest.mark.skipif("valkey" not in redis_servers(), reason="no embedded Valkey here")
def test_the_embedded_store_is_as_large_as_it_is_told_and_its_quotas_fit_in() -> None:
    """A sixteenth at least is kept back for the server itself."""
    with embedded_store(config(kv_store_url=EMBEDDED, kv_store_bytes=64 * 2**20)) as engine:
        assert not engine.kv_store_drain_s, "whatever is saved at the end ends as well"
        store = open_store(engine, 65536, LAYOUT)
        try:
            store.set_quotas({"ann": Quota(20 * 2**20, 2**40)})
            with pytest.raises(QuotaNotCoverable) as refused:
                store.set_quotas({"ann": Quota(64 * 2**20, 2**40)})
            assert 20 * 2**20 < refused.value.limit < 60 * 2**20
        finally:
            store.close()
