"""Why a block was not there: every prefix miss, decline and eviction has one of these."""

from __future__ import annotations

from enum import Enum

from lamina_kvtier.tier import Outcome

__all__ = ["Reason", "reason_of"]


class Reason(Enum):
    NEVER_STORED = "never_stored"  # nobody computed it here, or so long ago that it is forgotten
    OWN_QUOTA = "own_quota"  # its namespace was at its own limit
    PRESSURE = "pressure"  # the tier was full
    TTL = "ttl"  # its time was up
    REMOTE_DOWN = "remote_down"  # the store was away, or too slow
    INTEGRITY = "integrity"  # it was there and did not pass verification
    CHEAPER = "recompute_cheaper"  # declined: computing it again is faster than fetching it
    DELETED = "deleted"  # somebody asked for that: an adapter retired, a tenant erased


_OF_OUTCOME = {
    Outcome.MISSING: Reason.NEVER_STORED,
    Outcome.CORRUPT: Reason.INTEGRITY,
    Outcome.WRONG_LAYOUT: Reason.INTEGRITY,
    Outcome.UNAVAILABLE: Reason.REMOTE_DOWN,
    Outcome.TIMEOUT: Reason.REMOTE_DOWN,
    Outcome.REFUSED: Reason.OWN_QUOTA,
    Outcome.CANCELLED: Reason.CHEAPER,  # we stop a transfer only when its block is wanted sooner than it comes
}


def reason_of(outcome: Outcome) -> Reason | None:
    """Why a block that fared so in a lower tier is a miss; None if it is not one."""
    return _OF_OUTCOME.get(outcome)
