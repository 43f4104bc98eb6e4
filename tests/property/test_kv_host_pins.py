"""Two tiers under quotas, with pins of both floors: what is pinned and once computed is never lost.

An engine's moves without its bytes: requests compute, blocks are spilled and saved, some copies fail, quotas come and
go, everything is too small. After every step the books of both tiers agree, and no promise is broken.
"""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lamina_kvtier import (
    Floor,
    Granting,
    IdentityChain,
    KvManager,
    Ledger,
    OutOfBlocks,
    PinBook,
    PinTier,
    Quota,
    QuotaBook,
    QuotaNotCoverable,
)
from lamina_kvtier.host_pins import HostPins
from lamina_kvtier.host_tier import HostTier, Reservation
from lamina_kvtier.quota_policy import QuotaPolicy
from lamina_kvtier.reasons import Reason
from lamina_kvtier.reclaim import ReclaimOrder
from lamina_kvtier.tier import BlockKey

NAMES = ("a", "b", "c")
names = st.sampled_from(NAMES)
prompts = st.lists(st.integers(0, 1), min_size=1, max_size=5)


def identities(name: str, tokens: list[int]) -> list[bytes]:
    chain = IdentityChain(name.encode() * 32, 1)
    chain.extend(tokens)
    return chain.ids


@st.composite
def quotas_of(draw: st.DrawFn) -> Quota:
    reserved = draw(st.integers(0, 5))
    return Quota(
        reserved, reserved + draw(st.integers(0, 6)), draw(st.integers(0, reserved)), draw(st.sampled_from([1, 2]))
    )


policies = st.dictionaries(names, quotas_of())


