"""Each full block of a prompt was found in a tier, or it was missing for one reason: counted by namespace.

    first start                                 first token
    ├── found: gpu, or host and store if its fetch brought it up
    └── missing ── published by others meanwhile ──▶ found after all
                └─────────────────────────────────▶ a miss

The deepest tier that knows has the last word on a miss: what became of the fetch from the store, else what host memory
remembers of the block, else what the device pool remembers, else it was never stored. Blocks behind the first missing
one have reasons of their own.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from lamina.engine.prefix_lookup import NOWHERE, Miss, PrefixLookup
from lamina.engine.request import Choice, RequestState
from lamina.engine.store_memory import StoreMemory
from lamina.types import CachedTokens, PrefixReport, TenantPrefixes
from lamina_kvtier.ghosts import Ghost
from lamina_kvtier.host_tier import HostTier
from lamina_kvtier.identity import BlockId
from lamina_kvtier.manager import KvManager
from lamina_kvtier.reasons import Reason
from lamina_kvtier.tier import TierUsage

__all__ = ["Explainer"]

MAX_NAMESPACES = 4096
_GONE = ""  # the namespace of those that were folded
_ROOM_HELPS = frozenset({Reason.PRESSURE, Reason.OWN_QUOTA})


@dataclass(slots=True)
class _Tally:
    hits: Counter[str] = field(default_factory=Counter)  # by tier
    misses: Counter[tuple[str, str]] = field(default_factory=Counter)  # by tier and reason
    ghost_hits: Counter[tuple[str, int]] = field(default_factory=Counter)  # by tier and bytes of more room
    declined: Counter[tuple[str, str]] = field(default_factory=Counter)  # by tier and reason

    def add(self, other: _Tally) -> None:
        self.hits.update(other.hits)
        self.misses.update(other.misses)
        self.ghost_hits.update(other.ghost_hits)
        self.declined.update(other.declined)


@dataclass(slots=True)
class _Below:
    """What tiers below the device count themselves."""

    refused: Counter[tuple[str, str]] = field(default_factory=Counter)  # by tier and reason
    evicted: Counter[str] = field(default_factory=Counter)  # from the store, by reason


class Explainer:
    """Implements `provenance.Provenance`. Owned by the engine's thread.

    O(1) per block, and nothing is remembered of a request whose prompt was found. The least recently active of more
    than `max_namespaces` namespaces are folded into one that has no name.
    """

    def __init__(
        self,
        kv: KvManager,
        host: HostTier | None,
        *,
        block_bytes: int,
        store: StoreMemory | None = None,
        store_usage: Callable[[], TierUsage | None] = lambda: None,
        max_namespaces: int = MAX_NAMESPACES,
    ) -> None:
        """`host`: None without tiers below the device. `store`: what is known of a store, if there is one.

        `store_usage`: what the store itself has counted.
        """
        self._kv, self._host, self._block_bytes = kv, host, block_bytes
        self._store = StoreMemory() if store is None else store
        self._store_usage = store_usage
        self._max_namespaces = max_namespaces
        self._tallies: OrderedDict[str, _Tally] = OrderedDict()  # least recently active first

    # --- while a request starts ---------------------------------------------------------------------------

    def arrived(self, choice: Choice, origins: Mapping[BlockId, str], fates: Mapping[BlockId, Reason]) -> None:
        request = choice.request
        if request.cached_tokens is not None and request.lookup is None:
            return  # it comes back after a preemption: what it finds now are its own blocks
        lookup = request.lookup = request.lookup or PrefixLookup()
        lookup.origins |= origins
        lookup.fates |= fates
        for identity in lookup.missing.keys() & fates.keys():
            lookup.missing[identity] = self.explain(identity, fates[identity])
        declined = sum(reason is Reason.CHEAPER for reason in fates.values())
        if declined:
            self._tally(request).declined["store", Reason.CHEAPER.value] += declined

    def in_store(self) -> list[BlockId]:
        """Blocks that we know to have been in the store lately."""
        return self._store.known()

    def began(self, choice: Choice) -> None:
        """The choice starts for the first time; its table has the blocks that were found."""
        request, ids, found = choice.request, choice.known_ids(self._kv.block_size), len(choice.table)
        if not ids:
            request.lookup = None
            return
        self._found(request, ids[:found])
        if found == len(ids):
            request.lookup = None
            return
        lookup = request.lookup = request.lookup or PrefixLookup()
        lookup.missing = {identity: self.explain(identity, lookup.fates.get(identity)) for identity in ids[found:]}

    def taken(self, choice: Choice, ids: Sequence[BlockId]) -> None:
        """The choice, prefilling, took these blocks instead of computing them: others had published them."""
        lookup = choice.request.lookup
        wanted = [] if lookup is None else [identity for identity in ids if identity in lookup.missing]
        if lookup is not None and wanted:
            for identity in wanted:
                del lookup.missing[identity]
            self._found(choice.request, wanted)

    def settle(self, request: RequestState) -> None:
        """Its prompt is computed, or never will be: what is still missing is a miss. Once; later calls do nothing."""
        lookup, request.lookup = request.lookup, None
        if lookup is None or not lookup.missing:
            return
        tally = self._tally(request)
        for miss in lookup.missing.values():
            tally.misses[miss.tier, miss.reason.value] += 1
            tally.ghost_hits.update(miss.room)

    def _found(self, request: RequestState, ids: Sequence[BlockId]) -> None:
        if not ids:
            return
        origins = {} if request.lookup is None else request.lookup.origins
        tiers = Counter(origins.get(identity, "gpu") for identity in ids) if origins else Counter(gpu=len(ids))
        self._tally(request).hits.update(tiers)
        size, before = self._kv.block_size, request.cached_by_tier
        request.cached_by_tier = CachedTokens(
            before.gpu + tiers["gpu"] * size, before.host + tiers["host"] * size, before.store + tiers["store"] * size
        )

    # --- one block ----------------------------------------------------------------------------------------

    def explain(self, identity: BlockId, fate: Reason | None = None) -> Miss:
        """Why a block that is not there is not there. Changes nothing.

        `fate`: of its fetch; NEVER_STORED: the store was asked and does not have it. None: nobody asked.
        """
        ghosts = list(self._ghosts(identity))
        room = tuple(
            (tier, ghost.extra_blocks * self._block_bytes) for tier, ghost in ghosts if ghost.reason in _ROOM_HELPS
        )
        if fate is Reason.PRESSURE:  # host memory, which everything from the store goes through, had no room
            return Miss("host", fate, room)
        if fate is not None and fate is not Reason.NEVER_STORED:
            return Miss("store", fate, room)
        deleted = any(ghost.reason is Reason.DELETED for _, ghost in ghosts)  # then the store was told, too
        if fate is Reason.NEVER_STORED and not deleted and (lost := self._store.lost(identity)) is not None:
            return Miss("store", lost, room)
        for tier, ghost in ghosts:
            return Miss(tier, ghost.reason, room)
        return Miss(NOWHERE, Reason.NEVER_STORED)

    def _ghosts(self, identity: BlockId) -> Iterator[tuple[str, Ghost]]:
        """What tiers remember of it, the deepest first."""
        if self._host is not None and (ghost := self._host.ghost_of(identity)) is not None:
            yield "host", ghost
        if (ghost := self._kv.ghost_of(identity)) is not None:
            yield "gpu", ghost

    # --- reports ------------------------------------------------------------------------------------------

    def report(self) -> PrefixReport:
        """O(namespaces)."""
        below = self._below()
        names = sorted({*self._tallies, *below})
        return PrefixReport(tenants=tuple(self._summary(name, below.get(name, _Below())) for name in names))

    def of(self, namespace: str) -> TenantPrefixes:
        """One namespace's; zeros if nothing is known of it."""
        return self._summary(namespace, self._below().get(namespace, _Below()))

    def _summary(self, namespace: str, below: _Below) -> TenantPrefixes:
        tally = self._tallies.get(namespace, _Tally())
        declined = tally.declined + below.refused
        return TenantPrefixes(
            namespace=namespace,
            hits=tuple(sorted(tally.hits.items())),
            misses=tuple((tier, reason, count) for (tier, reason), count in sorted(tally.misses.items())),
            ghost_hits=tuple((tier, extra, count) for (tier, extra), count in sorted(tally.ghost_hits.items())),
            declined=tuple((tier, reason, count) for (tier, reason), count in sorted(declined.items())),
            store_evictions=tuple(sorted(below.evicted.items())),
        )

    def _below(self) -> dict[str, _Below]:
        """Blocks that host memory or the store did not take, or that the store gave up, by namespace."""
        found: defaultdict[str, _Below] = defaultdict(_Below)
        for (namespace, reason), count in self._host.refusals.items() if self._host is not None else ():
            found[namespace].refused["host", reason.value] += count
        usage = self._store_usage()
        if usage is not None:
            for (namespace, reason), count in usage.refusals.items():
                found[namespace].refused["store", reason.value] += count
            for (namespace, reason), count in usage.evictions.items():
                found[namespace].evicted[reason.value] += count
        return dict(found)

    def _tally(self, request: RequestState) -> _Tally:
        namespace = request.request.namespace
        tally = self._tallies.get(namespace)
        if tally is None:
            tally = self._tallies[namespace] = _Tally()
            self._fold()
        self._tallies.move_to_end(namespace)
        return tally

    def _fold(self) -> None:
        gone = self._tallies.pop(_GONE, _Tally())
        while len(self._tallies) > self._max_namespaces:
            _, oldest = self._tallies.popitem(last=False)
            gone.add(oldest)
        if gone != _Tally():
            self._tallies[_GONE] = gone
            self._tallies.move_to_end(_GONE, last=False)
