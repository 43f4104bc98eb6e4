"""Proof of the manager's bookkeeping: every rule, checked against every block. O(blocks), reads only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from lamina_kvtier.blocks import ReferenceCounts
from lamina_kvtier.free_list import FreeList
from lamina_kvtier.prefix_index import PrefixIndex

__all__ = ["find_violations"]


def find_violations(
    references: ReferenceCounts,
    index: PrefixIndex,
    unheld: FreeList,
    cached: int,
    tables: Iterable[Sequence[int]] | None,
) -> list[str]:
    """Every broken rule, one sentence each; empty if all is well. `cached` is the manager's counter."""
    broken = unheld.broken_links()
    found = [*broken, *index.contradictions(), *_states(references, unheld)]
    if not broken:  # walking a broken ring might never end
        found += _order(index, unheld, cached)
    if tables is not None:
        found += _tables(references, tables)
    return found


def _states(references: ReferenceCounts, unheld: FreeList) -> list[str]:
    """A block is in the free list if and only if nobody holds it, so free + active + cached == total."""
    found: list[str] = []
    active = 0
    for block in range(len(references)):
        count = references[block]
        active += count > 0
        if count < 0:
            found.append(f"block {block}: reference count {count}")
        if (count == 0) != (block in unheld):
            where = "in" if block in unheld else "not in"
            found.append(f"block {block}: reference count {count}, but {where} the free list")
    if active != references.active:
        found.append(f"{active} blocks are active, but {references.active} were counted")
    return found


def _order(index: PrefixIndex, unheld: FreeList, cached: int) -> list[str]:
    """Free blocks come before cached ones, and the counter knows how many are cached."""
    found: list[str] = []
    seen = 0
    for block in unheld:
        if index.identity_of(block) is not None:
            seen += 1
        elif seen:
            found.append(f"block {block}: free, but queued behind a cached block")
    if seen != cached:
        found.append(f"{seen} blocks are cached, but {cached} were counted")
    return found


def _tables(references: ReferenceCounts, tables: Iterable[Sequence[int]]) -> list[str]:
    """Each reference is an entry in a table, and each entry a reference."""
    held = Counter(block for table in tables for block in table)
    found = [
        f"block {block}: reference count {references[block]}, but {held[block]} table entries"
        for block in range(len(references))
        if references[block] != held[block]
    ]
    found += [
        f"block {block}: in a table, but there is no such block" for block in held if not _exists(block, references)
    ]
    return found


def _exists(block: int, references: ReferenceCounts) -> bool:
    return 0 <= block < len(references)
