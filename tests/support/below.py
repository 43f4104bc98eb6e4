"""What engines of one test have below their device pool."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from lamina.config import EngineConfig
from lamina.engine.fingerprint import fingerprint_of
from lamina.engine.host_commons import HostCommons
from lamina.engine.pool import BlockPool
from lamina.engine.store_memory import StoreMemory
from lamina.engine.tier_rates import Rates
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

    def __init__(
        self, *, host: int = 64, store: MemoryStore | None = None, seed: int | None = None, shared: bool = False
    ) -> None:
        """host: blocks. seed: of the store's faults; None: it works. shared: host memory has quotas and pins."""
        self.shared = shared
        self.host, self.store, self.seed, self.run = host, store, seed, at_once
        self.made: list[KvTiers] = []
        self.rates: Rates | None = None  # how fast engines think that they are; None: as they measure it
        self.clock: Callable[[], float] = time.monotonic
        self.drain_s = 0.0
        self.sleep: Callable[[float], object] = time.sleep
        self.memory: StoreMemory | None = None  # of what is in the store; None: one that forgets nothing

    def __call__(self, config: EngineConfig, pool: BlockPool, kv: KvManager, layout: Layout) -> KvTiers:
        arena = HostBlocks(self.host, pool.block_bytes, pin=False)
        seal = fingerprint_of(arena)
        commons = HostCommons.of_slots(kv, self.host, pool.block_bytes, seal=seal) if self.shared else None
        tiers = KvTiers(
            kv,
            self.host_tier(arena) if commons is None else commons.tier,
            arena,
            self.mover(pool, arena),
            self.store_tier(BlockCodec(layout_digest(layout), pool.block_bytes)),
            rates=self.rates,
            clock=self.clock,
            low_water=pool.num_blocks // 2,
            commons_of_host=commons,
            memory=self.memory,
            drain_s=self.drain_s,
            sleep=self.sleep,
        )
        self.made.append(tiers)
        return tiers

    def host_tier(self, arena: HostBlocks) -> HostTier:
        return HostTier(self.host, arena.block_bytes, seal=fingerprint_of(arena))

    def mover(self, pool: BlockPool, arena: HostBlocks) -> BlockMover:
        return BlockMover(pool.data, arena, costs=COSTS, kernels=plain_kernels)

    def store_tier(self, codec: BlockCodec) -> StoreTier | None:
        if self.store is None:
            return None
        tier = MemoryTier(self.store, codec, run=self.run)
        return tier if self.seed is None else FaultTier(tier, FAULTS, seed=self.seed)
