"""The best that a pool could do that knows the future and keeps the same rules of the commons. Blocks only, offline.

What is simulated is what `KvManager` does with quotas: a request holds its longest known prefix, takes blocks for the
rest, holds all until it ends, and then they are idle. When a block is needed, in this order: at its limit a namespace
gives up one of its own; a free one; an idle one beyond its owner's reservation; an idle one of its own; never another
namespace's within its reservation. What differs is which one:

- `Knows.NOTHING`: the least recently used, the tail of a table before its head. With `Gives.FURTHEST_OVER` this is the
  real manager, hit for hit, which the tests hold it to.
- `Knows.USES`: a segmented order: what was used twice is kept twice as long as what was used once, and four times as
  long what was used more often. (Online; a head is used whenever its tail is, so prefixes stay closed.)
- `Knows.ENDINGS`: blocks that nobody will ask for again go first, the others by recency: a server that is told when a
  conversation is over, and no more.
- `Knows.FUTURE`: the block whose next use is furthest away (Belady).

and who gives way beyond reservations: `Gives.FURTHEST_OVER`, the namespace furthest over its share, which is the
product's rule of fairness; or `Gives.ANYBODY_OVER`, whichever of those that may be asked has the best victim.

In what sense it is optimal. Without quotas, `Knows.FUTURE` finds the most blocks that any order can, online or not: a
block is only asked for together with all before it, so a head's next use is never after its tail's, what is furthest
away is always a leaf, and a found prefix is as long as its blocks are resident. For pages of one size that have to be
brought in when they are used, and that nobody can evict while they are, furthest next use is optimal (Belady 1966). Any
rule only takes choices away, so `without quotas` is an **upper bound** of what any order finds with quotas.

With quotas, the furthest next use among all permitted victims is **the greedy choice, and not proven optimal**: a bad
choice now can leave a namespace over its reservation that another would not. It is what an online order is compared
with, by the better of the two ways of giving; the bound says how much it can be short of the true optimum. (Requests
that find no room are not retried; where there are any, the bound need not hold.)
"""

from __future__ import annotations

import heapq
import itertools
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from kv_trace import Request, Trace
from lamina_kvtier import Quota

__all__ = ["Found", "Gives", "Knows", "events", "simulate"]

_NEVER = 1 << 60
_WEIGHTS = (1, 2, 4)  # how long a block is kept that was used once, twice, more often
_Victim = tuple[int, int, int, int, int]  # urgency (the lowest goes first), -depth, block, stamp, when it became idle


class Knows(Enum):
    NOTHING = "nothing"
    USES = "how often a block was used"
    ENDINGS = "endings"
    FUTURE = "the future"


class Gives(Enum):
    FURTHEST_OVER = "the namespace furthest over its share"
    ANYBODY_OVER = "whoever is over their reservation and has the best victim"


@dataclass(slots=True)
class Found:
    """Blocks of prompts, by namespace, and requests that there was no room for."""

    asked: dict[str, int] = field(default_factory=dict)
    found: dict[str, int] = field(default_factory=dict)
    refused: int = 0

    def count(self, namespace: str, asked: int, found: int) -> None:
        self.asked[namespace] = self.asked.get(namespace, 0) + asked
        self.found[namespace] = self.found.get(namespace, 0) + found

    def rate(self, namespace: str | None = None) -> float:
        """Share of the asked blocks that were found: of one namespace, or of all."""
        if namespace is not None:
            return self.found.get(namespace, 0) / max(1, self.asked.get(namespace, 0))
        return sum(self.found.values()) / max(1, sum(self.asked.values()))


def events(requests: Sequence[Request]) -> Iterator[tuple[int, bool]]:
    """(index, whether it starts) in time; what ends at the same moment as another starts ends first."""
    starts = [(request.start, 1, at) for at, request in enumerate(requests)]
    stops = [(request.stop, 0, at) for at, request in enumerate(requests)]
    for _, starting, at in sorted(starts + stops):
        yield at, bool(starting)


def simulate(
    trace: Trace,
    capacity: int,
    quotas: Mapping[str, Quota],
    *,
    knows: Knows,
    gives: Gives,
) -> Found:
    """Replays a trace through `capacity` blocks. Without `quotas` one pool, and nobody owns anything."""
    pool = _Pool(trace.requests, capacity, quotas, knows, gives)
    result, running = Found(), set[int]()
    for at, starting in events(trace.requests):
        request = trace.requests[at]
        if starting:
            known = pool.start(at, request)
            if known is None:
                result.refused += 1
            else:
                running.add(at)
            result.count(request.namespace, request.prompt_blocks, known or 0)
        elif at in running:
            running.remove(at)
            pool.stop(at, request)
    return result


@dataclass(slots=True)
class _Account:
    quota: Quota
    committed: int = 0
    idle: int = 0
    taken: int = 0  # blocks since the beginning: the clock of ages
    victims: list[list[_Victim]] = field(default_factory=lambda: [[] for _ in _WEIGHTS])  # a heap for each weight

    @property
    def is_over(self) -> bool:
        return self.committed > self.quota.reserved

    @property
    def firm(self) -> int:
        return self.committed - self.idle


