"""The counts of an engine, as it reports them: by request, by block and by adapter."""

from __future__ import annotations

from collections import Counter

from lamina.engine.adapters import AdapterLoads
from lamina.engine.scheduler import Scheduler
from lamina.engine.tier_protocol import Tiers
from lamina.types import AdapterRunning, EngineStats

__all__ = ["core_stats"]


def core_stats(
    scheduler: Scheduler, tiers: Tiers, adapters: AdapterLoads, counts: Counter[str], step_seconds: float
) -> EngineStats:
    """`counts`: steps, prompt_tokens, generation_tokens, finished, cancelled."""
    usage, below = scheduler.kv.usage(), tiers.stats()
    return EngineStats(
        running=len(scheduler.running),
        waiting=len(scheduler.queue),
        blocks_total=usage.total,
        blocks_free=usage.free,
        blocks_active=usage.active,
        blocks_cached=usage.cached,
        prefix_hit_tokens=scheduler.prefix_hit_tokens,
        preemptions=scheduler.preemptions,
        step_seconds=step_seconds,
        adapters=_by_adapter(scheduler, tiers, adapters),
        steps=counts["steps"],
        prompt_tokens=counts["prompt_tokens"],
        generation_tokens=counts["generation_tokens"],
        finished=counts["finished"],
        cancelled=counts["cancelled"],
        host_blocks_total=below.host_total,
        host_blocks_used=below.host_used,
        spilled_blocks=below.spilled,
        promoted_blocks=below.promoted,
        stored_blocks=below.stored,
        loaded_blocks=below.loaded,
        declined_blocks=below.declined,
        failed_blocks=below.failed,
    )


def _by_adapter(scheduler: Scheduler, tiers: Tiers, adapters: AdapterLoads) -> tuple[AdapterRunning, ...]:
    running = Counter(choice.request.request.adapter for choice in scheduler.running)
    waiting = Counter(choice.request.request.adapter for choice in scheduler.queue)
    loaded, blocks = set(adapters.loaded()), _blocks_by_adapter(scheduler, tiers)
    digests = sorted(loaded | blocks.keys() | {digest for digest in [*running, *waiting] if digest is not None})
    return tuple(AdapterRunning(d, running[d], waiting[d], d in loaded, blocks[d]) for d in digests)


def _blocks_by_adapter(scheduler: Scheduler, tiers: Tiers) -> Counter[str]:
    found = Counter({adapter.hex(): count for adapter, count in scheduler.kv.blocks_by_adapter().items()})
    if tiers.below is not None:
        found.update({adapter.hex(): count for adapter, count in tiers.below.host.slots_by_adapter().items()})
    return found
