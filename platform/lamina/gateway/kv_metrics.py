"""The metrics of tenants' KV blocks: what they have in each tier, what they lost, how their prompts fared.

Tenants are those of the database, all others together are one; tiers and reasons are enumerations.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from lamina.gateway.shares import Shares
from lamina.types import TenantBlocks, TenantPrefixes

__all__ = ["kv_metrics"]


def kv_metrics(shares: Shares, block_bytes: int) -> Iterator[Metric]:
    """`block_bytes`: of one block of the pool."""
    yield from _blocks(shares.blocks)
    yield _bytes(shares.blocks, block_bytes)
    yield _evicted(shares.blocks, shares.prefixes)
    yield from _prefixes(shares.prefixes)


def _blocks(tenants: Sequence[TenantBlocks]) -> Iterator[Metric]:
    blocks = GaugeMetricFamily("lamina_kv_tenant_blocks", "Blocks of the pool by tenant.", labels=["tenant", "state"])
    hits = CounterMetricFamily("lamina_kv_pin_hits", "Requests that found a pinned prefix.", labels=["tenant"])
    for share in tenants:
        for state in ("active", "cached", "pinned", "pending"):
            blocks.add_metric([share.namespace, state], getattr(share, state))
        hits.add_metric([share.namespace], share.pin_hits)
    yield blocks
    yield hits


def _bytes(tenants: Sequence[TenantBlocks], block_bytes: int) -> Metric:
    found = GaugeMetricFamily(
        "lamina_kv_tenant_bytes", "What a tenant has in each tier.", labels=["tenant", "tier", "state"]
    )
    for share in tenants:
        states = {
            ("gpu", "active"): share.active * block_bytes,
            ("gpu", "cached"): share.cached * block_bytes,
            ("gpu", "pinned"): share.pinned * block_bytes,
            ("gpu", "pending"): share.pending * block_bytes,
            ("host", "cached"): share.host_bytes - share.host_pinned_bytes - share.host_pending_bytes,
            ("host", "pinned"): share.host_pinned_bytes,
            ("host", "pending"): share.host_pending_bytes,
        }
        if share.store_bytes is not None:
            states["store", "cached"] = share.store_bytes
        for (tier, state), count in states.items():
            found.add_metric([share.namespace, tier, state], count)
    return found


def _evicted(tenants: Sequence[TenantBlocks], prefixes: Sequence[TenantPrefixes]) -> Metric:
    evicted = CounterMetricFamily(
        "lamina_kv_evicted_blocks",
        "Cached blocks lost, by owner, tier and reason.",
        labels=["tenant", "tier", "reason"],
    )
    for share in tenants:
        for tier, evictions in (("gpu", share.evictions), ("host", share.host_evictions)):
            for reason, count in evictions:
                evicted.add_metric([share.namespace, tier, reason], count)
    for found in prefixes:
        for reason, count in found.store_evictions:
            evicted.add_metric([found.namespace, "store", reason], count)
    return evicted


def _prefixes(tenants: Sequence[TenantPrefixes]) -> Iterable[Metric]:
    blocks = CounterMetricFamily(
        "lamina_kv_prefix_blocks", "Full blocks of prompts: found, by tier, or missed.", labels=["tenant", "result"]
    )
    missed = CounterMetricFamily(
        "lamina_kv_missed_blocks",
        "Missed blocks by the tier that lost them last and why; tier none: nobody had them.",
        labels=["tenant", "tier", "reason"],
    )
    declined = CounterMetricFamily(
        "lamina_kv_declined_blocks",
        "Blocks that a tier did not take, or that were not brought up.",
        labels=["tenant", "tier", "reason"],
    )
    ghosts = CounterMetricFamily(
        "lamina_kv_ghost_hits",
        "Missed blocks that would have been found if the tier had so much more room; add up the smaller steps.",
        labels=["tenant", "tier", "extra_bytes"],
    )
    for found in tenants:
        tenant, hits = found.namespace, dict(found.hits)
        for tier in ("gpu", "host", "store"):
            blocks.add_metric([tenant, f"hit_{tier}"], hits.get(tier, 0))
        blocks.add_metric([tenant, "miss"], sum(count for *_, count in found.misses))
        for family, counts in ((missed, found.misses), (declined, found.declined)):
            for tier, reason, count in counts:
                family.add_metric([tenant, tier, reason], count)
        for tier, extra, count in found.ghost_hits:
            ghosts.add_metric([tenant, tier, str(extra)], count)
    return (blocks, missed, declined, ghosts)
