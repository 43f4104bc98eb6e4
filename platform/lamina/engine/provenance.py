"""Who wants to know where a choice's cached blocks came from, and why others did not come."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from lamina.engine.request import Choice
from lamina_kvtier.identity import BlockId
from lamina_kvtier.reasons import Reason

__all__ = ["Provenance", "Unasked"]


class Provenance(Protocol):
    """Hears of what tiers below the device did for a choice. Called on the engine's thread; it must not call back."""

    def arrived(self, choice: Choice, origins: Mapping[BlockId, str], fates: Mapping[BlockId, Reason]) -> None:
        """`origins`: blocks that were brought up for it, from "host" or "store"; `fates`: why those asked for below
        did not come. Once when it starts, and again for what arrives while it runs; disjoint each time."""
        ...


class Unasked:
    """Nobody listens."""

    def arrived(self, choice: Choice, origins: Mapping[BlockId, str], fates: Mapping[BlockId, Reason]) -> None:
        """Nothing is kept."""
