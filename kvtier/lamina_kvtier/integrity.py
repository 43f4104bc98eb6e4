"""Proof of the manager's bookkeeping: every rule, checked against every block. O(blocks), reads only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from lamina_kvtier.blocks import ReferenceCounts
from lamina_kvtier.free_list import FreeList
from lamina_kvtier.makers import Makers
from lamina_kvtier.prefix_index import PrefixIndex
from lamina_kvtier.reclaim import ReclaimOrder

__all__ = ["Books", "find_violations"]


@dataclass(frozen=True, slots=True)
class Books:
    """All that a manager knows. `cached` and `leased` are its counters: cached blocks, and the pinned ones of them."""

    references: ReferenceCounts
    index: PrefixIndex
    makers: Makers
    unheld: FreeList
    cached: int
    leased: int
    is_pinned: Callable[[int], bool]
    owned: ReclaimOrder | None


def find_violations(books: Books, tables: Iterable[Sequence[int]] | None) -> list[str]:
    """Every broken rule, one sentence each; empty if all is well."""
    broken = books.unheld.broken_links()
    found = [*broken, *books.index.contradictions(), *books.makers.contradictions(books.index), *_states(books)]
    if not broken:  # walking a broken ring might never end
        found += _order(books)
        found += _owners(books)
    if tables is not None:
        found += _tables(books.references, tables)
    return found


def _states(books: Books) -> list[str]:
    """A block is in the free list if and only if nobody holds or pins it, so free + active + cached == total."""
    references, unheld = books.references, books.unheld
    found: list[str] = []
    active = leased = 0
    for block in range(len(references)):
        count = references[block]
        active += count > 0
        if count < 0:
            found.append(f"block {block}: reference count {count}")
        if count == 0 and books.is_pinned(block):
            leased += 1
            if block in unheld:
                found.append(f"block {block}: pinned, but in the free list")
        elif (count == 0) != (block in unheld):
            where = "in" if block in unheld else "not in"
            found.append(f"block {block}: reference count {count}, but {where} the free list")
    if active != references.active:
        found.append(f"{active} blocks are active, but {references.active} were counted")
    if leased != books.leased:
        found.append(f"{leased} cached blocks are pinned, but {books.leased} were counted")
    return found


def _order(books: Books) -> list[str]:
    """Free blocks come before cached ones, and the counter knows how many are cached."""
    found: list[str] = []
    seen = books.leased
    for block in books.unheld:
        if books.index.identity_of(block) is not None:
            seen += 1
        elif seen > books.leased:
            found.append(f"block {block}: free, but queued behind a cached block")
    if seen != books.cached:
        found.append(f"{seen} blocks are cached, but {books.cached} were counted")
    return found


def _owners(books: Books) -> list[str]:
    """Each block that is not free is paid for by one namespace, and the ledger's sums are those of the blocks."""
    if books.owned is None:
        return []
    idle = [block for block in books.unheld if books.index.identity_of(block) is not None]
    in_use = (block for block in range(len(books.references)) if block not in books.unheld)
    return books.owned.contradictions(idle, in_use)


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