class HostPinMachine(RuleBasedStateMachine):
    @initialize(blocks=st.integers(4, 10), slots=st.integers(2, 8), even=st.booleans())
    def start(self, blocks: int, slots: int, even: bool) -> None:
        """`even`: each has a third of host memory reserved, and may pin it all."""
        self.now = 0.0
        self.device, self.below = QuotaBook(blocks, 1), QuotaBook(slots, slots // 8)
        self.kv = KvManager(blocks, 1, quotas=self.device)
        self.ledger = Ledger(self.below)
        self.host = HostTier(slots, 1, policy=QuotaPolicy(ReclaimOrder(slots, self.ledger)))
        self.host_pins = HostPins(self.kv, self.host)
        tiers = {Floor.GPU: PinTier(self.device, self.kv), Floor.HOST: PinTier(self.below, self.host_pins)}
        self.book = PinBook(tiers, clock=lambda: self.now)
        self.writing: list[list[Reservation]] = []
        self.here: set[tuple[str, bytes]] = set()  # host-pinned, and seen in a tier: must be in one
        if even:
            self.device.load({})
            self.below.load({name: Quota(slots // 4, slots, slots // 4) for name in NAMES})

    # --- what an engine does ------------------------------------------------------------------------------

    @rule(name=names, tokens=prompts)
    def compute(self, name: str, tokens: list[int]) -> None:
        """A request runs to its end, if there is room."""
        ids = identities(name, tokens)
        table = self.kv.acquire(ids)
        try:
            table += self.kv.allocate(len(ids) - len(table), owner=name)
        except OutOfBlocks:
            pass
        else:
            for block, identity in zip(table, ids, strict=True):
                self.kv.publish(block, identity)
        self.kv.release(table)

    @rule(limit=st.integers(1, 3))
    def save(self, limit: int) -> None:
        """Starts to copy what has to be saved."""
        self.reserve([key for _, key in self.host_pins.due(limit)])

    @rule(count=st.integers(1, 4))
    def spill(self, count: int) -> None:
        """Starts to copy what would be evicted next."""
        victims = self.kv.next_victims(count)[::-1]
        keys = [BlockKey(identity, self.kv.owner_of(block) or "") for block, identity in victims]
        self.reserve([key for key in keys if not self.host.knows(key.id)])

    @rule(name=names, tokens=prompts)
    def load(self, name: str, tokens: list[int]) -> None:
        """Starts to read from a store."""
        self.reserve([BlockKey(identity, name) for identity in identities(name, tokens)])

    def reserve(self, keys: list[BlockKey]) -> None:
        before = Counter({name: self.host.slots_of(name) for name in NAMES})
        given = [reservation for reservation in self.host.reserve(keys) if reservation is not None]
        for name in NAMES if self.below.loaded else ():
            quota, now = self.below.of(name), self.host.slots_of(name)
            assert now <= max(quota.limit, before[name])
            if all(key.namespace != name for key in keys):
                assert now >= min(quota.reserved, before[name])  # others took nothing that is reserved
        if given:
            self.writing.append(given)

    @precondition(lambda self: self.writing)
    @rule(place=st.integers(0, 20), works=st.sampled_from([True, True, False]))
    def end_copy(self, place: int, works: bool) -> None:
        written = self.writing.pop(place % len(self.writing))
        if works:
            self.host.commit(written)
        else:
            self.host.abandon(written)

    @rule(name=names, tokens=prompts, on_device=st.booleans())
    def a_block_turns_out_to_be_wrong(self, name: str, tokens: list[int], on_device: bool) -> None:
        """It is nobody's loss that it is forgotten."""
        ids = identities(name, tokens)
        if on_device:
            self.kv.forget(ids)
        else:
            self.host.forget(ids, Reason.INTEGRITY)
        self.here -= {(name, identity) for identity in ids}

    # --- what tenants and operators do --------------------------------------------------------------------

    @rule(name=names, tokens=prompts, floor=st.sampled_from([Floor.HOST, Floor.HOST, Floor.GPU]))
    def pin(self, name: str, tokens: list[int], floor: Floor) -> None:
        answer = self.book.pin(name, identities(name, tokens), floor=floor, ttl_s=9, hard_max_s=30)
        assert (answer.pin is None) == (answer.granting is Granting.DENIED)

    @precondition(lambda self: self.book.listing())
    @rule(place=st.integers(0, 20))
    def unpin(self, place: int) -> None:
        pins = self.book.listing()
        pin = pins[place % len(pins)]
        self.book.unpin(pin.namespace, pin.pin_id)

    @rule(wanted=policies, below=policies)
    def set_quotas(self, wanted: dict[str, Quota], below: dict[str, Quota]) -> None:
        """Both tiers or none."""
        try:
            self.device.require_coverable(wanted)
            self.below.require_coverable(below)
        except QuotaNotCoverable:
            return
        self.device.load(wanted)
        self.below.load(below)

    @rule(seconds=st.integers(1, 5))
    def time_passes(self, seconds: int) -> None:
        self.now += seconds
        self.book.expire()

    # --- what must hold -----------------------------------------------------------------------------------

    @invariant()
    def the_books_agree(self) -> None:
        if not hasattr(self, "kv"):
            return
        self.kv.check_integrity([])
        self.host.check_integrity()
        self.host_pins.check_integrity()
        self.book.check_integrity()
        self.ledger.check_integrity({name: self.host.slots_of(name) for name in NAMES})

    @invariant()
    def nothing_pinned_is_lost(self) -> None:
        if not hasattr(self, "kv"):
            return
        pinned = set(self.host.leases())
        there = {(n, i) for n, i in pinned if self.kv.find(i) is not None or self.host.knows(i)}
        self.here &= pinned
        assert self.here <= there
        self.here = there

    def teardown(self) -> None:
        """Every pin whose blocks are on the device gets them into host memory, in the end."""
        if not hasattr(self, "kv"):
            return
        for written in self.writing:
            self.host.abandon(written)
        for _ in range(3):
            given = self.host.reserve([key for _, key in self.host_pins.due(100)])
            self.host.commit([reservation for reservation in given if reservation is not None])
        assert self.host_pins.due(100) == []
        assert self.kv.usage().pinned <= sum(self.device.of(name).pin_limit for name in NAMES)


TestHostPinMachine = HostPinMachine.TestCase
TestHostPinMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_pins_wait_for_policy() -> None:
    """So no guard can come before there is a reservation that will end it."""
    book = QuotaBook(4)
    kv = KvManager(4, 1, quotas=QuotaBook(4))
    host = HostTier(4, 1, policy=QuotaPolicy(ReclaimOrder(4, Ledger(book))))
    pins = PinBook({Floor.HOST: PinTier(book, HostPins(kv, host))})
    answer = pins.pin("a", identities("a", [1]), floor=Floor.HOST, ttl_s=9, hard_max_s=9)
    assert (answer.granting, answer.retry_after_s) == (Granting.DENIED, pytest.approx(1.0))
