"""Where the blocks of one prompt are now, and why the others are nowhere."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from lamina.engine.explain import Explainer
from lamina.engine.prefix_lookup import Miss
from lamina.engine.tier_protocol import Below
from lamina.types import BlockRun
from lamina_kvtier.identity import BlockId
from lamina_kvtier.manager import KvManager
from lamina_kvtier.reasons import Reason
from lamina_kvtier.tier import Operation, Outcome, Tally

__all__ = ["Locate", "Located"]


class Located(NamedTuple):
    runs: tuple[BlockRun, ...]
    store: str  # none | ok | unavailable


class _Place(NamedTuple):
    tiers: tuple[str, ...]
    pins: tuple[str, ...]
    miss: Miss | None


class Locate:
    """An errand: the store is asked for what follows the prefix that is nearer, as a request's look-up would.

    Changes nothing, not even the order in which blocks are evicted.
    """

    def __init__(
        self,
        kv: KvManager,
        below: Below | None,
        explainer: Explainer,
        ids: Sequence[BlockId],
        pins: Mapping[BlockId, tuple[str, ...]],
    ) -> None:
        self._kv, self._below, self._explainer, self._ids, self._pins = kv, below, explainer, ids, pins
        self._near = next((at for at, identity in enumerate(ids) if not self._nearby(identity)), len(ids))
        self._lookup: Operation[Tally] | None = None
        if below is not None and below.store is not None and self._near < len(ids):
            self._lookup = below.store.lookup(ids[self._near :])

    def advance(self) -> Located | None:
        if self._lookup is not None and not self._lookup.done():
            return None
        stored, state = 0, "none" if self._below is None or self._below.store is None else "ok"
        if self._lookup is not None:
            tally = self._lookup.result()
            stored = tally.blocks
            state = "ok" if tally.outcome in (Outcome.OK, Outcome.MISSING) else "unavailable"
        in_store = range(self._near, self._near + stored)
        lacks = Reason.NEVER_STORED if self._lookup is not None and state == "ok" else None
        places = [self._place(identity, at in in_store, lacks) for at, identity in enumerate(self._ids)]
        return Located(tuple(_runs(places)), state)

    def _nearby(self, identity: BlockId) -> list[str]:
        found = ["gpu"] if self._kv.holds(identity) else []
        if self._below is not None and self._below.host.find([identity]):
            found.append("host")
        return found

    def _place(self, identity: BlockId, stored: bool, lacks: Reason | None) -> _Place:
        tiers = (*self._nearby(identity), *(["store"] if stored else []))
        miss = None if tiers else self._explainer.explain(identity, lacks)
        return _Place(tiers, self._pins.get(identity, ()), miss)


def _runs(places: Sequence[_Place]) -> Iterator[BlockRun]:
    first = 0
    for place, group in groupby(places):
        blocks = len(list(group))
        miss = place.miss
        yield BlockRun(
            first=first,
            blocks=blocks,
            tiers=place.tiers,
            pins=place.pins,
            lost_by=None if miss is None else miss.tier,
            reason=None if miss is None else miss.reason.value,
            room=() if miss is None else miss.room,
        )
        first += blocks
