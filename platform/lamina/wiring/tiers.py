"""What lies below the device's block pool: host memory and, if there is one, a Redis or Valkey store."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from lamina.config import EngineConfig
from lamina.engine.fingerprint import fingerprint_of
from lamina.engine.host_commons import HostCommons
from lamina.engine.pool import BlockPool
from lamina.engine.store_memory import StoreMemory
from lamina.engine.tier_protocol import NoTiers, Tiers
from lamina.engine.tiers import KvTiers
from lamina.errors import ConfigurationInvalid
from lamina.wiring.block_store import open_store
from lamina.wiring.memory_left import host_bytes
from lamina_kernels.gpu.block_mover import BlockKernels, BlockMover, HostBlocks, calibrate
from lamina_kernels.oracles import blocks as plain_kernels
from lamina_kvtier.host_tier import HostTier
from lamina_kvtier.identity import Layout
from lamina_kvtier.manager import KvManager

__all__ = ["MakeTiers", "build_tiers"]

MakeTiers = Callable[[EngineConfig, BlockPool, KvManager, Layout], Tiers]
_REMEMBERED = 1 << 17  # blocks of the store
_STAGING_BYTES = 64 << 20  # host memory that a store works through if host memory is no tier of its own


def build_tiers(config: EngineConfig, pool: BlockPool, kv: KvManager, layout: Layout) -> Tiers:
    """By `host_kv_bytes` and `kv_store_url`; neither: the device pool alone. Measures copies on a GPU (half a second).

    Raises ConfigurationInvalid for an address that is none, for more memory than is left, and for a tier without
    prefix caching.
    """
    if not config.host_kv_bytes and not config.kv_store_url:
        return NoTiers()
    config = replace(config, host_kv_bytes=host_bytes(config.host_kv_bytes))
    if not config.prefix_caching:
        raise ConfigurationInvalid("KV tiers hold prefixes: they need prefix_caching.", param="prefix_caching")
    store = open_store(config, pool.block_bytes, layout) if config.kv_store_url else None
    wanted = max(config.host_kv_bytes, _STAGING_BYTES if store is not None else 0)
    slots = wanted // pool.block_bytes
    if slots < 1:
        raise ConfigurationInvalid(
            f"host_kv_bytes is {config.host_kv_bytes}, but one block has {pool.block_bytes}.", param="host_kv_bytes"
        )
    device = pool.data.device
    arena = HostBlocks(slots, pool.block_bytes, pin=device.type == "cuda")
    kernels = _kernels(device)
    mover = BlockMover(pool.data, arena, costs=calibrate(device, kernels), kernels=kernels)
    # What two steps can take at most: they must not evict what is not saved yet.
    low_water = min(2 * config.max_batch_tokens // config.block_size, pool.num_blocks)
    seal = fingerprint_of(arena)
    commons = HostCommons.of_slots(kv, slots, pool.block_bytes, seal=seal) if config.host_kv_bytes else None
    host = HostTier(slots, pool.block_bytes, seal=seal) if commons is None else commons.tier
    memory = StoreMemory(ttl_s=config.kv_store_ttl_s, max_blocks=max(_REMEMBERED, 2 * slots))
    return KvTiers(
        kv,
        host,
        arena,
        mover,
        store,
        low_water=low_water,
        commons_of_host=commons,
        memory=memory,
        drain_s=config.kv_store_drain_s,
    )


def _kernels(device: torch.device) -> BlockKernels:
    if device.type == "cuda":  # pragma: no cover - CUDA only
        from lamina_kernels.gpu import blocks

        return blocks
    return plain_kernels
