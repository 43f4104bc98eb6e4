"""What a pin is, and what the answer to a wish for one says."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from lamina_kvtier.errors import new_decision_id
from lamina_kvtier.identity import ID_BYTES, BlockId

__all__ = ["Denial", "Floor", "Granting", "Pin", "PinCount", "PinGrant"]

_RECORD_VERSION = 1


class Floor(StrEnum):
    """The lowest tier to which a pinned block may sink."""

    HOST = "host"
    GPU = "gpu"


class Granting(StrEnum):
    GRANTED = "granted"
    CLIPPED = "clipped"  # the head of the prefix only
    DENIED = "denied"


class Denial(StrEnum):
    """Why a prefix is not pinned, or not all of it."""

    PIN_LIMIT = "pin_limit"
    NO_FULL_BLOCK = "no_full_block"  # the prefix is shorter than a block
    NO_SUCH_TIER = "no_such_tier"
    POLICY_NOT_LOADED = "policy_not_loaded"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """A lease on the prefix `ids`. Times in seconds; `*_at` of the book's wall clock.

    Unless it is hit it ends at `expires_at`, and at `created_at + hard_max_s` in any case. `clipped_blocks` were
    asked for, but are not covered (any more).
    """

    pin_id: str
    namespace: str
    floor: Floor
    ids: tuple[BlockId, ...]
    ttl_s: float
    hard_max_s: float
    created_at: float
    expires_at: float
    hits: int = 0
    last_hit_at: float | None = None
    clipped_blocks: int = 0

    @property
    def ends_at(self) -> float:
        """Beyond this no hit keeps it."""
        return self.created_at + self.hard_max_s

    def used(self, now: float) -> Pin:
        """After a hit: counted and refreshed."""
        expires_at = max(self.expires_at, min(now + self.ttl_s, self.ends_at))
        return replace(self, hits=self.hits + 1, last_hit_at=now, expires_at=expires_at)

    def renewed(self, ttl_s: float, now: float) -> Pin:
        """With another time to live, counted from now."""
        return replace(self, ttl_s=ttl_s, expires_at=min(now + ttl_s, self.ends_at))

    def clipped(self, blocks: int) -> Pin:
        """With only its first blocks."""
        return replace(self, ids=self.ids[:blocks], clipped_blocks=self.clipped_blocks + len(self.ids) - blocks)

    def to_record(self) -> dict[str, Any]:
        """As values that JSON can hold; `from_record` reads them back."""
        return {
            "version": _RECORD_VERSION,
            "pin_id": self.pin_id,
            "namespace": self.namespace,
            "floor": self.floor.value,
            "ids": [identity.hex() for identity in self.ids],
            "ttl_s": self.ttl_s,
            "hard_max_s": self.hard_max_s,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            "hits": self.hits,
            "last_hit_at": self.last_hit_at,
            "clipped_blocks": self.clipped_blocks,
        }

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Pin:
        """Raises ValueError for what `to_record` did not write."""
        try:
            values = dict(record)
            if values.pop("version") != _RECORD_VERSION:
                raise ValueError("it is of another version")
            values["floor"] = Floor(values["floor"])
            values["ids"] = tuple(bytes.fromhex(identity) for identity in values["ids"])
            pin = cls(**values)
            _require_sound(pin)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"This is not the record of a pin: {error}.") from error
        return pin


@dataclass(frozen=True, slots=True)
class PinCount:
    """A namespace's pins in one tier: `blocks` distinct ones, which cost `units` of its pin `limit`."""

    pins: int
    blocks: int
    units: int
    limit: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PinGrant:
    """The answer: `blocks` of the prefix are leased by `pin` (None: none).

    `need` units were wanted beyond what is pinned already, `have` were left of the pin `limit`; `retry_after_s`:
    when the first of the namespace's own pins ends, if that would help.
    """

    granting: Granting
    reason: Denial | None
    pin: Pin | None
    blocks: int
    limit: int
    need: int
    have: int
    retry_after_s: float | None
    decision_id: str = field(default_factory=new_decision_id)


def _require_sound(pin: Pin) -> None:
    texts = (pin.pin_id, pin.namespace)
    if not all(isinstance(text, str) for text in texts) or not pin.pin_id:
        raise ValueError("its names are no texts")
    if not pin.ids or any(len(identity) != ID_BYTES for identity in pin.ids) or len(set(pin.ids)) != len(pin.ids):
        raise ValueError(f"it needs different identities of {ID_BYTES} bytes")
    if type(pin.hits) is not int or type(pin.clipped_blocks) is not int:
        raise ValueError("its counts are no whole numbers")
    times = (pin.ttl_s, pin.hard_max_s, pin.created_at, pin.expires_at)
    if not all(math.isfinite(value) for value in times) or not 0 < pin.ttl_s <= pin.hard_max_s:
        raise ValueError("its times make no sense")
    if not pin.created_at <= pin.expires_at <= pin.ends_at:
        raise ValueError("it expires before it was made, or after its hard maximum")
