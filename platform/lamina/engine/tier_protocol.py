"""What scheduler and step ask of the tiers below the device pool. No tensors; `tiers.py` answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from lamina.engine.provenance import Provenance
from lamina.engine.request import Choice
from lamina.engine.store_memory import StoreMemory
from lamina.engine.tier_quotas import PoolOnly, TiersBelow
from lamina_kvtier.host_tier import HostTier
from lamina_kvtier.identity import BlockId
from lamina_kvtier.tier import StoreTier

if TYPE_CHECKING:  # it loads torch, which the engine's twin does without
    from lamina_kernels.gpu.block_mover import HostBlocks

__all__ = ["Allocate", "Below", "NoTiers", "TierGate", "TierStats", "Tiers"]

Allocate = Callable[[int], list[int]]  # so many device blocks for a running choice, out of what it was promised


class TierGate(Protocol):
    """What the scheduler asks of the tiers."""

    def is_ready(self, choice: Choice) -> bool:
        """False while blocks for this waiting choice are on their way up; the first call starts that."""
        ...

    def look_ahead(self, choices: Iterable[Choice]) -> None:
        """Begins to bring up blocks for these waiting choices, the next ones first, within bounds."""
        ...

    def started(self, choice: Choice, allocate: Allocate, give_back: Callable[[int], object]) -> None:
        """The choice holds its prefix itself now. More may come while it runs: into blocks that `allocate` gives, and
        `give_back` hears how many of them are released unused."""
        ...

    def computes_until(self, choice: Choice) -> int | None:
        """Blocks of its prompt up to which this running choice should compute now, since the next ones are worth
        waiting for; None: as far as it goes. May say less for a while, but not for ever."""
        ...

    def took(self, choice: Choice, ids: Sequence[BlockId]) -> int:
        """The running choice took these blocks; returns how many of them `allocate` had given for it."""
        ...

    def gives_way(self, choice: Choice) -> None:
        """The choice is about to lose its blocks, and will want them again."""
        ...

    def left(self, choice: Choice) -> None:
        """The choice will not start, or runs no more."""
        ...

    def give_back(self) -> bool:
        """Lets go of blocks that were fetched for choices which have not started; True if there were any."""
        ...

    def held_tables(self) -> list[list[int]]:
        """Device blocks that are held for fetches, for `KvManager.check_integrity`."""
        ...


@dataclass(frozen=True, slots=True)
class TierStats:
    """Blocks; all but the first two only grow."""

    host_total: int = 0
    host_used: int = 0
    spilled: int = 0
    promoted: int = 0
    stored: int = 0
    loaded: int = 0
    declined: int = 0  # recomputing was cheaper
    failed: int = 0  # put, load or copy that did not work out


@dataclass(frozen=True, slots=True)
class Below:
    """What there is below the device, for whoever explains or verifies it between steps."""

    host: HostTier
    arena: HostBlocks
    store: StoreTier | None


class Tiers(TierGate, TiersBelow, Protocol):
    """What the engine core asks of them."""

    @property
    def below(self) -> Below | None:
        """None: the device pool is all there is."""
        ...

    @property
    def store_memory(self) -> StoreMemory | None:
        """What is known to be in the store; None: there is nothing below."""
        ...

    def report_to(self, provenance: Provenance) -> None:
        """From now on this one hears where blocks came from. Before the first request."""
        ...

    def settle(self) -> None:
        """Takes in what has ended since the last call."""
        ...

    def before_step(self, written: Iterable[int]) -> None:
        """The next step writes into these device blocks."""
        ...

    def after_step(self, tokens: int, seconds: float) -> None:
        """A step of so many tokens was launched and took so long."""
        ...

    def idle(self) -> float | None:
        """Goes on between requests with what none of them waits for. In how many seconds to call it again; None: only
        after another step."""
        ...

    def forget(self, ids: Sequence[BlockId]) -> None:
        """What was saved of these blocks may not be what they should be: the step that computed them failed."""
        ...

    @property
    def is_busy(self) -> bool:
        """Whether a waiting choice's blocks are on their way."""
        ...

    def stats(self) -> TierStats: ...

    def check_integrity(self) -> None: ...

    def drain(self, tend: Callable[[], object]) -> None:
        """Before `close`, when nothing runs any more: saves what outlives this engine, for a bounded time.

        `tend` is called again and again meanwhile: it goes on with what waited for transfers to end.
        """
        ...

    def close(self) -> None: ...


class NoTiers(PoolOnly):
    """The device pool alone."""

    below: Below | None = None
    store_memory: StoreMemory | None = None

    def report_to(self, provenance: Provenance) -> None:
        """Nothing ever comes up."""

    def is_ready(self, choice: Choice) -> bool:
        return True

    def look_ahead(self, choices: Iterable[Choice]) -> None:
        """There is nothing to bring up."""

    def started(self, choice: Choice, allocate: Allocate, give_back: Callable[[int], object]) -> None:
        """Nothing was fetched."""

    def computes_until(self, choice: Choice) -> int | None:
        return None

    def took(self, choice: Choice, ids: Sequence[BlockId]) -> int:
        return 0

    def gives_way(self, choice: Choice) -> None:
        """There is nowhere to save its blocks."""

    def left(self, choice: Choice) -> None:
        """Nothing was fetched."""

    def give_back(self) -> bool:
        return False

    def held_tables(self) -> list[list[int]]:
        return []

    def settle(self) -> None:
        """Nothing is under way."""

    def before_step(self, written: Iterable[int]) -> None:
        """Nothing is read beside a step."""

    def after_step(self, tokens: int, seconds: float) -> None:
        """Nothing is spilled."""

    def idle(self) -> float | None:
        return None

    def forget(self, ids: Sequence[BlockId]) -> None:
        """Nothing was saved."""

    @property
    def is_busy(self) -> bool:
        return False

    def stats(self) -> TierStats:
        return TierStats()

    def check_integrity(self) -> None:
        """Nothing to check."""

    def drain(self, tend: Callable[[], object]) -> None:
        """There is nowhere to save anything."""

    def close(self) -> None:
        """Nothing to close."""
