"""The KV manager: which block is free, active or cached, and who may have it next. It touches no tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lamina_kvtier.blocks import BlockUsage, CopyOnWrite, PrefixMatch, ReferenceCounts
from lamina_kvtier.errors import BlockMisuse, IntegrityError, OutOfBlocks
from lamina_kvtier.free_list import FreeList
from lamina_kvtier.identity import ID_BYTES, BlockId
from lamina_kvtier.integrity import find_violations
from lamina_kvtier.prefix_index import PrefixIndex

__all__ = ["KvManager"]

_MAX_BLOCKS = 2**31 - 2  # the free list links blocks by 32-bit numbers


class KvManager:
    """Blocks 0 ... num_blocks - 1 of one pool, shared by reference counts and found again by identity.

    Each block is exactly one of *free* (nobody holds it, no identity), *active* (held at least once) and
    *cached* (nobody holds it, but its identity is known, so it can be revived until it is evicted).

    Every method is O(1) per block it names or returns, except `drop_cached` and `check_integrity`. Misuse
    raises BlockMisuse and changes nothing. Not thread-safe: one scheduler owns it.
    """

    def __init__(self, num_blocks: int, block_size: int = 16, *, prefix_caching: bool = True) -> None:
        """`block_size` in tokens; without `prefix_caching` no identity is ever known. Raises BlockMisuse."""
        if not 1 <= num_blocks <= _MAX_BLOCKS:
            raise BlockMisuse(f"num_blocks must be 1 ... {_MAX_BLOCKS}, not {num_blocks}.")
        if block_size < 1:
            raise BlockMisuse(f"block_size must be at least 1 token, not {block_size}.")
        self.num_blocks, self.block_size, self.prefix_caching = num_blocks, block_size, prefix_caching
        self.hit_blocks = 0  # blocks handed out by `acquire`; only grows
        self.evicted_blocks = 0  # cached blocks lost to `allocate` and `make_writable`; only grows
        self._references = ReferenceCounts(num_blocks)
        self._index = PrefixIndex(num_blocks)
        self._unheld = FreeList(num_blocks)  # free blocks first, then cached ones, least recently used first
        self._cached = 0

    @property
    def available(self) -> int:
        """Blocks that `allocate` could give now: free + cached, also what a match is about to revive."""
        return len(self._unheld)

    def usage(self) -> BlockUsage:
        return BlockUsage(
            total=self.num_blocks,
            free=len(self._unheld) - self._cached,
            active=self._references.active,
            cached=self._cached,
        )

    def match(self, ids: Sequence[BlockId]) -> int:
        """Length, in blocks, of the longest known prefix of `ids`. Changes nothing, not even the order."""
        return len(self._index.known_prefix(ids))

    def preview(self, ids: Sequence[BlockId]) -> PrefixMatch:
        """What `acquire(ids)` would find, for an admission decision. Changes nothing."""
        blocks = self._index.known_prefix(ids)
        return PrefixMatch(len(blocks), sum(1 for block in blocks if self._references[block] == 0))

    def is_shared(self, block: int) -> bool:
        """Whether more than one table holds an active block, so that `make_writable` would need a new one."""
        self._references.require_active((block,), "look at")
        return self._references[block] > 1

    def acquire(self, ids: Sequence[BlockId]) -> list[int]:
        """Takes one reference on each block of the longest known prefix of `ids`; returns their numbers.

        Acquire before allocating for the same sequence, or the allocation may evict what was just matched.
        """
        blocks = self._index.known_prefix(ids)
        for block in blocks:
            if self._references.hold(block):
                self._unheld.remove(block)
                self._cached -= 1
        self.hit_blocks += len(blocks)
        return blocks

    def allocate(self, count: int) -> list[int]:
        """`count` blocks with one reference each: free ones first, then the least recently used cached ones.

        Cached ones are evicted; contents are undefined. All or nothing: raises OutOfBlocks(need, have).
        """
        if count < 0:
            raise BlockMisuse(f"Cannot allocate {count} blocks.")
        self._require_available(count)
        return [self._take() for _ in range(count)]

    def fork(self, blocks: Sequence[int]) -> None:
        """One more reference on each: a second table now holds them too."""
        self._references.require_active(blocks, "fork")
        for block in blocks:
            self._references.hold(block)

    def make_writable(self, block: int) -> CopyOnWrite | None:
        """Call before writing into `block` of a table. None: nobody else can see it, write in place.

        Otherwise copy `source` to `target` and put `target` (one reference, nameless) into the table instead
        of `block`, whose reference is gone already. Copies must run in the order in which they were returned
        and before the step's writes: the source may be evicted, and be a later target, at once.
        Raises OutOfBlocks.
        """
        self._references.require_active((block,), "write")
        if self._references[block] == 1 and self._index.identity_of(block) is None:
            return None
        self._require_available(1)
        target = self._take()
        self._drop(block)
        return CopyOnWrite(source=block, target=target)

    def publish(self, block: int, identity: BlockId) -> int:
        """Makes a full active block known by its identity; returns the block that is known by it from now on.

        That is another block if the identity was known already; then `block` stays nameless (it will not be
        cached), and the caller may swap it for the other: `acquire([identity])`, then `release([block])`.
        Publishing the same identity again changes nothing; another identity raises BlockMisuse.
        """
        self._references.require_active((block,), "publish")
        if not isinstance(identity, bytes) or len(identity) != ID_BYTES:
            raise BlockMisuse(f"An identity is {ID_BYTES} bytes, not {identity!r}.", block=block)
        if not self.prefix_caching:
            return block
        known = self._index.identity_of(block)
        if known is None:
            return self._index.insert(block, identity)
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

    def forget(self, ids: Iterable[BlockId]) -> int:
        """Makes these identities unknown and returns how many were known.

        Cached blocks become free; active ones stay with their holders and become free afterwards. Not counted
        as evictions.
        """
        forgotten = 0
        for identity in ids:
            block = self._index.block_of(identity)
            if block is None:
                continue
            self._index.drop(block)
            forgotten += 1
            if self._references[block] == 0:
                self._cached -= 1
                self._unheld.remove(block)
                self._unheld.push_front(block)
        return forgotten

    def drop_cached(self) -> int:
        """Frees all cached blocks and returns how many. Not counted as evictions. O(free + cached)."""
        dropped = self._cached
        for block in self._unheld:
            self._index.drop(block)
        self._cached = 0
        return dropped

    def check_integrity(self, tables: Iterable[Sequence[int]] | None = None) -> None:
        """Proves every rule of the bookkeeping; raises IntegrityError with all broken ones. O(num_blocks).

        With `tables` (all there are) it also proves that each reference count is the block's number of
        occurrences in them.
        """
        violations = find_violations(self._references, self._index, self._unheld, self._cached, tables)
        if violations:
            raise IntegrityError(violations)

    def _require_available(self, count: int) -> None:
        if count > len(self._unheld):
            raise OutOfBlocks(need=count, have=len(self._unheld))

    def _take(self) -> int:
        # The one place where a victim is chosen.
        block = self._unheld.pop_front()
        if self._index.drop(block):
            self._cached -= 1
            self.evicted_blocks += 1
        self._references.hold(block)
        return block

    def _drop(self, block: int) -> None:
        if not self._references.drop(block):
            return
        if self._index.identity_of(block) is None:
            self._unheld.push_front(block)
        else:
            self._unheld.push_back(block)
            self._cached += 1
