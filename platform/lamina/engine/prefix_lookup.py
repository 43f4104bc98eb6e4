"""What is known of one request's search for its prompt's blocks, from its first start to its first token."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from lamina_kvtier.identity import BlockId
from lamina_kvtier.reasons import Reason

__all__ = ["NOWHERE", "Miss", "PrefixLookup"]

NOWHERE = "none"  # the tier of a block that no tier is known to have lost


class Miss(NamedTuple):
    """Why a block was not there: the tier that lost it last, and with how much more room each tier would have it."""

    tier: str  # gpu | host | store | NOWHERE
    reason: Reason
    room: tuple[tuple[str, int], ...] = ()  # (tier, bytes)


@dataclass(slots=True)
class PrefixLookup:
    origins: dict[BlockId, str] = field(default_factory=dict)  # of blocks that a fetch brought up: host | store
    fates: dict[BlockId, Reason] = field(default_factory=dict)  # of those that it did not
    missing: dict[BlockId, Miss] = field(default_factory=dict)
