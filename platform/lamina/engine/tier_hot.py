"""Prefixes that requests keep finding on the device. What is always in use is never a victim, so nobody would save it.

computed ── found by a request ── found by another one: hot ──▶ waits for slack ──▶ saved, if the store lacks it
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice

from lamina.engine.store_memory import StoreMemory
from lamina_kvtier.identity import BlockId

__all__ = ["HotPrefixes"]

# Being found once is what the next turn of any conversation does, and most of those end soon; what they leave is saved
# when it is evicted. A prompt that is shared by many has been found twice after its third request.
_HOT = 2
_AGAIN_S = 60.0  # after it was named, for what a quota or a failing store kept from being saved


@dataclass(slots=True)
class _Finds:
    requests: int  # that found it
    last: int
    again_at: float


class HotPrefixes:
    """Counts by whom blocks were found, and names those that are hot and that the store lacks, each prefix head first.

    It hears of finds when they happen and looks at nothing else: O(1) per block found, and nothing in a step without.
    """

    def __init__(self, memory: StoreMemory, clock: Callable[[], float], *, most: int) -> None:
        """`memory`: of what is in the store. `most`: blocks that are remembered, and that may wait."""
        self._memory, self._clock, self._most = memory, clock, most
        self._finds: OrderedDict[BlockId, _Finds] = OrderedDict()  # the longest known first
        self._lines: dict[str, dict[BlockId, None]] = {}  # what waits, by namespace; in turn
        self._waiting = 0

    @property
    def is_empty(self) -> bool:
        """Nothing waits."""
        return not self._lines

    def found(self, namespace: str, request: int, ids: Iterable[BlockId]) -> None:
        """A request, which has a number of its own, found these blocks on the device. All are the namespace's."""
        now = self._clock()
        due = [
            identity for identity in ids if not self._memory.believes(identity) and self._is_hot(identity, request, now)
        ]
        if due:
            line = self._lines.setdefault(namespace, {})
            before = len(line)
            line.update(dict.fromkeys(due[: max(0, self._most - self._waiting)]))
            self._waiting += len(line) - before

    def next(self, count: int) -> tuple[str, list[BlockId]]:
        """Up to `count` that waited, of the namespace whose turn it is. Some may be in the store by now."""
        namespace = next(iter(self._lines))
        line = self._lines.pop(namespace)
        ids = list(islice(line, count))
        for identity in ids:
            del line[identity]
        self._waiting -= len(ids)
        if line:
            self._lines[namespace] = line  # after the others
        return namespace, ids

    def drop(self, namespace: str) -> None:
        """There is no room for what waits: a tail is of no use without what comes before it."""
        self._waiting -= len(self._lines.pop(namespace, ()))

    def _is_hot(self, identity: BlockId, request: int, now: float) -> bool:
        """Counts the find. Whether the block has to be named now."""
        finds = self._finds.get(identity)
        if finds is None:
            finds = self._finds[identity] = _Finds(0, -1, now)
            if len(self._finds) > self._most:
                self._finds.popitem(last=False)
        if finds.last != request:
            finds.requests, finds.last = finds.requests + 1, request
        if finds.requests < _HOT or now < finds.again_at:
            return False
        finds.again_at = now + _AGAIN_S
        return True
