"""Which block holds which identity: a one-to-one map, looked up from both sides."""

from __future__ import annotations

from collections.abc import Iterable

from lamina_kvtier.identity import BlockId

__all__ = ["PrefixIndex"]


class PrefixIndex:
    """At most one identity per block and one block per identity. Every operation is O(1) per block.

    A flat map suffices for prefix search because an identity already contains its whole past.
    """

    __slots__ = ("_blocks", "_identities")

    def __init__(self, num_blocks: int) -> None:
        self._blocks: dict[BlockId, int] = {}
        self._identities: list[BlockId | None] = [None] * num_blocks

    def __len__(self) -> int:
        return len(self._blocks)

    def block_of(self, identity: BlockId) -> int | None:
        return self._blocks.get(identity)

    def identity_of(self, block: int) -> BlockId | None:
        return self._identities[block]

    def known_prefix(self, ids: Iterable[BlockId]) -> list[int]:
        """The blocks of `ids` up to the first unknown one."""
        blocks: list[int] = []
        for identity in ids:
            block = self._blocks.get(identity)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def insert(self, block: int, identity: BlockId) -> int:
        """Gives the nameless `block` its identity unless another has it; returns the one that has it now."""
        canonical = self._blocks.setdefault(identity, block)
        if canonical == block:
            self._identities[block] = identity
        return canonical

    def drop(self, block: int) -> bool:
        """Makes `block` nameless; False if it was."""
        identity = self._identities[block]
        if identity is None:
            return False
        del self._blocks[identity]
        self._identities[block] = None
        return True

    def contradictions(self) -> list[str]:
        """Where the two directions disagree, one sentence each. O(blocks)."""
        found = [
            f"index: identity {identity.hex()[:12]} points to block {block}, which does not have it"
            for identity, block in self._blocks.items()
            if self._identities[block] != identity
        ]
        named = sum(identity is not None for identity in self._identities)
        if named != len(self._blocks):
            found.append(f"index: {named} blocks have an identity, but {len(self._blocks)} identities are known")
        return found
