"""What each tenant has in the tiers and how its prompts fare, by tenant id where the engine knows namespaces only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from lamina.engine.protocol import EngineClient
from lamina.types import CommonsReport, TenantBlocks, TenantPrefixes

__all__ = ["NOBODY", "Shares", "tenants_shares"]

Row = TypeVar("Row", TenantBlocks, TenantPrefixes)

NOBODY = "unknown"  # whose tenant is deleted, or not of this database
_SUMS = ("active", "cached", "pinned", "pending", "pin_hits", "host_bytes", "host_pinned_bytes", "host_pending_bytes")


@dataclass(frozen=True, slots=True)
class Shares:
    """`namespace` holds a tenant's id in all of them: a namespace is a secret's child, and no label."""

    report: CommonsReport
    blocks: tuple[TenantBlocks, ...]
    prefixes: tuple[TenantPrefixes, ...]


class Names(Protocol):
    async def tenants_of(self, namespaces: frozenset[str]) -> dict[str, str]: ...


async def tenants_shares(engine: EngineClient, quotas: Names) -> Shares:
    """Raises EngineUnavailable, DatabaseUnavailable."""
    report, prefixes = await engine.commons(), await engine.prefixes()
    namespaces = {share.namespace for share in report.tenants} | {found.namespace for found in prefixes.tenants}
    names = await quotas.tenants_of(frozenset(namespaces))
    return Shares(
        report,
        _by_tenant(report.tenants, names, _blocks_of_all),
        _by_tenant(prefixes.tenants, names, _prefixes_of_all),
    )


def _by_tenant(
    rows: Iterable[Row], names: Mapping[str, str], together: Callable[[Sequence[Row]], Row]
) -> tuple[Row, ...]:
    """The rows under their tenants' ids; those of namespaces without a name are one row, the last."""
    known: list[Row] = []
    strays: list[Row] = []
    for row in rows:
        if row.namespace in names:
            known.append(replace(row, namespace=names[row.namespace]))
        else:
            strays.append(row)
    if strays:
        known.append(together(strays))
    return tuple(known)


def _blocks_of_all(shares: Sequence[TenantBlocks]) -> TenantBlocks:
    evictions, below = Counter[str](), Counter[str]()
    for share in shares:
        evictions.update(dict(share.evictions))
        below.update(dict(share.host_evictions))
    stored = [share.store_bytes for share in shares if share.store_bytes is not None]
    return TenantBlocks(
        namespace=NOBODY,
        **{name: sum(getattr(share, name) for share in shares) for name in _SUMS},
        evictions=tuple(sorted(evictions.items())),
        host_evictions=tuple(sorted(below.items())),
        store_bytes=sum(stored) if stored else None,
    )


def _prefixes_of_all(tenants: Sequence[TenantPrefixes]) -> TenantPrefixes:
    hits = Counter[str]()
    misses, declined = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    ghosts, lost = Counter[tuple[str, int]](), Counter[str]()
    for found in tenants:
        lost.update(dict(found.store_evictions))
        hits.update(dict(found.hits))
        misses.update({(tier, reason): count for tier, reason, count in found.misses})
        declined.update({(tier, reason): count for tier, reason, count in found.declined})
        ghosts.update({(tier, extra): count for tier, extra, count in found.ghost_hits})
    return TenantPrefixes(
        namespace=NOBODY,
        hits=tuple(sorted(hits.items())),
        misses=tuple((tier, reason, count) for (tier, reason), count in sorted(misses.items())),
        ghost_hits=tuple((tier, extra, count) for (tier, extra), count in sorted(ghosts.items())),
        declined=tuple((tier, reason, count) for (tier, reason), count in sorted(declined.items())),
        store_evictions=tuple(sorted(lost.items())),
    )
