"""One choice's prefix on its way up: looked up in the store, cut into lifts, waited for as long as that pays.

found below the device     [ host memory ][ store                                ]
load                       [ lift ][ lift ][ lift ][ lift ][ lift ][ lift ][ lift ]    starts when all have come
split                      [ lift ][ lift ][ the choice computes  ][ lift ][ lift ]    starts after the first two
compute                    [ lift ][ lift ][ the choice computes                  ]
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from lamina.engine.request import Choice
from lamina.engine.tier_lift import Lift, LiftPaths
from lamina.engine.tier_protocol import Allocate
from lamina_kvtier.identity import BlockId
from lamina_kvtier.policies import LoadChoice
from lamina_kvtier.reasons import Reason, reason_of
from lamina_kvtier.tier import BlockKey, Operation, Outcome, Tally

__all__ = ["Fetch", "begin"]

_LIFT_BYTES = 16 << 20  # enough for full speed, and small enough that the first blocks come soon and others get a turn
_PROBE_BLOCKS = 8


@dataclass(slots=True, eq=False)
class Fetch:
    """Of a choice that waits, and of one that computes the head of its prompt while the tail still comes up.

    The waiting choice is let go as soon as waiting has taken as long as computing would. What comes later is still
    used, if it comes before the choice gets there.
    """

    paths: LiftPaths
    choice: Choice
    keys: list[BlockKey]  # of what is missing on the device, from the first on
    first: int  # and its place in the prompt, in blocks
    held: list[int]  # device blocks before that, until the choice starts
    lifts: list[Lift] = field(default_factory=list)
    head: int = 0  # the choice starts when so many lifts are done
    lookup: Operation[Tally] | None = None
    allocate: Allocate | None = None  # once the choice runs
    restore: Callable[[int], object] | None = None  # so many of those were given back unused
    starts: list[int] = field(default_factory=list)  # where in the prompt each lift begins, in blocks
    pays_to_wait: bool = False  # for the running choice, which has come to a block that is still coming
    waits_since: float | None = None
    origins: dict[BlockId, str] = field(default_factory=dict)  # "host" or "store": where what came up was
    fates: dict[BlockId, Reason] = field(default_factory=dict)  # why what was asked for below did not come
    abandoned: bool = False

    @property
    def is_done(self) -> bool:
        """Nothing is under way any more."""
        return self.lookup is None and all(lift.is_done for lift in self.lifts)

    @property
    def tables(self) -> list[list[int]]:
        """Device blocks that are held for it."""
        return [self.held, *(lift.held for lift in self.lifts)]

    @property
    def _tail(self) -> int:
        """Blocks that come while the choice runs."""
        return sum(len(lift.keys) for lift in self.lifts[self.head :])

    @property
    def bytes(self) -> int:
        """Of all that it may bring up."""
        return len(self.keys) * self.paths.arena.block_bytes

    def is_ready(self) -> bool:
        """Whether the choice, whose turn it is, may start."""
        if self.lookup is None and all(lift.is_done for lift in self.lifts[: self.head]):
            return True
        return self._has_waited(len(self.keys))

    def advance(self) -> None:
        """Goes on as far as it can without waiting."""
        if self.lookup is not None and self.lookup.done():
            tally, self.lookup = self.lookup.result(), None
            if not self.abandoned:
                self._decide(tally)
        for lift in self.lifts:
            lift.advance()

    def started(self, allocate: Allocate, restore: Callable[[int], object]) -> None:
        """The choice holds itself what has come so far."""
        self._give_up(self.lifts[: self.head])
        self.let_go()
        self.allocate, self.restore, self.waits_since = allocate, restore, None

    def computes_until(self) -> int | None:
        """Blocks of the prompt up to which the running choice computes now; None: all of it."""
        coming = next((start for start, lift in zip(self.starts, self.lifts, strict=True) if not lift.is_done), None)
        if coming is None or not self.pays_to_wait:
            return None
        if self.choice.computed // self.paths.kv.block_size >= coming and self._has_waited(self._tail):
            self.pays_to_wait = False
            self._give_up(self.lifts)
            return None
        return coming

    def _give_up(self, lifts: Iterable[Lift]) -> None:
        """These were waited for long enough. They still come, and are used if they come soon."""
        late = [lift for lift in lifts if not lift.is_done]
        self.paths.counts["declined"] += sum(len(lift.keys) for lift in late)
        for lift in late:
            self._lack(lift.keys, Reason.REMOTE_DOWN)

    def _has_waited(self, blocks: int) -> bool:
        """Whether waiting for these blocks has taken as long as computing them would; the first call starts to wait."""
        if self.waits_since is None:
            self.waits_since = self.paths.clock()
        return self.paths.clock() - self.waits_since >= self.paths.rates.patience(blocks)

    def took(self, identities: Iterable[BlockId]) -> int:
        """The running choice holds these blocks itself; returns how many of them were taken out of its promise."""
        identities = list(identities)
        return sum(len(lift.let_go(identities)) for lift in self.lifts if lift.here)

    def passed(self, blocks: int) -> None:
        """The running choice has computed so many blocks: those of them that came too late are not its own any more."""
        self._restore(self.took(key.id for key in self.keys[: max(0, blocks - self.first)]))

    def let_go(self) -> bool:
        """Gives back the device blocks that have come; False if there were none. They stay cached, and are found if
        nobody takes them."""
        held, self.held = self.held, []
        self.paths.kv.release(held)
        returned = [lift.let_go(list(lift.here)) for lift in self.lifts]
        return bool(held) or any(returned)

    def abandon(self) -> None:
        """The choice does not want it any more; what is under way still has to end."""
        self.abandoned, self.restore = True, None  # nothing was promised to whoever does not run
        if self.lookup is not None:
            self.lookup.cancel()
        for lift in self.lifts:
            lift.cancel()
        self.let_go()

    def news(self) -> tuple[dict[BlockId, str], dict[BlockId, Reason]]:
        """Origins and fates that it has not told of before."""
        for lift in self.lifts:
            self.origins |= lift.origins
            self.fates |= lift.fates
            lift.origins, lift.fates = {}, {}
        news = self.origins, self.fates
        self.origins, self.fates = {}, {}
        return news

    # --- what the look-up says ----------------------------------------------------------------------------

    def _decide(self, tally: Tally) -> None:
        """Loads, splits or declines what the store has."""
        below = self.keys[sum(len(lift.keys) for lift in self.lifts) :]
        found, lost = below[: tally.blocks], below[tally.blocks :]
        self._lack(lost, reason_of(tally.outcome))
        if tally.outcome is Outcome.MISSING:
            self.paths.memory.missed(key.id for key in lost[:1])
        waiting = self.paths.loads.bytes_before(self.choice.request.tenant, self._weight)
        choice = self.paths.rates.decide(len(found), blocks_before=waiting / self.paths.arena.block_bytes)
        front = choice.compute_front
        self.paths.counts["declined"] += front
        self._lack(found[:front], _DECLINED.get(choice.reason, Reason.CHEAPER))
        start = self.first + len(self.keys) - len(below)
        if choice.load_back:
            self._lift(found[front:], start + front)
            self.pays_to_wait = front > 0
            self.head = self.head if front else len(self.lifts)
        elif found and self.paths.rates.take_probe():
            self._lift(found[-_PROBE_BLOCKS:], start + max(0, front - _PROBE_BLOCKS))

    def bring(self, keys: list[BlockKey]) -> None:
        """Blocks that are in host memory: the choice waits for them."""
        self._lift(keys, self.first)
        self.head = len(self.lifts)

    def _lift(self, keys: list[BlockKey], at: int) -> None:
        size = max(1, _LIFT_BYTES // self.paths.arena.block_bytes)
        for start in range(0, len(keys), size):
            lift = Lift(
                self.paths,
                keys[start : start + size],
                self.choice.request.tenant,
                self._weight,
                self._device_blocks,
                self._restore,
            )
            self.lifts.append(lift)
            self.starts.append(at + start)
            lift.begin()

    def _device_blocks(self, count: int) -> list[int]:
        if self.allocate is not None:
            return self.allocate(count)
        return self.paths.kv.allocate(count, owner=self.keys[0].namespace)

    def _restore(self, count: int) -> None:
        if self.restore is not None:
            self.restore(count)

    @property
    def _weight(self) -> float:
        return self.choice.request.request.weight

    def _lack(self, keys: Iterable[BlockKey], reason: Reason | None) -> None:
        if reason is not None:
            self.fates |= dict.fromkeys((key.id for key in keys), reason)


def begin(paths: LiftPaths, choice: Choice) -> Fetch | None:
    """Looks for what the device lacks of a choice's prefix; None if nothing below can help."""
    known = choice.known_ids(paths.kv.block_size)
    on_device = paths.kv.match(known)
    missing = known[on_device:]
    in_host = len(paths.host.find(missing))
    below = missing[in_host:]
    if not in_host and (not below or paths.store is None):
        return None
    keys = list(map(_namer(choice), missing))
    fetch = Fetch(paths, choice, keys, on_device, held=paths.kv.acquire(known[:on_device]))
    if in_host:
        fetch.bring(keys[:in_host])
    if below and paths.store is not None:
        fetch.lookup = paths.store.lookup(below)
    return fetch


def _namer(choice: Choice) -> Callable[[BlockId], BlockKey]:
    request = choice.request.request
    return lambda identity: BlockKey(identity, request.namespace, choice.request.adapter)


_DECLINED = {LoadChoice.DEADLINE: Reason.REMOTE_DOWN}
