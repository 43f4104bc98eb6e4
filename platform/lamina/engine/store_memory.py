"""What is remembered of a store: which blocks are believed to be in it, and which were, so that loss is not never."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from lamina_kvtier.identity import BlockId
from lamina_kvtier.reasons import Reason

__all__ = ["StoreMemory"]

_MAX_BLOCKS = 1 << 17
_GONE = -1


@dataclass(frozen=True, slots=True)
class _Seen:
    at: float
    age: int  # of the store's contents, counted by `doubt_all`; _GONE: it is known to be missing


class StoreMemory:
    """When each of the last `max_blocks` blocks was last put or loaded, and whether it is still there. O(1) per block.

    The tiers write it; they put again what is not believed to be there, and misses are explained by it.
    """

    def __init__(
        self,
        *,
        ttl_s: float | None = None,
        max_blocks: int = _MAX_BLOCKS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`ttl_s`: after which a block expires in the store; None: never."""
        self._ttl_s, self._max_blocks, self._clock = ttl_s, max_blocks, clock
        self._seen: OrderedDict[BlockId, _Seen] = OrderedDict()  # the longest ago first
        self._age = 0
        self.surprises = 0  # blocks that were believed to be there and were not; only grows

    def note(self, ids: Iterable[BlockId]) -> None:
        """They are in the store now."""
        seen = _Seen(self._clock(), self._age)
        for identity in ids:
            self._seen[identity] = seen
            self._seen.move_to_end(identity)
        while len(self._seen) > self._max_blocks:
            self._seen.popitem(last=False)

    def missed(self, ids: Iterable[BlockId]) -> None:
        """They are not in the store now."""
        for identity in ids:
            if self.believes(identity):
                self.surprises += 1
                self._seen[identity] = _Seen(self._seen[identity].at, _GONE)

    def doubt_all(self) -> None:
        """The store seems to have lost its contents: nothing is believed that was noted before."""
        self._age += 1

    def believes(self, identity: BlockId) -> bool:
        """Whether it is there, as far as we know."""
        seen = self._seen.get(identity)
        return seen is not None and seen.age == self._age and not self._expired(seen)

    def known(self) -> list[BlockId]:
        """What we know to have been there lately, the longest ago first."""
        return list(self._seen)

    def lost(self, identity: BlockId) -> Reason | None:
        """Why a block that the store has not any more left it: its time was up, or the server needed the room.

        None: it was not there as far as we know.
        """
        seen = self._seen.get(identity)
        if seen is None:
            return None
        return Reason.TTL if self._expired(seen) else Reason.PRESSURE

    def _expired(self, seen: _Seen) -> bool:
        return self._ttl_s is not None and self._clock() - seen.at >= self._ttl_s
