"""Errors of the adapter package.

LoraError
├── AdapterRejected       violations: every reason, in one report
├── AdapterMissing        digest
├── InvalidDigest         digest
├── OutOfAdapterMemory    need, have, limit (bytes)
│   └── OutOfAdapterSlots slots
├── SlotEmpty             slot
└── SlotsCorrupt          what no longer holds
"""

from __future__ import annotations

from collections.abc import Iterable

__all__ = [
    "MAX_VIOLATIONS",
    "AdapterMissing",
    "AdapterRejected",
    "InvalidDigest",
    "LoraError",
    "OutOfAdapterMemory",
    "OutOfAdapterSlots",
    "SlotEmpty",
    "SlotsCorrupt",
]

MAX_VIOLATIONS = 200
"""A report lists this many violations and counts the rest, so that a hostile file cannot make it huge."""


class LoraError(Exception):
    """Something went wrong with a LoRA adapter."""


class AdapterRejected(LoraError):
    """The adapter was refused; `violations` lists every reason."""

    def __init__(self, violations: Iterable[str]) -> None:
        found = tuple(violations)
        rest = len(found) - MAX_VIOLATIONS
        self.violations = found if rest <= 0 else (*found[:MAX_VIOLATIONS], f"and {rest} more violations")
        super().__init__("The adapter was refused: " + "; ".join(self.violations))


class AdapterMissing(LoraError):
    """No adapter with this digest is in the store."""

    def __init__(self, digest: str) -> None:
        self.digest = digest
        super().__init__(f"No adapter {digest} is in the store; upload it first.")


class InvalidDigest(LoraError):
    """This is not an adapter digest."""

    def __init__(self, digest: str) -> None:
        self.digest = digest
        super().__init__(f"{digest!r:.100} is not an adapter digest (64 lower-case hexadecimal digits).")


class OutOfAdapterMemory(LoraError):
    """The adapter does not fit beside the adapters in use."""

    def __init__(self, *, need: int, have: int, limit: int) -> None:
        self.need, self.have, self.limit = need, have, limit
        super().__init__(
            f"The adapter needs {need} bytes, but only {have} of {limit} bytes are not held by adapters in use. "
            "Retry when they finish, or raise the adapter memory limit."
        )


class OutOfAdapterSlots(OutOfAdapterMemory):
    """As many adapters are in use as may be at a time."""

    def __init__(self, *, need: int, have: int, limit: int, slots: int) -> None:
        self.need, self.have, self.limit, self.slots = need, have, limit, slots
        LoraError.__init__(
            self, f"All {slots} adapter slots are in use. Retry when a request finishes, or raise the number of slots."
        )


class SlotEmpty(LoraError):
    """A batch names a slot that holds no adapter in use."""

    def __init__(self, slot: int) -> None:
        self.slot = slot
        super().__init__(f"Slot {slot} holds no acquired adapter; acquire it before batching its rows.")


class SlotsCorrupt(LoraError):
    """The bookkeeping of the adapter slots contradicts itself."""
