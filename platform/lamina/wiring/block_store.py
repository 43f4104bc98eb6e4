"""The store below host memory, by its address."""

from __future__ import annotations

from lamina.config import EngineConfig
from lamina.errors import ConfigurationInvalid
from lamina_kvtier.block_codec import BlockCodec, layout_digest
from lamina_kvtier.identity import Layout
from lamina_kvtier.payload_codecs import codecs_for
from lamina_kvtier.redis_plane import InvalidAddress, RedisAddress
from lamina_kvtier.redis_tier import RedisTier, RedisTierConfig
from lamina_kvtier.tier import StoreTier

__all__ = ["open_store"]


def open_store(config: EngineConfig, block_bytes: int, layout: Layout) -> StoreTier:
    """By `kv_store_url`; connects when there is something to do. Raises ConfigurationInvalid."""
    codec = _codec(config.kv_store_codec, block_bytes, layout)
    try:
        return RedisTier(RedisAddress.parse(config.kv_store_url), codec, RedisTierConfig(ttl_s=config.kv_store_ttl_s))
    except InvalidAddress as error:
        raise ConfigurationInvalid(str(error), param="kv_store_url") from error


def _codec(name: str, block_bytes: int, layout: Layout) -> BlockCodec:
    codecs = codecs_for(layout)
    if name not in codecs:
        raise ConfigurationInvalid(
            f"kv_store_codec is {name!r}, but what can be written here is {', '.join(sorted(codecs))}. "
            "For zstd, install 'lamina[zstd]'.",
            param="kv_store_codec",
        )
    return BlockCodec(layout_digest(layout, name), block_bytes, codec=name, codecs=codecs)
