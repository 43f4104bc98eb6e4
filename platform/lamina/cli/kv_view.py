"""What `lamina kv` shows: rows of numbers out of a server's answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lamina.cli.sizes import size

if TYPE_CHECKING:
    from lamina.tenancy.records import QuotaRecord

__all__ = ["REASONS", "Overview", "block_line", "hit_rates", "percent"]

# What a miss means, for people. The keys are `lamina_kvtier.reasons.Reason`, as docs/kv.md has them with remedies.
REASONS = {
    "never_stored": "nobody computed it here, or so long ago that it is forgotten",
    "own_quota": "the tenant was at its own limit",
    "pressure": "the tier was full",
    "ttl": "its time in the tier was up",
    "remote_down": "the store was away or too slow",
    "integrity": "it was there and did not pass verification",
    "recompute_cheaper": "computing it was faster than fetching it",
    "deleted": "somebody asked for that",
}
_TIER_COLUMNS = ("TENANT", "TIER", "USED", "CACHED", "PINNED", "PENDING", "RESERVED", "LIMIT")
_FATE_COLUMNS = ("TENANT", "BLOCKS", "HIT", "GPU", "HOST", "STORE", "MISSES BY TIER AND REASON")
_MOST_REASONS = 3


def percent(part: float, whole: float) -> str:
    return "-" if not whole else f"{part / whole:.1%}"


@dataclass(frozen=True, slots=True)
class Overview:
    """A server's answer to /operator/kv, with what the database knows of the tenants."""

    found: Mapping[str, Any]
    quotas: Sequence[QuotaRecord]

    def headline(self) -> str:
        pool, unit = self.found["pool"], self.found["block_bytes"]
        below = [
            f"{name} {size(tier['capacity'])}"
            for name in ("host", "store")
            if (tier := self.found["commons"].get(name)) is not None
        ]
        tiers = ", ".join([f"gpu {size(pool['total'] * unit)}", *below])
        return (
            f"{tiers}. Pool: {pool['total']} blocks of {self.found['block_tokens']} tokens, {pool['active']} active, "
            f"{pool['cached']} cached, {pool['free']} free."
        )

    def tiers(self) -> tuple[Sequence[str], list[tuple[str, ...]]]:
        """A row for each tenant and tier that it has something in, or is promised something of."""
        shares = {share["tenant"]: share for share in self.found["tenants"]}
        quotas = {quota.tenant_id: quota for quota in self.quotas}
        ids = sorted({*shares, *quotas}, key=self._name)
        return _TIER_COLUMNS, [row for each in ids for row in self._tier_rows(each, shares.get(each), quotas.get(each))]

    def fates(self) -> tuple[Sequence[str], list[tuple[str, ...]]]:
        """A row for each tenant whose prompts had full blocks."""
        rows = [self._fate_row(found) for found in self.found["prefixes"]]
        return _FATE_COLUMNS, sorted(row for row in rows if row[1] != "0")

    def _name(self, tenant: str) -> str:
        names = {quota.tenant_id: quota.tenant_name for quota in self.quotas}
        return names.get(tenant, tenant)

    def _tier_rows(
        self, tenant: str, share: Mapping[str, Any] | None, quota: QuotaRecord | None
    ) -> Iterator[tuple[str, ...]]:
        have, unit, name = Counter[str](), self.found["block_bytes"], self._name(tenant)
        stored = None
        if share is not None:
            have.update({key: value for key, value in share.items() if isinstance(value, int)})
            stored = share["store_bytes"]
        used = (have["active"] + have["cached"] + have["pinned"]) * unit
        blocks = (have[state] * unit for state in ("cached", "pinned", "pending"))
        reserved, limit = (quota.reserved_blocks, quota.limit_blocks) if quota else (0, None)
        yield (name, "gpu", size(used), *map(size, blocks), size(reserved * unit), _limit(limit, unit))
        pinned, pending = have["host_pinned_bytes"], have["host_pending_bytes"]
        reserved, limit = (quota.host_reserved_bytes, quota.host_limit_bytes) if quota else (0, None)
        if have["host_bytes"] or reserved or limit is not None:
            states = (have["host_bytes"], have["host_bytes"] - pinned - pending, pinned, pending)
            yield (name, "host", *map(size, states), size(reserved), _limit(limit, 1))
        reserved, limit = (quota.store_reserved_bytes, quota.store_limit_bytes) if quota else (0, None)
        if stored or reserved or limit is not None:
            yield (name, "store", size(stored or 0), size(stored or 0), "-", "-", size(reserved), _limit(limit, 1))

    def _fate_row(self, found: Mapping[str, Any]) -> tuple[str, ...]:
        hits = Counter(dict(found["hits"]))
        missed = sum(count for *_, count in found["misses"])
        total = hits.total() + missed
        why = sorted(found["misses"], key=lambda miss: -miss[2])
        told = ", ".join(f"{tier} {reason} {percent(count, missed)}" for tier, reason, count in why[:_MOST_REASONS])
        rates = [percent(hits[tier], total) for tier in ("gpu", "host", "store")]
        return (self._name(found["tenant"]), str(total), percent(hits.total(), total), *rates, told or "-")


def _limit(limit: int | None, unit: int) -> str:
    return "-" if limit is None else size(limit * unit)


def block_line(run: Mapping[str, Any], block_tokens: int) -> tuple[str, str, str, str]:
    """Blocks, tokens, where they are, and by what they are kept or why they are missing."""
    first, last = run["first"], run["first"] + run["blocks"] - 1
    blocks = str(first) if first == last else f"{first}-{last}"
    tokens = f"{first * block_tokens}-{(last + 1) * block_tokens - 1}"
    if run["tiers"]:
        pins = ", ".join(run["pins"])
        return blocks, tokens, " ".join(run["tiers"]), f"pinned by {pins}" if pins else ""
    nobody = run["lost_by"] == "none"
    room = "".join(f"; {tier} would have it with {size(extra)} more" for tier, extra in run["room"])
    cause = REASONS[run["reason"]] + ("" if nobody else f" ({run['lost_by']}: {run['reason']})") + room
    pins = f"; pinned by {', '.join(run['pins'])} once it is computed" if run["pins"] else ""
    return blocks, tokens, "missing", cause + pins


def hit_rates(found: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    """The hit rate of the tenant's prompts so far: now, and with more room in each tier."""
    prefixes = found["prefixes"]
    hits = sum(count for _, count in prefixes["hits"])
    total = hits + sum(count for *_, count in prefixes["misses"])
    yield "now", percent(hits, total)
    for tier, extra in found["rooms"]:
        spared = sum(count for other, needed, count in prefixes["ghost_hits"] if other == tier and needed <= extra)
        yield f"{tier} +{size(extra)}", percent(hits + spared, total)
