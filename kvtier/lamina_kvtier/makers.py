"""Which adapter computed each block that can be found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from lamina_kvtier.prefix_index import PrefixIndex
from lamina_kvtier.tier import NO_ADAPTER

__all__ = ["Makers"]


class Makers:
    """Digests by block; equal ones are one object, so that a block costs a pointer. Every operation is O(1).

    Nameless blocks have `NO_ADAPTER`, as those of the base model. Digests that no block has are not kept.
    """

    __slots__ = ("_counts", "_digests", "_interned")

    def __init__(self, num_blocks: int) -> None:
        self._digests = [NO_ADAPTER] * num_blocks
        self._counts: Counter[bytes] = Counter()  # blocks by digest, without those of the base model
        self._interned: dict[bytes, bytes] = {}

    def __getitem__(self, block: int) -> bytes:
        return self._digests[block]

    @property
    def counts(self) -> Mapping[bytes, int]:
        """Blocks by digest, without those of the base model."""
        return self._counts

    def note(self, block: int, adapter: bytes) -> None:
        """The nameless `block` gets a name: `adapter` computed it."""
        if adapter == NO_ADAPTER:
            return
        self._digests[block] = self._interned.setdefault(adapter, adapter)
        self._counts[adapter] += 1

    def forget(self, block: int) -> None:
        """`block` is nameless from now on."""
        adapter = self._digests[block]
        if adapter is NO_ADAPTER:
            return
        self._digests[block] = NO_ADAPTER
        self._counts[adapter] -= 1
        if not self._counts[adapter]:
            del self._counts[adapter], self._interned[adapter]

    def contradictions(self, index: PrefixIndex) -> list[str]:
        """What disagrees with the names, or with the counts, one sentence each. O(blocks)."""
        found = [
            f"block {block}: it is nameless, but an adapter computed it"
            for block, adapter in enumerate(self._digests)
            if adapter != NO_ADAPTER and index.identity_of(block) is None
        ]
        counted = Counter(adapter for adapter in self._digests if adapter != NO_ADAPTER)
        if counted != self._counts or counted.keys() != self._interned.keys():
            found.append("makers: adapters are counted for other blocks than they computed")
        return found
