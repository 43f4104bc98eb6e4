"""What is remembered of a store: which blocks we know to have been in it, so that their loss can be told from never."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable

from lamina_kvtier.identity import BlockId
from lamina_kvtier.reasons import Reason

__all__ = ["StoreMemory"]

_MAX_BLOCKS = 1 << 17


class StoreMemory:
    """When each of the last `max_blocks` blocks was last put or loaded. O(1) per block."""

    def __init__(
        self,
        *,
        ttl_s: float | None = None,
        max_blocks: int = _MAX_BLOCKS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`ttl_s`: after which a block expires in the store; None: never."""
        self._ttl_s, self._max_blocks, self._clock = ttl_s, max_blocks, clock
        self._seen: OrderedDict[BlockId, float] = OrderedDict()  # the longest ago first

    def note(self, ids: Iterable[BlockId]) -> None:
        """They are in the store now."""
        now = self._clock()
        for identity in ids:
            self._seen[identity] = now
            self._seen.move_to_end(identity)
        while len(self._seen) > self._max_blocks:
            self._seen.popitem(last=False)

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
        expired = self._ttl_s is not None and self._clock() - seen >= self._ttl_s
        return Reason.TTL if expired else Reason.PRESSURE
