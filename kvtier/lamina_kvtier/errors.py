"""Everything that can go wrong with KV blocks.

    KvError
    ├── OutOfBlocks      (need, have)     more blocks wanted than are free or evictable
    ├── BlockMisuse      (block)          a broken rule: double release, publish of a free block, bad number
    ├── InvalidIdentity                   a field or token id that cannot be part of a block's identity
    └── IntegrityError   (violations)     the bookkeeping contradicts itself: a bug here or in the tables

The first three leave every state as it was.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["BlockMisuse", "IntegrityError", "InvalidIdentity", "KvError", "OutOfBlocks"]

_SHOWN_VIOLATIONS = 20


class KvError(Exception):
    """Something is wrong with KV blocks."""


class OutOfBlocks(KvError):
    """More blocks were asked for than are free or evictable. Nothing was allocated; preempt or wait."""

    def __init__(self, need: int, have: int) -> None:
        self.need, self.have = need, have
        super().__init__(
            f"{need} KV blocks are needed, but only {have} are free or evictable. "
            "Release or preempt a sequence, then try again."
        )


class BlockMisuse(KvError):
    """The caller broke a rule of the block life cycle. `block` is the offending block, if there is one."""

    def __init__(self, message: str, *, block: int | None = None) -> None:
        self.block = block
        super().__init__(message)


class InvalidIdentity(KvError):
    """A field or token id cannot be part of a block's identity."""


class IntegrityError(KvError):
    """The bookkeeping contradicts itself. `violations` holds every broken rule, one sentence each."""

    def __init__(self, violations: Sequence[str]) -> None:
        self.violations = tuple(violations)
        shown = "; ".join(self.violations[:_SHOWN_VIOLATIONS])
        hidden = len(self.violations) - _SHOWN_VIOLATIONS
        more = f"; and {hidden} more" if hidden > 0 else ""
        super().__init__(f"KV bookkeeping is broken ({len(self.violations)} violations): {shown}{more}")
