"""The store below host memory, by its address."""

from __future__ import annotations

from lamina.config import EngineConfig
from lamina.errors import ConfigurationInvalid
from lamina.wiring.cores import store_lanes
from lamina_kvtier.block_codec import BlockCodec, layout_digest
from lamina_kvtier.identity import Layout
from lamina_kvtier.lmcache_wire import LmcacheNames
from lamina_kvtier.payload_codecs import codecs_for
from lamina_kvtier.redis_plane import InvalidAddress, PlaneConfig, RedisAddress
from lamina_kvtier.redis_tier import RedisTier, RedisTierConfig
from lamina_kvtier.tier import StoreTier

__all__ = ["open_store"]

_LMCACHE = "lmcache+"  # before a Redis address: what is kept there, and how, is LMCache's way


def open_store(config: EngineConfig, block_bytes: int, layout: Layout) -> StoreTier:
    """By `kv_store_url`; connects when there is something to do. Raises ConfigurationInvalid."""
    if config.kv_store_url.startswith(_LMCACHE):
        return _lmcache(config, block_bytes, layout)
    codec = _codec(config.kv_store_codec, block_bytes, layout)
    try:
        plane = PlaneConfig(lanes=store_lanes())
        rules = RedisTierConfig(ttl_s=config.kv_store_ttl_s, server_bytes=config.kv_store_bytes, plane=plane)
        return RedisTier(RedisAddress.parse(config.kv_store_url), codec, rules)
    except InvalidAddress as error:
        raise ConfigurationInvalid(str(error), param="kv_store_url") from error


def _lmcache(config: EngineConfig, block_bytes: int, layout: Layout) -> StoreTier:
    """LMCache is imported here and nowhere else: it takes seconds, and is not part of a plain installation."""
    if config.kv_store_codec != "raw":
        raise ConfigurationInvalid("LMCache keeps blocks raw: kv_store_codec must be 'raw'.", param="kv_store_codec")
    try:
        address = RedisAddress.parse(config.kv_store_url.removeprefix(_LMCACHE))
        from lamina_kvtier.lmcache_tier import LmcacheTier, LmcacheTierConfig

        names = LmcacheNames.of_layout(layout_digest(layout))
        rules = LmcacheTierConfig(ttl_s=config.kv_store_ttl_s, plane=PlaneConfig(lanes=store_lanes()))
        return LmcacheTier(address, names, block_bytes, rules)
    except (InvalidAddress, ImportError) as error:
        raise ConfigurationInvalid(f"{error}", param="kv_store_url") from error


def _codec(name: str, block_bytes: int, layout: Layout) -> BlockCodec:
    codecs = codecs_for(layout)
    if name not in codecs:
        raise ConfigurationInvalid(
            f"kv_store_codec is {name!r}, but what can be written here is {', '.join(sorted(codecs))}. "
            "For zstd, install 'lamina[zstd]'.",
            param="kv_store_codec",
        )
    return BlockCodec(layout_digest(layout, name), block_bytes, codec=name, codecs=codecs)