class _Pool:
    def __init__(
        self, requests: Sequence[Request], capacity: int, quotas: Mapping[str, Quota], knows: Knows, gives: Gives
    ) -> None:
        self._capacity, self._free = capacity, capacity
        self._quotas, self._knows, self._gives = quotas, knows, gives
        self._accounts: dict[str, _Account] = {}
        self._holders: dict[int, int] = {}  # of resident blocks
        self._used: dict[int, int] = {}  # how often, for `Knows.USES`
        self._owners: dict[int, str] = {}
        self._stamps: dict[int, int] = {}  # when a block became idle last; other entries of the heaps are stale
        self._clock = itertools.count()
        self._uses: dict[int, list[int]] = {}
        for at, request in enumerate(requests):
            for block in request.blocks[: request.prompt_blocks]:
                self._uses.setdefault(block, []).append(at)
        self._started = -1

    def start(self, at: int, request: Request) -> int | None:
        """Blocks of the prompt that were found; None: no room for the rest."""
        self._started = at
        owner = request.namespace if self._quotas else ""
        known = 0
        while known < request.prompt_blocks and request.blocks[known] in self._holders:
            known += 1
        for block in request.blocks[:known]:
            self._hold(block)
        if not self._has_room(owner, len(request.blocks) - known):
            self._rest(at, request.blocks[:known])
            return None
        for block in request.blocks[known:]:
            self._make_room(owner)
            self._free -= 1
            account = self._account(owner)
            account.committed += 1
            account.taken += 1
            self._owners[block] = owner
            self._holders[block] = self._used[block] = 1
        return known

    def stop(self, at: int, request: Request) -> None:
        self._rest(at, request.blocks)

    def _account(self, owner: str) -> _Account:
        account = self._accounts.get(owner)
        if account is None:
            quota = self._quotas.get(owner, Quota(0, self._capacity))
            account = self._accounts[owner] = _Account(quota)
        return account

    def _has_room(self, owner: str, count: int) -> bool:
        account = self._account(owner)
        held = sum(max(a.firm, min(a.committed, a.quota.reserved)) for a in self._accounts.values() if a is not account)
        return count <= min(account.quota.limit, self._capacity - held) - account.firm

    def _hold(self, block: int) -> None:
        if self._holders[block] == 0:
            self._account(self._owners[block]).idle -= 1
            del self._stamps[block]
        self._holders[block] += 1
        self._used[block] += 1

    def _rest(self, at: int, blocks: Sequence[int]) -> None:
        for depth in range(len(blocks) - 1, -1, -1):
            block = blocks[depth]
            self._holders[block] -= 1
            if self._holders[block]:
                continue
            account, stamp = self._account(self._owners[block]), next(self._clock)
            account.idle += 1
            self._stamps[block] = stamp
            victim = self._urgency(block, stamp), -depth, block, stamp, account.taken
            heapq.heappush(account.victims[self._segment(block)], victim)

    def _segment(self, block: int) -> int:
        return min(self._used[block], len(_WEIGHTS)) - 1 if self._knows is Knows.USES else 0

    def _urgency(self, block: int, stamp: int) -> int:
        if self._knows in (Knows.NOTHING, Knows.USES):
            return stamp
        uses = self._uses.get(block, [])
        following = bisect_right(uses, self._started)
        if following == len(uses):
            return -_NEVER
        return stamp if self._knows is Knows.ENDINGS else -uses[following]

    def _make_room(self, owner: str) -> None:
        account = self._account(owner)
        while account.quota.limit < self._capacity and account.committed >= account.quota.limit and account.idle:
            self._evict(account)
        if self._free == 0:
            self._evict(self._gives_way(account))

    def _gives_way(self, requester: _Account) -> _Account:
        over = [(name, account) for name, account in self._accounts.items() if account.idle and account.is_over]
        if self._gives is Gives.FURTHEST_OVER:
            shares = [(-(a.committed - a.quota.reserved) / a.quota.weight, name) for name, a in over]
            return self._accounts[min(shares)[1]] if shares else requester
        choices = [account for _, account in over]
        if requester.idle and not requester.is_over:
            choices.append(requester)
        return min(choices, key=lambda account: self._heap(account)[0])

    def _heap(self, account: _Account) -> list[_Victim]:
        """The one that the account's next victim is at the top of. There must be idle blocks."""
        best, greatest = account.victims[0], -1.0
        for heap, weight in zip(account.victims, _WEIGHTS, strict=True):
            while heap and self._stamps.get(heap[0][2]) != heap[0][3]:
                heapq.heappop(heap)
            if heap and (account.taken - heap[0][4]) / weight > greatest:
                best, greatest = heap, (account.taken - heap[0][4]) / weight
        return best

    def _evict(self, account: _Account) -> None:
        block = heapq.heappop(self._heap(account))[2]
        account.idle -= 1
        account.committed -= 1
        self._free += 1
        del self._stamps[block], self._holders[block], self._owners[block], self._used[block]
