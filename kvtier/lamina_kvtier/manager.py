"""The KV manager: which block is free, active or cached, and who may have it next. It touches no tensors."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from lamina_kvtier.blocks import BlockUsage, CopyOnWrite, PinCounts, PrefixMatch, ReferenceCounts
from lamina_kvtier.errors import BlockMisuse, IntegrityError, OutOfBlocks
from lamina_kvtier.free_list import FreeList
from lamina_kvtier.ghosts import Ghost, Ghosts
from lamina_kvtier.identity import ID_BYTES, BlockId
from lamina_kvtier.integrity import Books, find_violations
from lamina_kvtier.ledger import Charge, Ledger
from lamina_kvtier.makers import Makers
from lamina_kvtier.prefix_index import PrefixIndex
from lamina_kvtier.quota import QuotaBook
from lamina_kvtier.reasons import Reason
from lamina_kvtier.reclaim import ReclaimOrder
from lamina_kvtier.tier import NO_ADAPTER

__all__ = ["UNOWNED", "KvManager"]

UNOWNED = ""  # who pays if nobody is named; no identity has an empty namespace, so it is no tenant's
_MAX_BLOCKS = 2**31 - 2  # the free list links blocks by 32-bit numbers


class KvManager:
    """Blocks 0 ... num_blocks - 1 of one pool, shared by reference counts and found again by identity.

    Each block is exactly one of *free* (nobody holds it, no identity), *active* (held at least once) and
    *cached* (nobody holds it, but its identity is known, so it can be revived until it is evicted). A cached block
    whose identity is pinned is not evicted.

    With `quotas` (in blocks) each active or cached block is charged to exactly one namespace in `ledger`: the one
    that allocated it, whoever else holds it. Then blocks are evicted in the order of `reclaim.py`; without, and until
    policy is loaded, the least recently used one goes.

    Every method is O(1) per block it names or returns, except `drop_cached`, `forget_where` and `check_integrity`.
    Misuse raises BlockMisuse and changes nothing. Not thread-safe: one scheduler owns it.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int = 16,
        *,
        prefix_caching: bool = True,
        quotas: QuotaBook | None = None,
        ghosts: Ghosts | None = None,
    ) -> None:
        """`block_size` in tokens; without `prefix_caching` no identity is ever known. Raises BlockMisuse.

        `ghosts` remembers what is evicted; None: nobody asks.
        """
        if not 1 <= num_blocks <= _MAX_BLOCKS:
            raise BlockMisuse(f"num_blocks must be 1 ... {_MAX_BLOCKS}, not {num_blocks}.")
        if block_size < 1:
            raise BlockMisuse(f"block_size must be at least 1 token, not {block_size}.")
        if quotas is not None and quotas.capacity != num_blocks:
            raise BlockMisuse(f"The quotas are for {quotas.capacity} blocks, but there are {num_blocks}.")
        self.num_blocks, self.block_size, self.prefix_caching = num_blocks, block_size, prefix_caching
        self.hit_blocks = 0  # blocks handed out by `acquire`; only grows
        self.turnover = 0  # blocks that became evictable, or no longer were free or evictable; only grows
        self.evicted_blocks = 0  # cached blocks lost to `allocate` and `make_writable`; only grows
        self._references = ReferenceCounts(num_blocks)
        self._index = PrefixIndex(num_blocks)
        self._makers = Makers(num_blocks)
        self._unheld = FreeList(num_blocks)  # free blocks first, then cached ones, least recently used first
        self._cached = 0
        self._leased = 0  # of the cached ones: pinned, so not in the free list
        self._pins = PinCounts()  # guards included
        self._guards = PinCounts()
        self._kept_appears: Callable[[BlockId], object] = _nobody_watches
        self._ghosts = ghosts
        self.ledger = None if quotas is None else Ledger(quotas)
        self._owned = None if self.ledger is None else ReclaimOrder(num_blocks, self.ledger)

    @property
    def available(self) -> int:
        """Blocks that `allocate` could give now: free + cached and not pinned, also what a match is about to revive.

        With quotas no namespace may get all of them: see `available_to`.
        """
        return len(self._unheld)

    def available_to(self, owner: str) -> int:
        """Blocks that `allocate` could give this namespace now."""
        if self.ledger is None or not self.ledger.book.loaded:
            return len(self._unheld)
        return max(0, min(self.ledger.room_in_limit(owner), self.ledger.room_in_tier(owner)))

    def usage(self) -> BlockUsage:
        return BlockUsage(
            total=self.num_blocks,
            free=self._free,
            active=self._references.active,
            cached=self._cached,
            pinned=self._leased,
        )

    @property
    def _free(self) -> int:
        return len(self._unheld) - (self._cached - self._leased)

    def owner_of(self, block: int) -> str | None:
        """Who is charged for a block; None if it is free, or if there are no quotas."""
        return None if self._owned is None else self._owned.owner_of(block)

    def adapter_of(self, block: int) -> bytes:
        """Digest of the adapter that computed a published block; `NO_ADAPTER`: the base model, or it has no name."""
        return self._makers[block]

    def blocks_by_adapter(self) -> Mapping[bytes, int]:
        """How many published blocks each adapter computed, without the base model."""
        return self._makers.counts

    def evictions(self) -> dict[tuple[str, str], int]:
        """Evicted blocks by owner and reason: `limit`, `over_share`, `own`, or `lru` before policy is loaded.

        Owners that are long gone are one, without a name: see `NamespaceCounts`.
        """
        return {} if self._owned is None else dict(self._owned.evictions)

    def next_victims(self, count: int) -> list[tuple[int, BlockId]]:
        """Up to `count` evictable blocks with their identities, in the order in which allocations will take them.

        Under quotas: first what owners have beyond their reservations, as it would go block by block, then what only
        their own requests can take, least recently used first. Changes nothing. O(free + count), and under quotas
        O(log namespaces) for each block.
        """
        in_order = self._cached_in_order()
        count = max(0, count)
        blocks = itertools.islice(in_order, count) if self._owned is None else self._owned.in_order(count, in_order)
        return [(block, self._identity(block)) for block in blocks]

    def victims_near_limit(self, namespace: str, count: int) -> tuple[int, list[tuple[int, BlockId]]] | None:
        """If its limit leaves a namespace fewer than `count` new blocks: how many, and which of its own it then gives
        up, in that order, up to `count` of both together. None if it has a longer way to go. O(blocks returned)."""
        near = None
        if self._owned is not None and self._owned.rules_apply:
            near = self._owned.near_limit(namespace, count)
        return None if near is None else (near[0], [(block, self._identity(block)) for block in near[1]])

    def _cached_in_order(self) -> Iterator[int]:
        return (block for block in self._unheld if self._index.identity_of(block) is not None)

    def _identity(self, block: int) -> BlockId:
        identity = self._index.identity_of(block)
        assert identity is not None
        return identity

    def ghost_of(self, identity: BlockId) -> Ghost | None:
        """Why this block was evicted, and how much more room would have kept it; None: not evicted, or long ago."""
        return None if self._ghosts is None else self._ghosts.find(identity)

    @property
    def ghost_rooms(self) -> list[int]:
        """What `ghost_of(...).extra_blocks` can be, smallest first."""
        return [] if self._ghosts is None else self._ghosts.rooms

    def identity_of(self, block: int) -> BlockId | None:
        """By which this block can be found; None: it cannot."""
        return self._index.identity_of(block)

    def known(self) -> list[BlockId]:
        """All identities that can be found, in no order. O(blocks)."""
        return [identity for identity in map(self._index.identity_of, range(self.num_blocks)) if identity is not None]

    def holds(self, identity: BlockId) -> bool:
        """Whether this block is known here, whatever became of those before it."""
        return self._index.block_of(identity) is not None

    def match(self, ids: Sequence[BlockId]) -> int:
        """Length, in blocks, of the longest known prefix of `ids`. Changes nothing, not even the order."""
        return len(self._index.known_prefix(ids))

    def preview(self, ids: Sequence[BlockId]) -> PrefixMatch:
        """What `acquire(ids)` would find, for an admission decision. Changes nothing."""
        blocks = self._index.known_prefix(ids)
        evictable = [block for block in blocks if self._references[block] == 0]
        if not self._pins:
            return PrefixMatch(len(blocks), len(evictable))
        return PrefixMatch(
            known=len(blocks),
            cached=sum(not self.is_pinned(block) for block in evictable),
            pinned=sum(map(self._is_leased, blocks)),
        )

    def find(self, identity: BlockId) -> int | None:
        """The block that is known by this identity. Changes nothing."""
        return self._index.block_of(identity)

    def is_shared(self, block: int) -> bool:
        """Whether more than one table holds an active block, so that `make_writable` would need a new one."""
        self._references.require_active((block,), "look at")
        return self._references[block] > 1

    def acquire(self, ids: Sequence[BlockId], charge: Charge | None = None) -> list[int]:
        """Takes one reference on each block of the longest known prefix of `ids`; returns their numbers.

        Acquire before allocating for the same sequence, or the allocation may evict what was just matched. With
        `charge`, what it holds for blocks that were evictable is refunded: they are charged already.
        """
        blocks = self._index.known_prefix(ids)
        woken = 0
        for block in blocks:
            if self._references.hold(block):
                woken += self._revive(block)
        self.hit_blocks += len(blocks)
        if charge is not None and self.ledger is not None:
            self.ledger.refund(charge, min(woken, charge.pending))
        return blocks

    def allocate(self, count: int, *, owner: str = UNOWNED, charge: Charge | None = None) -> list[int]:
        """`count` blocks with one reference each, charged to `owner`: free ones first, then cached ones.

        Cached ones are evicted; contents are undefined. With `charge` (the owner's) they are taken out of what it
        promised. All or nothing: raises OutOfBlocks(need, have), or OverLimit, which is one.
        """
        if count < 0:
            raise BlockMisuse(f"Cannot allocate {count} blocks.")
        if charge is not None and (self.ledger is None or charge.namespace != owner or charge.pending < count):
            raise BlockMisuse(f"Cannot allocate {count} blocks for {owner!r} out of this charge.")
        self._require_available(count, owner)
        return [self._take(owner, charge) for _ in range(count)]

    def fork(self, blocks: Sequence[int]) -> None:
        """One more reference on each: a second table now holds them too."""
        self._references.require_active(blocks, "fork")
        for block in blocks:
            self._references.hold(block)

    def make_writable(self, block: int, *, owner: str | None = None) -> CopyOnWrite | None:
        """Call before writing into `block` of a table. None: nobody else can see it, write in place.

        Otherwise copy `source` to `target` and put `target` (one reference, nameless) into the table instead
        of `block`, whose reference is gone already. Copies must run in the order in which they were returned
        and before the step's writes: the source may be evicted, and be a later target, at once. `owner` pays for
        the copy; None: who pays for the source. Raises OutOfBlocks, OverLimit.
        """
        self._references.require_active((block,), "write")
        if self._references[block] == 1 and self._index.identity_of(block) is None:
            return None
        payer = self._payer(block) if owner is None else owner
        self._require_available(1, payer)
        target = self._take(payer)
        self._drop(block)
        return CopyOnWrite(source=block, target=target)

    def publish(self, block: int, identity: BlockId, *, adapter: bytes = NO_ADAPTER) -> int:
        """Makes a full active block known by its identity; returns the block that is known by it from now on.

        `adapter`: digest of the one that computed it. The identity covers it; the tiers below want to know it.
        That is another block if the identity was known already; then `block` stays nameless (it will not be
        cached), and the caller may swap it for the other: `acquire([identity])`, then `release([block])`.
        Publishing the same identity again changes nothing; another identity raises BlockMisuse.
        """
        self._references.require_active((block,), "publish")
        if not isinstance(identity, bytes) or len(identity) != ID_BYTES:
            raise BlockMisuse(f"An identity is {ID_BYTES} bytes, not {identity!r}.", block=block)
        if len(adapter) != len(NO_ADAPTER):
            raise BlockMisuse(f"An adapter's digest is {len(NO_ADAPTER)} bytes, not {adapter!r}.", block=block)
        if not self.prefix_caching:
            return block
        known = self._index.identity_of(block)
        if known is None:
            if self._ghosts is not None:
                self._ghosts.discard(identity)
            found = self._index.insert(block, identity)
            if found == block:
                self._makers.note(block, adapter)
                if self.is_pinned(block):
                    self._kept_appears(identity)
            return found
        if known != identity:
            raise BlockMisuse(f"Cannot publish block {block}: it is published by another identity.", block=block)
        return block

    def release(self, blocks: Sequence[int]) -> None:
        """Drops one reference on each of a table's blocks (in the table's order).

        A block whose last reference goes becomes cached if it has an identity, else free. The tail is let go
        first, so that it is evicted before the head: a cached prefix without its head could never be found.
        """
        self._references.require_droppable(blocks)
        for block in reversed(blocks):
            self._drop(block)

    def forget(self, ids: Iterable[BlockId], reason: Reason = Reason.DELETED) -> int:
        """Makes these identities unknown and returns how many were known; `reason` is what a later miss is told.

        Cached blocks become free; active ones stay with their holders and become free afterwards. Not counted
        as evictions.
        """
        forgotten = 0
        for identity in ids:
            block = self._index.block_of(identity)
            if block is None:
                continue
            self._remember(block, reason)
            if self._references[block] == 0:
                self._to_free(block)
            else:
                self._unname(block)
            forgotten += 1
        return forgotten

    def forget_where(
        self, *, owner: str | None = None, adapter: bytes | None = None, reason: Reason = Reason.DELETED
    ) -> int:
        """`forget` for all blocks that `owner` pays for, or that `adapter` computed, or both if both are given.

        O(blocks). Without quotas nobody is known to pay for anything. Raises BlockMisuse if neither is given.
        """
        if owner is None and adapter is None:
            raise BlockMisuse("Forgetting needs an owner or an adapter.")
        wanted = (
            self._index.identity_of(block)
            for block in range(self.num_blocks)
            if owner in (None, self.owner_of(block)) and adapter in (None, self._makers[block])
        )
        return self.forget([identity for identity in wanted if identity is not None], reason)

    def drop_cached(self) -> int:
        """Frees all cached blocks that are not pinned; returns how many. Not counted as evictions. O(free + cached)."""
        dropped = self._cached - self._leased
        for block in self._unheld:
            if self._unname(block) and self._owned is not None:
                self._owned.free(block, idle=True)
        self._cached = self._leased
        return dropped

    def is_pinned(self, block: int) -> bool:
        """Whether this block has an identity that its owner has pinned."""
        if not self._pins:
            return False
        identity = self._index.identity_of(block)
        return identity is not None and self._pins.has(self._payer(block), identity)

    def pin(self, ids: Iterable[BlockId], namespace: str = UNOWNED) -> None:
        """One more lease on each identity: blocks of `namespace` that have it now or later are not evicted.

        Quotas for pins are the caller's to keep (`pins.py`). Without quotas all blocks are UNOWNED.
        """
        payer = UNOWNED if self._owned is None else namespace
        for identity in ids:
            if self._pins.add(payer, identity):
                block = self._index.block_of(identity)
                if block is not None and self._references[block] == 0 and self._payer(block) == payer:
                    self._unheld.remove(block)
                    self._leased += 1
                    if self._owned is not None:
                        self._owned.wake(block)

    def unpin(self, ids: Sequence[BlockId], namespace: str = UNOWNED) -> None:
        """Ends one lease on each identity. Cached blocks become evictable, as if used just now, the tail first."""
        payer = UNOWNED if self._owned is None else namespace
        self._pins.require_droppable(payer, ids)
        for identity in reversed(ids):
            if self._pins.drop(payer, identity):
                block = self._index.block_of(identity)
                if block is not None and self._references[block] == 0 and self._payer(block) == payer:
                    self._leased -= 1
                    self._queue(block)

    def guard(self, identity: BlockId, namespace: str) -> None:
        """Like a pin, but for a moment only: no admission may count on the block's staying (`preview`)."""
        self._guards.add(UNOWNED if self._owned is None else namespace, identity)
        self.pin((identity,), namespace)

    def unguard(self, identity: BlockId, namespace: str) -> None:
        """Ends one guard. Raises BlockMisuse without one."""
        payer = UNOWNED if self._owned is None else namespace
        self._guards.require_droppable(payer, (identity,))
        self._guards.drop(payer, identity)
        self.unpin((identity,), namespace)

    def watch_kept(self, watcher: Callable[[BlockId], object]) -> None:
        """From now on `watcher(identity)` is called when a block is published whose identity is pinned or guarded."""
        self._kept_appears = watcher

    def leased_by_owner(self) -> dict[str, int]:
        """Blocks that nobody holds and only a pin keeps, by who pays for them. O(pinned identities)."""
        found: Counter[str] = Counter()
        for namespace, identity in self._pins:
            block = self._index.block_of(identity)
            if block is not None and self._references[block] == 0 and self._payer(block) == namespace:
                found[namespace] += 1
        return dict(found)

    def check_integrity(self, tables: Iterable[Sequence[int]] | None = None) -> None:
        """Proves every rule of the bookkeeping; raises IntegrityError with all broken ones. O(num_blocks).

        With `tables` (all there are) it also proves that each reference count is the block's number of
        occurrences in them.
        """
        books = Books(
            references=self._references,
            index=self._index,
            makers=self._makers,
            unheld=self._unheld,
            cached=self._cached,
            leased=self._leased,
            is_pinned=self.is_pinned,
            owned=self._owned,
        )
        violations = find_violations(books, tables)
        if violations:
            raise IntegrityError(violations)

    def _is_leased(self, block: int) -> bool:
        """Pinned, and not by guards alone."""
        identity = self._index.identity_of(block)
        if identity is None:
            return False
        payer = self._payer(block)
        return self._pins.count(payer, identity) > self._guards.count(payer, identity)

    def _require_available(self, count: int, owner: str) -> None:
        if self.ledger is not None and self.ledger.book.loaded:
            self.ledger.require(owner, count)
        elif count > len(self._unheld):
            raise OutOfBlocks(need=count, have=len(self._unheld), limit=self.num_blocks)

    def _payer(self, block: int) -> str:
        owner = None if self._owned is None else self._owned.owner_of(block)
        return UNOWNED if owner is None else owner

    # --- changes of state: free, active, cached -----------------------------------------------------------

    def _take(self, owner: str, charge: Charge | None = None) -> int:
        # Victims are chosen here and in `_make_free`, nowhere else.
        self.turnover += 1
        if self._owned is not None:
            self._make_free(self._owned, owner)
        block = self._unheld.pop_front()
        if self._owned is not None:
            self._owned.take(block, owner, charge)
        elif self._index.identity_of(block) is not None:
            self._remember(block, Reason.PRESSURE)
            self._unname(block)
            self._cached -= 1
            self.evicted_blocks += 1
        self._references.hold(block)
        return block

    def _make_free(self, owned: ReclaimOrder, owner: str) -> None:
        """Sees to it that the first block of the free list is free, and that `owner` stays within its limit."""
        if not owned.rules_apply:
            if self._free == 0:
                self._evict(owned, next(iter(self._unheld)), "lru")
            return
        while owned.ledger.is_at_limit(owner) and (oldest := owned.oldest(owner)) is not None:
            self._evict(owned, oldest, "limit")
        if self._free == 0:
            victim = owned.victim(owner)
            assert victim is not None, "more was available than can be reclaimed"
            self._evict(owned, *victim)

    def _evict(self, owned: ReclaimOrder, block: int, reason: str) -> None:
        owned.evictions.add(owned.owner_of(block) or UNOWNED, reason)
        self.evicted_blocks += 1
        self._remember(block, Reason.OWN_QUOTA if reason == "limit" else Reason.PRESSURE)
        self._to_free(block)

    def _remember(self, block: int, reason: Reason) -> None:
        identity = self._index.identity_of(block)
        if self._ghosts is not None and identity is not None:
            self._ghosts.add(identity, reason)

    def _unname(self, block: int) -> bool:
        """A block loses its identity; False if it had none."""
        self._makers.forget(block)
        return self._index.drop(block)

    def _to_free(self, block: int) -> None:
        """A cached block loses its identity and is the next to be taken."""
        pinned = self.is_pinned(block)
        self._unname(block)
        self._cached -= 1
        if pinned:
            self._leased -= 1
        else:
            self._unheld.remove(block)
        self._unheld.push_front(block)
        if self._owned is not None:
            self._owned.free(block, idle=not pinned)

    def _revive(self, block: int) -> bool:
        """A cached block is active; True if it could have been evicted until now."""
        self.turnover += 1
        self._cached -= 1
        if self.is_pinned(block):
            self._leased -= 1
            return False
        self._unheld.remove(block)
        if self._owned is not None:
            self._owned.wake(block)
        return True

    def _drop(self, block: int) -> None:
        if not self._references.drop(block):
            return
        if self._index.identity_of(block) is None:
            self._unheld.push_front(block)
            if self._owned is not None:
                self._owned.free(block, idle=False)
            return
        self._cached += 1
        if self.is_pinned(block):
            self._leased += 1
        else:
            self._queue(block)

    def _queue(self, block: int) -> None:
        """A cached block may be evicted from now on, after all others."""
        self.turnover += 1
        self._unheld.push_back(block)
        if self._owned is not None:
            self._owned.rest(block)


def _nobody_watches(_identity: BlockId) -> None:
    """Stands for a watcher."""
