"""What every tier below host memory can do, in one protocol: Redis, its in-memory twin, LMCache.

    host arena slot ──put──▶ store ──load──▶ host arena slot         (memoryviews: nothing is copied on the way)

A block's identity is the same in every tier. A store may be slow, full, lying or gone: that is an Outcome with a
reason, within the tier's own deadline, and never an exception. Exceptions (ValueError) are for the caller's mistakes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Protocol, TypeVar

from lamina_kvtier.identity import ID_BYTES, BlockId
from lamina_kvtier.quota import Quota

if TYPE_CHECKING:
    from lamina_kvtier.reasons import Reason  # reasons are explained by outcomes, which are here

__all__ = ["NO_ADAPTER", "BlockKey", "Operation", "Outcome", "StoreTier", "Tally", "TierUsage", "adapter_bytes"]

T_co = TypeVar("T_co", covariant=True)

NO_ADAPTER = bytes(32)  # in a stored block's header: computed by the base model


def adapter_bytes(digest: str | None) -> bytes:
    """An adapter's digest in hex, or None for the base model, as `BlockKey` has it. Raises ValueError."""
    return NO_ADAPTER if digest is None else bytes.fromhex(digest)


@dataclass(frozen=True, slots=True)
class BlockKey:
    """What a block is called when it is stored. Only `id` decides what it matches; the rest is written beside it."""

    id: BlockId
    namespace: str  # who pays; opaque
    adapter: bytes = NO_ADAPTER  # digest of the adapter that computed it, 32 bytes

    def __post_init__(self) -> None:
        if len(self.id) != ID_BYTES or len(self.adapter) != len(NO_ADAPTER):
            raise ValueError(f"identity and adapter digest are {ID_BYTES} bytes, not {self.id!r} and {self.adapter!r}")


class Outcome(Enum):
    """How one block fared."""

    OK = "ok"
    MISSING = "missing"  # not there, or no longer
    CORRUPT = "corrupt"  # there, but not what was stored: checksum, length, identity
    WRONG_LAYOUT = "wrong_layout"  # there and sound, but of another layout, format or codec
    UNAVAILABLE = "unavailable"  # no connection, or not tried because there was none a moment ago
    TIMEOUT = "timeout"  # the tier's deadline passed first
    REFUSED = "refused"  # the store is full, or a quota is
    CANCELLED = "cancelled"  # `Operation.cancel` came first, or the tier was closed


@dataclass(frozen=True, slots=True)
class Tally:
    """How many of the blocks asked for, and how the operation as a whole fared.

    A look-up is OK if all were found, and MISSING if the next one is not there; a deletion is OK if it was carried
    out, whatever it found. All else is the store's trouble, and then `blocks` is what was known until it struck.
    """

    blocks: int
    outcome: Outcome


class Operation(Protocol[T_co]):
    """Work under way in a tier. Any thread may ask; it always ends, at the latest at the tier's deadline."""

    def done(self) -> bool:
        """Whether it has ended: the tier has let go of all memory it was given. Never blocks."""
        ...

    def result(self, timeout: float | None = None) -> T_co:
        """Waits until it has ended. Raises TimeoutError after `timeout` seconds; then it is still under way."""
        ...

    def cancel(self) -> None:
        """Asks to stop early; what was not carried out is CANCELLED. Memory still belongs to it until `done`."""
        ...


@dataclass(frozen=True, slots=True)
class TierUsage:
    """What a tier holds, as far as it knows. Bytes include headers."""

    bytes: int
    limit: int | None  # None: not known, or none
    coverable: int | None = None  # of it could be promised to all namespaces together; None: not known
    keeps_quotas: bool = True  # False: it does not know who pays, so it can hold nobody to a limit either
    blocks: int | None = None
    by_namespace: Mapping[str, int] = field(default_factory=dict)  # bytes, where known
    puts: Mapping[Outcome, int] = field(default_factory=dict)  # blocks since the start, by outcome
    loads: Mapping[Outcome, int] = field(default_factory=dict)
    # Under quotas, blocks since the start by namespace and reason (own quota, pressure), as far as this client's puts
    # caused it: what was refused, and what was evicted for others.
    refusals: Mapping[tuple[str, Reason], int] = field(default_factory=dict)
    evictions: Mapping[tuple[str, Reason], int] = field(default_factory=dict)


class StoreTier(Protocol):
    """A tier below host memory. Several operations may be under way at once, and end in any order.

    All values and destinations of one tier have the same length, that of a block; they are contiguous views of bytes.
    They belong to the operation until it is done: values are not written, destinations not touched.
    After `close` every operation is UNAVAILABLE or CANCELLED.
    """

    @property
    def name(self) -> str:
        """For metrics and messages."""
        ...

    def put(self, keys: Sequence[BlockKey], values: Sequence[memoryview]) -> Operation[tuple[Outcome, ...]]:
        """Stores values[i] under keys[i].id; one outcome per block, and OK only for what is really kept.

        A block that is there already may be left as it is: equal identities mean equal contents. Raises ValueError.
        """
        ...

    def lookup(self, ids: Sequence[BlockId]) -> Operation[Tally]:
        """How many leading blocks are there. Some of them may be gone when they are loaded."""
        ...

    def load(
        self, ids: Sequence[BlockId], into: Sequence[memoryview], *, adapter: bytes | None = None
    ) -> Operation[tuple[Outcome, ...]]:
        """Reads block ids[i] into into[i], verified; one outcome per block. Anything but OK leaves it undefined.

        adapter: who computed them all, if the caller knows; a block whose header names another one is CORRUPT.
        Raises ValueError.
        """
        ...

    def delete(self, ids: Sequence[BlockId]) -> Operation[Tally]:
        """Makes blocks unknown; how many were there."""
        ...

    def set_quotas(self, quotas: Mapping[str, Quota], *, capacity: int | None = None) -> None:
        """From now on these rule what is kept, in bytes with headers; they replace those there were, in all replicas.

        A namespace at its limit loses its own oldest block for a new one. When the store is full, the namespace
        furthest over its share, (used - reserved) / weight, loses its oldest; never another one's within its
        reservation; else the new one is REFUSED. Of one put the tail goes, or is refused, before the head.

        capacity: bytes that may be kept, None: what the store has. Raises QuotaNotCoverable; then nothing changed.
        """
        ...

    def forget(self, namespace: str) -> Operation[Tally]:
        """Deletes all that this namespace pays for; how many there were.

        Anything but OK: there may be more. Without quotas a store need not know who pays: then it is REFUSED.
        """
        ...

    def usage(self) -> TierUsage:
        """Never blocks for long: a tier may answer with what it knew last."""
        ...

    def close(self) -> None:
        """Ends all operations and lets go of all memory before it returns. Closing twice is nothing."""
        ...
