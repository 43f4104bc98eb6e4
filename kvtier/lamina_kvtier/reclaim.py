"""Whose idle blocks go first when a namespace needs one and nothing is free.

    1. blocks beyond their owner's reservation, the owner furthest over its share first: (usage - reserved) / weight
    2. the requesting namespace's own
    never: what another namespace has within its reservation

Within one owner the least recently used block goes first. `next_to_reclaim` is the rule in plain words;
`ReclaimOrder` gives the same answers without looking at everybody.
"""

from __future__ import annotations

import heapq
import itertools
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from lamina_kvtier.ledger import Account, Charge, Ledger
from lamina_kvtier.namespace_counts import NamespaceCounts
from lamina_kvtier.over_shares import OverShares

__all__ = ["BlockQueue", "ReclaimOrder", "next_to_reclaim"]

_NONE = -1


def next_to_reclaim(accounts: Iterable[Account], requester: str) -> str | None:
    """The namespace whose oldest idle unit goes next; None if there is none to be had. O(accounts)."""
    with_idle = [account for account in accounts if account.idle > 0]
    over = [account for account in with_idle if account.committed > account.quota.reserved]
    if over:
        return min(over, key=lambda account: (-account.over_share, account.namespace)).namespace
    return requester if any(account.namespace == requester for account in with_idle) else None


class BlockQueue:
    """One owner's idle blocks, oldest first: its own ends, links in arrays that all queues share.

    A block is in at most one queue, so two arrays serve any number of owners, and every operation but iteration is
    O(1). The caller keeps the rules: push only what is in no queue, remove only what is in this one.
    """

    __slots__ = ("_after", "_before", "_length", "newest", "oldest")

    def __init__(self, before: array[int], after: array[int]) -> None:
        self._before, self._after = before, after
        self.oldest = self.newest = _NONE
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        """Oldest first. Ends even if the links are broken. O(length)."""
        block = self.oldest
        for _ in range(self._length):
            yield block
            block = self._after[block]

    def push(self, block: int) -> None:
        """Makes `block` the newest."""
        self._before[block], self._after[block] = self.newest, _NONE
        if self.newest == _NONE:
            self.oldest = block
        else:
            self._after[self.newest] = block
        self.newest = block
        self._length += 1

    def remove(self, block: int) -> None:
        """Takes `block` out, wherever it stands."""
        before, after = self._before[block], self._after[block]
        if before == _NONE:
            self.oldest = after
        else:
            self._after[before] = after
        if after == _NONE:
            self.newest = before
        else:
            self._before[after] = before
        self._length -= 1


