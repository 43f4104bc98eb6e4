"""Pins, quotas and admission over one manager: any history, and every promise is still kept.

The promises: the books agree after every rule; no namespace has more pinned than its pin limit; a pin is a prefix of
what was asked for; pinned blocks are not evicted; and a request that is not `never` runs as soon as the requests
before it have ended, whatever is pinned.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lamina_kvtier import (
    Charge,
    Denial,
    Floor,
    Granting,
    IdentityChain,
    KvManager,
    OutOfBlocks,
    OverLimit,
    Pin,
    PinBook,
    PinTier,
    Quota,
    QuotaBook,
    QuotaNotCoverable,
    UnknownPin,
    Verdict,
)

NAMES = ("a", "b", "c")
MAX_BLOCKS = 12
HOST_UNITS = 10  # what a block costs in host memory


class HostPins:
    """Host memory's side of a pin: counts leases."""

    def __init__(self) -> None:
        self.leases: dict[tuple[str, bytes], int] = {}

    def pin(self, ids: tuple[bytes, ...], namespace: str) -> None:
        for identity in ids:
            self.leases[namespace, identity] = self.leases.get((namespace, identity), 0) + 1

    def unpin(self, ids: tuple[bytes, ...], namespace: str) -> None:
        for identity in ids:
            self.leases[namespace, identity] -= 1
            if not self.leases[namespace, identity]:
                del self.leases[namespace, identity]


@dataclass
class Running:
    """One admitted request: its prompt's identities, its table, and what it may still take."""

    name: str
    ids: list[bytes]
    charge: Charge
    table: list[int] = field(default_factory=list)


def identities(name: str, tokens: list[int]) -> list[bytes]:
    chain = IdentityChain(name.encode() * 32, 1)
    chain.extend(tokens)
    return chain.ids


@st.composite
def quotas_of(draw: st.DrawFn) -> Quota:
    reserved = draw(st.integers(0, 6))
    return Quota(
        reserved=reserved,
        limit=reserved + draw(st.integers(0, 6)),
        pin_limit=draw(st.integers(0, reserved)),
        weight=draw(st.sampled_from([1, 2])),
    )


names = st.sampled_from(NAMES)
prompts = st.lists(st.integers(0, 1), max_size=5)
floors = st.sampled_from(list(Floor))
places = st.integers(0, 20)
policies = st.dictionaries(names, quotas_of())


def scaled(quota: Quota) -> Quota:
    numbers = (quota.reserved, quota.limit, quota.pin_limit)
    reserved, limit, pin_limit = (number * HOST_UNITS + 3 for number in numbers)  # not a whole number of blocks
    return Quota(reserved, limit, pin_limit, quota.weight)


class PinMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(2, MAX_BLOCKS),
        headroom=st.integers(0, 2),
        shares=st.sampled_from([(1, 1, 1), (2, 1, 0), (1, 0, 0), None]),
        more=st.integers(0, 4),
    )
    def start(self, num_blocks: int, headroom: int, shares: tuple[int, ...] | None, more: int) -> None:
        """Policy is there, with all that is reserved pinnable, or not yet."""
        self.now = 1000.0
        self.book = QuotaBook(num_blocks, headroom)
        self.host_book = QuotaBook(10_000)
        self.manager = KvManager(num_blocks, 1, quotas=self.book)
        assert self.manager.ledger is not None
        self.ledger = self.manager.ledger
        self.open_books(self.manager)
        self.running: list[Running] = []
        self.asked: dict[str, list[bytes]] = {}  # by pin
        if shares is not None:
            parts = [self.book.coverable * share // sum(shares) for share in shares]
            self.load({name: Quota(part, part + more, part) for name, part in zip(NAMES, parts, strict=True)})

    def open_books(self, manager: KvManager) -> None:
        self.host = HostPins()
        tiers = {Floor.GPU: PinTier(self.book, manager), Floor.HOST: PinTier(self.host_book, self.host, HOST_UNITS)}
        self.pins = PinBook(tiers, clock=lambda: self.now)

    # Policy

    @rule(loaded=policies)
    def load(self, loaded: dict[str, Quota]) -> None:
        if sum(quota.reserved for quota in loaded.values()) <= self.book.coverable:
            self.host_book.load({name: scaled(quota) for name, quota in loaded.items()})
            self.book.load(loaded)
        else:
            with pytest.raises(QuotaNotCoverable):
                self.book.load(loaded)

    @precondition(lambda self: self.book.loaded)
    @rule(name=names, quota=quotas_of())
    def change(self, name: str, quota: Quota) -> None:
        """Also below what is pinned now: then the newest pins lose their tails."""
        others = self.book.reserved - self.book.of(name).reserved
        if others + quota.reserved <= self.book.coverable:
            self.book.set(name, quota)
            self.host_book.set(name, scaled(quota))

    # Requests

    @rule(name=names, prompt=prompts, more=st.integers(1, 6))  # a request has at least one token to draw
    def request(self, name: str, prompt: list[int], more: int) -> None:
        """Admitted by its worst case; then it takes its prompt's blocks, and they must be there."""
        ids = identities(name, prompt)
        found = self.manager.preview(ids)
        worst = len(ids) + more
        shared = found.known - found.cached
        decision = self.ledger.admit(name, worst, shared=shared, pinned=found.pinned)
        if not decision.admitted:
            assert decision.need > decision.have
            return
        running = Running(name, ids, self.ledger.reserve(name, worst - shared))
        running.table = self.manager.acquire(ids, running.charge)
        self.pins.hit(name, ids[: len(running.table)])
        self.running.append(running)
        assert running.charge.pending == worst - found.known
        self.take(running, len(ids) - len(running.table))
        for block, identity in zip(running.table, ids, strict=True):
            self.manager.publish(block, identity)

    def take(self, running: Running, count: int) -> None:
        """What was promised is there, unless policy changed or idle blocks were pinned since.

        Then nothing is taken, and there is somebody to preempt: a namespace that uses more than its reservation.
        """
        try:
            running.table += self.manager.allocate(count, owner=running.name, charge=running.charge)
        except OutOfBlocks as refusal:
            self.ledger.refund(running.charge)
            if not isinstance(refusal, OverLimit):
                accounts = self.ledger.accounts.values()
                assert any(account.firm > 0 and account.committed > account.quota.reserved for account in accounts)
            running.ids = running.ids[: len(running.table)]

    @precondition(lambda self: self.running)
    @rule(place=places)
    def decode(self, place: int) -> None:
        running = self.running[place % len(self.running)]
        if running.charge.pending:
            self.take(running, 1)

    @precondition(lambda self: self.running)
    @rule(place=places)
    def finish(self, place: int) -> None:
        self.end(self.running.pop(place % len(self.running)))

    def end(self, running: Running) -> None:
        self.ledger.refund(running.charge)
        self.manager.release(running.table)

    @rule(count=st.integers(1, 4))
    def without_admission(self, count: int) -> None:
        """A namespace without a policy takes and leaves what it can get: pinned blocks are not among it."""
        try:
            table = self.manager.allocate(count, owner="other")
        except OutOfBlocks:
            return
        self.manager.release(table)

    # Pins

    @rule(name=names, prompt=st.lists(st.integers(0, 1), min_size=1, max_size=5), floor=floors)
    def serve_and_pin(self, name: str, prompt: list[int], floor: Floor) -> None:
        """A whole request whose prefix is pinned while it runs, as a client that pins does it."""
        before = len(self.running)
        self.request(name, prompt, 0)
        self.pin(name, prompt, floor, 20, 40)
        if len(self.running) > before:
            self.end(self.running.pop())

    @rule(name=names, prompt=prompts, floor=floors, ttl=st.integers(1, 20), more=st.integers(0, 40))
    def pin(self, name: str, prompt: list[int], floor: Floor, ttl: int, more: int) -> None:
        ids = identities(name, prompt)
        before = self.pins.count(name, floor)
        grant = self.pins.pin(name, ids, floor=floor, ttl_s=ttl, hard_max_s=ttl + more)
        if grant.granting is Granting.DENIED:
            assert grant.pin is None
            assert grant.blocks == 0
            assert grant.reason in (Denial.PIN_LIMIT, Denial.NO_FULL_BLOCK, Denial.POLICY_NOT_LOADED)
            return
        assert grant.pin is not None
        self.asked[grant.pin.pin_id] = ids
        after = self.pins.count(name, floor)
        assert after.blocks - before.blocks <= grant.blocks == len(grant.pin.ids)
        assert (grant.granting is Granting.GRANTED) == (grant.need <= grant.have) == (grant.blocks == len(ids))

    @precondition(lambda self: self.pins.listing())
    @rule(place=places, ttl=st.integers(1, 20))
    def renew(self, place: int, ttl: int) -> None:
        pin = self.any_pin(place)
        renewed = self.pins.renew(pin.namespace, pin.pin_id, ttl_s=ttl)
        assert renewed.expires_at == min(self.now + ttl, pin.ends_at)

    @precondition(lambda self: self.pins.listing())
    @rule(place=places)
    def unpin(self, place: int) -> None:
        pin = self.any_pin(place)
        for stranger in (name for name in NAMES if name != pin.namespace):
            with pytest.raises(UnknownPin):
                self.pins.unpin(stranger, pin.pin_id)
        self.pins.unpin(pin.namespace, pin.pin_id)
        with pytest.raises(UnknownPin):
            self.pins.get(pin.namespace, pin.pin_id)

    def any_pin(self, place: int) -> Pin:
        pins = self.pins.listing()
        return pins[place % len(pins)]

    @rule(seconds=st.integers(1, 15))
    def time_passes(self, seconds: int) -> None:
        self.now += seconds
        expired = self.pins.expire()
        assert all(pin.expires_at <= self.now for pin in expired)
        assert all(pin.expires_at > self.now for pin in self.pins.listing())

    @rule()
    def restart(self) -> None:
        """The pool is empty, policy is not known yet, pins come back from their records."""
        records = json.loads(json.dumps(self.pins.to_records()))
        before = self.pins.listing()
        capacity, headroom, loaded, known = (
            self.book.capacity,
            self.book.headroom,
            self.book.loaded,
            self.book.policies(),
        )
        hosts = self.host_book.policies()
        self.book, self.host_book = QuotaBook(capacity, headroom), QuotaBook(10_000)
        self.manager = KvManager(capacity, 1, quotas=self.book)
        assert self.manager.ledger is not None
        self.ledger, self.running = self.manager.ledger, []
        self.open_books(self.manager)
        assert self.pins.restore(records) == before
        if loaded:
            self.host_book.load(hosts)
            self.book.load(known)
        assert self.pins.listing() == before

    # What must hold after every rule

    @invariant()
    def the_books_agree(self) -> None:
        self.manager.check_integrity([running.table for running in self.running])
        self.ledger.check_integrity()
        self.pins.check_integrity()
        leases: dict[tuple[str, bytes], int] = {}
        for pin in self.pins.listing():
            for identity in pin.ids if pin.floor is Floor.HOST else ():
                leases[pin.namespace, identity] = leases.get((pin.namespace, identity), 0) + 1
        assert self.host.leases == leases

    @invariant()
    def pins_are_prefixes_within_their_limit(self) -> None:
        for pin in self.pins.listing():
            asked = self.asked[pin.pin_id]
            assert list(pin.ids) == asked[: len(pin.ids)]
            assert len(pin.ids) + pin.clipped_blocks == len(asked)
        for (name, floor), count in self.pins.counts().items():
            book = self.book if floor is Floor.GPU else self.host_book
            assert count.units <= count.limit == book.of(name).pin_limit or not book.loaded

    @invariant()
    def pinned_blocks_stay(self) -> None:
        """What is pinned and was there at the last look is there now, unless the pin ended since."""
        pinned = {(pin.namespace, key) for pin in self.pins.listing() if pin.floor is Floor.GPU for key in pin.ids}
        there = {key for key in pinned if self.manager.match([key[1]])}
        last_manager, last = getattr(self, "last", (None, set()))
        assert last_manager is not self.manager or last & pinned <= there
        self.last = (self.manager, there)

    @invariant()
    def no_sequence_of_pins_makes_an_admissible_request_impossible(self) -> None:
        """Whoever asks for no more than may always be had gets it once all others have ended."""
        if not self.book.loaded:
            return
        for running in self.running:
            self.end(running)
        self.running = []
        for name in (*NAMES, "other"):
            ceiling = self.book.ceiling(name)
            assert ceiling >= self.book.of(name).reserved - self.book.of(name).pin_limit
            assert self.ledger.admit(name, ceiling + 1).verdict is Verdict.NEVER
            assert self.ledger.admit(name, ceiling).admitted, name
            assert self.manager.available_to(name) >= ceiling


class BusyPinMachine(PinMachine):
    """The same without ending all requests after each rule: only the last state is asked for its promise."""

    @invariant()
    def no_sequence_of_pins_makes_an_admissible_request_impossible(self) -> None:
        return

    def teardown(self) -> None:
        if hasattr(self, "book") and self.book.loaded:
            super().no_sequence_of_pins_makes_an_admissible_request_impossible()
            for name in NAMES:
                charge = self.ledger.reserve(name, self.book.ceiling(name))
                table = self.manager.allocate(charge.pending, owner=name, charge=charge)
                self.manager.release(table)
            self.the_books_agree()


TestPinMachine = PinMachine.TestCase
TestPinMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestBusyPinMachine = BusyPinMachine.TestCase
TestBusyPinMachine.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
