"""What engines of one test have below their device pool."""

from __future__ import annotations

import torch

from lamina.config import EngineConfig
from lamina.engine.pool import BlockPool
from lamina.engine.tiers import KvTiers
from lamina_kernels.gpu.block_mover import BlockMover, HostBlocks, calibrate
from lamina_kernels.oracles import blocks as plain_kernels
from lamina_kvtier.block_codec import BlockCodec, layout_digest
from lamina_kvtier.fault_tier import Faults, FaultTier
from lamina_kvtier.host_tier import HostTier
from lamina_kvtier.identity import Layout
from lamina_kvtier.manager import KvManager
from lamina_kvtier.memory_tier import MemoryStore, MemoryTier, at_once
from lamina_kvtier.tier import StoreTier

__all__ = ["Below"]

FAULTS = Faults(
    vanished=0.1, truncated=0.1, flipped=0.1, wrong_layout=0.1, disconnected=0.2, slow=0.3, slow_s=0.02, deadline_s=0.01
)
COSTS = calibrate(torch.device("cpu"), plain_kernels, budget_seconds=0.01)


class Below:
    """Host memory of each engine, and one store for all: pass it as `tiers` of `tiny_core`."""

    def __init__(self, *, host: int = 64, store: MemoryStore | None = None, seed: int | None = None) -> None:
        """host: blocks. seed: of the store's faults; None: it works."""
        self.host, self.store, self.seed, self.run = host, store, seed, at_once
        self.made: list[KvTiers] = []

    def __call__(self, config: EngineConfig, pool: BlockPool, kv: KvManager, layout: Layout) -> KvTiers:
        arena = HostBlocks(self.host, pool.block_bytes, pin=False)
        tiers = KvTiers(
            kv,
            self.host_tier(pool.block_bytes),
            arena,
            self.mover(pool, arena),
            self.store_tier(BlockCodec(layout_digest(layout), pool.block_bytes)),
            low_water=pool.num_blocks // 2,
        )
        self.made.append(tiers)
        return tiers

    def host_tier(self, block_bytes: int) -> HostTier:
        return HostTier(self.host, block_bytes)

    def mover(self, pool: BlockPool, arena: HostBlocks) -> BlockMover:
        return BlockMover(pool.data, arena, costs=COSTS, kernels=plain_kernels)

    def store_tier(self, codec: BlockCodec) -> StoreTier | None:
        if self.store is None:
            return None
        tier = MemoryTier(self.store, codec, run=self.run)
        return tier if self.seed is None else FaultTier(tier, FAULTS, seed=self.seed)