class ReclaimOrder:
    """Who owns which block, which of them are idle, and which one goes next. Keeps the ledger's charges in step.

    Every operation and the choice of a victim are O(log namespaces) amortised, operations mostly O(1): see
    `OverShares`. Nothing depends on the number of blocks. Of owners that have no block only a few names are kept, and
    until the next choice at most.
    """

    def __init__(self, num_blocks: int, ledger: Ledger) -> None:
        self.ledger = ledger
        self.evictions: NamespaceCounts[str] = NamespaceCounts(ledger.knows)  # by owner and reason
        self._owners: list[str | None] = [None] * num_blocks
        self._queues: dict[str, BlockQueue] = {}
        self._before, self._after = array("i", [_NONE]) * num_blocks, array("i", [_NONE]) * num_blocks
        self._over = OverShares(self._over_share)
        ledger.watch(self._over.changed)

    @property
    def rules_apply(self) -> bool:
        """Until policy is loaded nobody loses a block because of a quota: plain least-recently-used order then."""
        return self.ledger.book.loaded

    def owner_of(self, block: int) -> str | None:
        """None: the block is free."""
        return self._owners[block]

    # --- states: free, in use, idle -----------------------------------------------------------------------

    def take(self, block: int, owner: str, charge: Charge | None) -> None:
        """A free block is in use, and `owner` pays, out of `charge` if there is one."""
        self._owners[block] = owner
        if charge is None:
            self.ledger.charge(owner, 1)
        else:
            self.ledger.commit(charge, 1)

    def rest(self, block: int) -> None:
        """A block in use (or pinned) is idle from now on, and its owner's newest."""
        owner = self._owner(block)
        queue = self._queues.get(owner)
        if queue is None:
            queue = self._queues[owner] = BlockQueue(self._before, self._after)
        queue.push(block)
        self.ledger.rest(owner, 1)

    def wake(self, block: int) -> None:
        """An idle block is in use (or pinned) again."""
        owner = self._owner(block)
        self._dequeue(owner, block)
        self.ledger.wake(owner, 1)

    def free(self, block: int, *, idle: bool) -> None:
        """An idle block, or else one that was in use, is free: nobody pays for it any more."""
        owner = self._owner(block)
        if idle:
            self._dequeue(owner, block)
        self._owners[block] = None
        self.ledger.uncharge(owner, 1, idle=int(idle))

    def _owner(self, block: int) -> str:
        owner = self._owners[block]
        assert owner is not None
        return owner

    def _dequeue(self, owner: str, block: int) -> None:
        queue = self._queues[owner]
        queue.remove(block)
        if len(queue) == 0:
            del self._queues[owner]

    # --- choice -------------------------------------------------------------------------------------------

    def oldest(self, namespace: str) -> int | None:
        """The namespace's own next victim."""
        queue = self._queues.get(namespace)
        return None if queue is None else queue.oldest

    def victim(self, requester: str) -> tuple[int, str] | None:
        """The block that goes next for `requester`, and why (`over_share`, `own`); None if none may be had."""
        over = self._over.first()
        if over is not None:
            return self._queues[over].oldest, "over_share"
        own = self.oldest(requester)
        return None if own is None else (own, "own")

    def in_order(self, count: int, oldest_first: Iterable[int]) -> list[int]:
        """Up to `count` idle blocks as they would go one after the other, if all else stayed as it is. Changes nothing.

        `oldest_first`: all idle blocks, least recently used first: those within their owners' reservations go in that
        order, each for a request of its owner only. O(log namespaces) for each block, amortised.
        """
        found = self._beyond_reservations(count) if self.rules_apply else []
        gone = set(found)
        left = (block for block in oldest_first if block not in gone)
        return found + list(itertools.islice(left, max(0, count - len(found))))

    def _beyond_reservations(self, count: int) -> list[int]:
        """Namespaces take turns: each gives until another one is further over its share."""
        found: list[int] = []
        turns: list[tuple[float, str, int, float, int]] = []  # rank, namespace, units over, weight, its next block
        accounts, newcomers = self.ledger.accounts, iter(self._over)
        newcomer = next(newcomers, None)
        while len(found) < count:
            if newcomer is not None and not (turns and turns[0] < newcomer):
                name = newcomer[1]
                account, block = accounts[name], self._queues[name].oldest
                over, weight = account.committed - account.quota.reserved, account.quota.weight
                newcomer = next(newcomers, None)
            elif turns:
                _, name, over, weight, block = heapq.heappop(turns)
            else:
                break
            found.append(block)
            over, block = over - 1, self._after[block]
            if over > 0 and block != _NONE:
                heapq.heappush(turns, (-over / weight, name, over, weight, block))
        return found

    def near_limit(self, namespace: str, count: int) -> tuple[int, list[int]] | None:
        """If its limit leaves it fewer than `count` new blocks: how many, and which of its own go then, next one first,
        up to `count` of both together. None if it has a longer way to go. O(blocks returned)."""
        account = self.ledger.account(namespace)
        room = max(0, account.quota.limit - account.committed)
        if room >= count or account.quota.limit >= self.ledger.book.capacity:
            return None
        return room, list(itertools.islice(self._queues.get(namespace, ()), count - room))

    def _over_share(self, namespace: str) -> float | None:
        """None: it has no idle block beyond its reservation."""
        account = self.ledger.account(namespace)
        return account.over_share if account.idle > 0 and account.committed > account.quota.reserved else None

    # --- proof --------------------------------------------------------------------------------------------

    def contradictions(self, idle_in_order: Iterable[int], in_use: Iterable[int]) -> list[str]:
        """What disagrees with the manager, one sentence each. O(blocks).

        `idle_in_order`: cached blocks that may be evicted, least recently used first; `in_use`: active and pinned.
        """
        found: list[str] = []
        queued: dict[str | None, list[int]] = {}
        for block in idle_in_order:
            queued.setdefault(self._owners[block], []).append(block)
        paid = Counter(self._owners[block] for block in in_use)
        paid.update({owner: len(blocks) for owner, blocks in queued.items()})
        if paid[None]:
            found.append(f"reclaim: {paid[None]} blocks that are not free have no owner")
        owned = sum(owner is not None for owner in self._owners)
        if owned != paid.total() - paid[None]:
            found.append(f"reclaim: {owned} blocks have an owner, but {paid.total() - paid[None]} are not free")
        for name in {*queued, *self._queues} - {None}:
            assert name is not None
            queue = self._queues.get(name)
            if [*(queue or ())] != queued.get(name, []) or (queue is not None and len(queue) == 0):
                found.append(f"reclaim: the queue of {name!r} is not its idle blocks in order")
            if self.ledger.account(name).idle != len(queued.get(name, [])):
                found.append(f"reclaim: {name!r} is charged for other idle blocks than it has")
        counted: Mapping[str, int] = {name: count for name, count in paid.items() if name is not None}
        return found + self.ledger.contradictions(counted)
