"""Which store an address means. Stores connect when there is something to do, so none has to be there."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from lamina.config import EngineConfig
from lamina.errors import ConfigurationInvalid
from lamina.wiring.block_store import open_store
from lamina_kvtier.identity import Layout

LAYOUT = Layout(layers=2, kv_heads=1, head_dim=8, dtype="float32", block_size=16, rope="none")


def config(**changed: Any) -> EngineConfig:
    return EngineConfig(model=Path("m"), adapters=Path("adapters"), **changed)


def test_a_redis_address_is_a_redis_tier() -> None:
    store = open_store(config(kv_store_url="redis://localhost"), 2048, LAYOUT)
    assert store.name == "redis"
    store.close()


@pytest.mark.skipif(importlib.util.find_spec("lmcache") is not None, reason="lmcache is installed")
def test_without_lmcache_the_message_says_what_to_install() -> None:
    with pytest.raises(ConfigurationInvalid, match=r"pip install 'lamina\[lmcache\]'") as refused:
        open_store(config(kv_store_url="lmcache+redis://localhost"), 2048, LAYOUT)
    assert refused.value.param == "kv_store_url"


def test_lmcache_keeps_raw_blocks_only() -> None:
    wanted = config(kv_store_url="lmcache+redis://localhost", kv_store_codec="zstd")
    with pytest.raises(ConfigurationInvalid, match="raw") as refused:
        open_store(wanted, 2048, LAYOUT)
    assert refused.value.param == "kv_store_codec"


def test_what_follows_the_prefix_is_an_address_like_any_other() -> None:
    with pytest.raises(ConfigurationInvalid, match=r"redis://, rediss:// or unix://"):
        open_store(config(kv_store_url="lmcache+http://localhost"), 2048, LAYOUT)
