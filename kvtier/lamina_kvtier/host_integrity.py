"""Proof of the host tier's bookkeeping: every rule, checked against every slot. O(slots), reads only."""

from __future__ import annotations

from collections import Counter

from lamina_kvtier.host_books import HostBooks
from lamina_kvtier.tier import NO_ADAPTER

__all__ = ["find_violations"]


def find_violations(books: HostBooks) -> list[str]:
    """Every broken rule, one sentence each; empty if all is well."""
    return [
        *books.index.contradictions(),
        *books.victims.violations(),
        *_states(books),
        *_writes(books),
        *_charges(books),
    ]


def _states(books: HostBooks) -> list[str]:
    """Each slot is in exactly one state, and is a victim if and only if it is known, not held and not pinned."""
    found: list[str] = []
    free = set(books.free)
    if len(free) != len(books.free):
        found.append("a slot is free twice")
    active = 0
    for slot, key in enumerate(books.keys):
        known = books.index.identity_of(slot)
        held = books.holds[slot]
        active += held > 0
        states = (slot in free) + (slot in books.writing) + (known is not None or held > 0)
        if states != 1 or held < 0:
            found.append(f"slot {slot}: it is in {states} states, with {held} holds")
        if (key is None) != (slot in free):
            found.append(f"slot {slot}: free slots, and only they, have no key")
        if known is not None and (key is None or key.id != known):
            found.append(f"slot {slot}: it is found by an identity that is not its key's")
        pinned = key is not None and books.is_pinned(key)
        evictable = known is not None and held == 0 and not pinned
        if evictable != (slot in books.victims):
            found.append(f"slot {slot}: {'missing from' if evictable else 'wrongly in'} the queue of victims")
        if slot in books.touched and held == 0:
            found.append(f"slot {slot}: used by a holder, but nobody holds it")
    if active != books.holds.active:
        found.append(f"{active} slots are held, but {books.holds.active} were counted")
    return found


def _writes(books: HostBooks) -> list[str]:
    """What arrives is being written, by the reservation that says so, and is not known yet."""
    found: list[str] = []
    for identity, slot in books.arriving.items():
        reservation = books.writing.get(slot)
        if reservation is None or reservation.key.id != identity:
            found.append(f"slot {slot}: {identity.hex()[:12]} arrives there, but is not being written")
        if books.index.block_of(identity) is not None:
            found.append(f"slot {slot}: {identity.hex()[:12]} arrives there, but is known already")
    for slot, reservation in books.writing.items():
        if reservation.slot != slot or books.keys[slot] is not reservation.key:
            found.append(f"slot {slot}: its reservation is for another slot or block")
    if any(books.pins.count(*lease) < 1 for lease in books.pins):
        found.append("an identity has less than one pin")
    return found


def _charges(books: HostBooks) -> list[str]:
    """Charges by namespace sum to the slots that are not free."""
    charged = Counter(key.namespace for key in books.keys if key is not None)
    made = Counter(key.adapter for key in books.keys if key is not None and key.adapter != NO_ADAPTER)
    found = [] if made == books.made else ["adapters are counted for other slots than they computed"]
    return found + [
        f"{namespace!r} is charged {books.charged.get(namespace, 0)} slots, but has {charged[namespace]}"
        for namespace in charged.keys() | books.charged.keys()
        if books.charged.get(namespace, 0) != charged[namespace]
    ]
