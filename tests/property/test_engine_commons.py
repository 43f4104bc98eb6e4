"""Quotas and pins over a running engine: any interleaving keeps the books, the promises and the outputs."""

from __future__ import annotations

import random
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fixtures.engines import collect, drive, request, tiny_core
from lamina.engine.commons import Commons
from lamina.errors import ExceedsQuota, LimitExceeded, QuotaNotCoverable
from lamina.types import FinishReason, GenerationRequest, PinOrder, PinRecord, QuotaPolicy, TierQuota
from lamina.wiring.backends import Backend, TorchBackend
from lamina.wiring.tiers import MakeTiers, build_tiers
from lamina_kvtier.memory_tier import MemoryStore
from support.ahead import AheadBackend
from support.below import Below

_SCRATCH = TemporaryDirectory(prefix="lamina-tests-")
_STORE = Path(_SCRATCH.name) / "store"
_EXPECTED: dict[tuple[object, ...], list[int]] = {}
TENANTS = ("a", "b", "c")
BLOCK = 16
BLOCK_BYTES = 4096  # of the tiny model


def expected(item: GenerationRequest) -> list[int]:
    """The request alone on a roomy engine without quotas; remembered, since few distinct requests are drawn."""
    key = (item.prompt_token_ids, item.sampling)
    if key not in _EXPECTED:
        core = tiny_core(_STORE, prefix_caching=False, max_batch_tokens=512)
        _EXPECTED[key] = drive(core, [item])[0][item.request_id, 0]
        core.close()
    return _EXPECTED[key]


def prompt(seed: int, length: int) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(range(3, 211), k=length))


@st.composite
def quotas(draw: st.DrawFn, most: int, unit: int = 1) -> TierQuota:
    """`most`: that may be reserved, in blocks of `unit`; bytes need not be whole blocks."""
    reserved = draw(st.integers(0, most)) * unit
    more = draw(st.none() | st.integers(0, 12 * unit))
    pins = draw(st.integers(0, reserved))
    return TierQuota(reserved=reserved, limit=None if more is None else reserved + more, pin_limit=pins)


@st.composite
def policies(draw: st.DrawFn) -> list[QuotaPolicy]:
    weights = st.sampled_from([1.0, 3.0])
    return [
        QuotaPolicy(namespace=name, weight=draw(weights), gpu=draw(quotas(8)), host=draw(quotas(4, BLOCK_BYTES)))
        for name in draw(st.sets(st.sampled_from(TENANTS)))
    ]


class CommonsMachine(RuleBasedStateMachine):
    """A small pool, three tenants, policies that come and go; with and without host memory below."""

    backend: Backend = TorchBackend()

    def tiers(self, host: int, seed: int) -> MakeTiers:
        """What the engine has below its pool."""
        return build_tiers

    @initialize(
        chunk=st.sampled_from([8, 40]),
        blocks=st.integers(10, 22),
        host=st.sampled_from([0, 6, 14, 256]),
        even=st.booleans(),
    )
    def start(self, chunk: int, blocks: int, host: int, even: bool) -> None:
        """`host`: blocks. `even`: policy is there, and each may pin a quarter of both tiers; else there is none yet."""
        self.core = tiny_core(
            _STORE,
            backend=self.backend,
            tiers=self.tiers(host, blocks),
            num_blocks=blocks,
            max_batch_tokens=chunk,
            max_running=4,
            max_waiting=64,
            host_kv_bytes=host * BLOCK_BYTES,
        )
        self.now = 1000.0
        self.host = self.core._tiers.commons_of_host
        self.core.commons = Commons(self.core.scheduler.kv, self.core._root, self.core._tiers, clock=lambda: self.now)
        self.saved: set[tuple[str, bytes]] = set()  # pinned in host memory and computed: it must be in a tier
        if even:
            gpu, below = (TierQuota(reserved=n // 4, pin_limit=n // 4) for n in (blocks, host * BLOCK_BYTES))
            each = [QuotaPolicy(namespace=name, gpu=gpu, host=below if host else TierQuota()) for name in TENANTS]
            self.core.commons.set_quotas(each)
        self.requests: dict[str, GenerationRequest] = {}
        self.orders: dict[str, PinOrder] = {}
        self.cancelled: set[str] = set()
        self.changed = False  # policy, while requests were under way
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.endings: dict[tuple[str, int], FinishReason] = {}

    @rule(wanted=policies())
    def set_quotas(self, wanted: list[QuotaPolicy]) -> None:
        before = self.core.commons.report()
        tier = self.uncovered(wanted)
        if tier is None:
            self.core.commons.set_quotas(wanted)
            self.changed = True
            return
        with pytest.raises(QuotaNotCoverable) as refusal:
            self.core.commons.set_quotas(wanted)
        assert refusal.value.need > refusal.value.have
        assert refusal.value.tier == tier
        assert self.core.commons.report() == before

    def uncovered(self, wanted: list[QuotaPolicy]) -> str | None:
        """The first tier that cannot cover this policy."""
        report = self.core.commons.report()
        if sum(policy.gpu.reserved for policy in wanted) > report.coverable:
            return "gpu"
        if report.host is None:
            return "host" if any(policy.host.reserved for policy in wanted) else None
        slots = [self.slots(policy.host) for policy in wanted]
        return "host" if sum(slots) > (report.host.coverable or 0) // BLOCK_BYTES else None

    def slots(self, quota: TierQuota) -> int:
        """What is reserved, in whole blocks: rounded up, but no limit is exceeded."""
        reserved = -(-quota.reserved // BLOCK_BYTES)
        return reserved if quota.limit is None else min(reserved, quota.limit // BLOCK_BYTES)

    @rule(
        seed=st.integers(0, 3),
        length=st.sampled_from([1, 16, 17, 33, 60]),
        tenant=st.sampled_from(TENANTS),
        count=st.integers(1, 3),
    )
    def submit(self, seed: int, length: int, tenant: str, count: int) -> None:
        name = f"r{len(self.requests)}"
        item = request(name, prompt(seed, length), tenant=tenant, n=count, max_tokens=7)
        try:
            self.core.submit(item)
        except (ExceedsQuota, LimitExceeded):
            return  # it could never fit; half of the queue is this tenant's
        self.requests[name] = item

    @rule(steps=st.integers(1, 4))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            collect(self.core.step(), self.tokens, self.endings)
            self.core.check_integrity()

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.requests)))
        self.core.cancel(name)
        self.cancelled.add(name)

    @rule(
        seed=st.integers(0, 3),
        length=st.sampled_from([8, 33, 60]),
        tenant=st.sampled_from(TENANTS),
        floor=st.sampled_from(["gpu", "host"]),
    )
    def pin(self, seed: int, length: int, tenant: str, floor: str) -> None:
        order = PinOrder(namespace=tenant, token_ids=prompt(seed, length), floor=floor, ttl_s=10.0, hard_max_s=40.0)
        answer = self.core.commons.pin(order)
        assert (answer.pin is None) == (answer.status == "denied")
        assert (answer.reason == "no_such_tier") == (floor == "host" and self.host is None)
        if answer.pin is not None:
            self.orders[answer.pin.pin_id] = order
            assert answer.pin.blocks + answer.pin.clipped_blocks == length // BLOCK

    @precondition(lambda self: self.core.commons.report().pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        pin = data.draw(st.sampled_from(self.core.commons.report().pins))
        self.core.commons.unpin(pin.namespace, pin.pin_id)

    @rule(seconds=st.integers(1, 8))
    def time_passes(self, seconds: int) -> None:
        self.now += seconds

    @precondition(lambda self: not self.core.has_work())
    @rule()
    def records_bring_the_same_pins_back(self) -> None:
        """As after a restart, but into the same pool."""
        commons = self.core.commons
        pins = commons.report().pins
        records = [
            PinRecord(
                pin_id=pin.pin_id,
                order=PinOrder(
                    namespace=pin.namespace,
                    token_ids=self.orders[pin.pin_id].token_ids[: pin.blocks * BLOCK],
                    floor=pin.floor,
                    ttl_s=pin.ttl_s,
                    hard_max_s=pin.hard_max_s,
                ),
                created_at=pin.created_at,
                expires_at=pin.expires_at,
                hits=pin.hits,
                last_hit_at=pin.last_hit_at,
                clipped_blocks=pin.clipped_blocks,
            )
            for pin in pins
        ]
        for pin in pins:
            commons.unpin(pin.namespace, pin.pin_id)
        assert sorted(pin.pin_id for pin in commons.restore(records)) == sorted(pin.pin_id for pin in pins)
        assert commons.report().pins == pins
        assert commons.restore(records) == ()
        self.core.check_integrity()

    @invariant()
    def the_books_agree(self) -> None:
        if not hasattr(self, "core"):
            return
        self.core.check_integrity()
        report, usage = self.core.commons.report(), self.core.scheduler.kv.usage()
        assert sum(tenant.active for tenant in report.tenants) == usage.active
        assert sum(tenant.cached + tenant.pinned for tenant in report.tenants) == usage.cached
        assert sum(tenant.pinned for tenant in report.tenants) == usage.pinned
        if self.host is not None:
            below = self.host.tier.usage()
            assert sum(tenant.host_bytes for tenant in report.tenants) == (below.total - below.free) * BLOCK_BYTES
            assert sum(tenant.host_pending_bytes for tenant in report.tenants) == below.writing * BLOCK_BYTES
            assert sum(tenant.host_pinned_bytes for tenant in report.tenants) >= below.pinned * BLOCK_BYTES
            assert all(t.host_pinned_bytes + t.host_pending_bytes <= t.host_bytes for t in report.tenants)

    @invariant()
    def what_is_pinned_in_host_memory_is_never_lost(self) -> None:
        """Once it was computed, it is on the device or below, whoever wants the room."""
        if not hasattr(self, "core") or self.host is None:
            return
        pinned, kv = set(self.host.tier.leases()), self.core.scheduler.kv
        there = {(n, i) for n, i in pinned if kv.find(i) is not None or self.host.tier.knows(i)}
        assert self.saved & pinned <= there
        self.saved = there

    @invariant()
    def pinned_blocks_stay(self) -> None:
        """What a pin had in the pool at the last look is there now."""
        if not hasattr(self, "core"):
            return
        resident = {pin.pin_id: (pin.blocks, pin.resident_blocks) for pin in self.core.commons.report().pins}
        for pin_id, (blocks, there) in getattr(self, "resident", {}).items():
            if pin_id in resident and resident[pin_id][0] == blocks:
                assert resident[pin_id][1] >= there
        self.resident = resident

    def teardown(self) -> None:
        if not hasattr(self, "core"):
            return
        for _ in range(3000):
            if not self.core.has_work():
                break
            collect(self.core.step(), self.tokens, self.endings)
        assert not self.core.has_work(), "the engine made no progress"
        for name, item in self.requests.items():
            if name in self.cancelled:
                continue
            ends = {self.endings[name, i] for i in range(item.sampling.n)}
            # What gave way cannot come back if policy has made it impossible since: one choice of several, too.
            assert ends == {FinishReason.LENGTH} or (self.changed and ends <= {FinishReason.LENGTH, FinishReason.ERROR})
            if ends == {FinishReason.LENGTH}:
                assert self.tokens[name, 0] == expected(item)
        self.core.check_integrity()
        ledger = self.core.scheduler.kv.ledger
        assert ledger is not None
        assert all(account.pending == 0 for account in ledger.accounts.values())
        assert self.core.stats().blocks_active == 0
        self.all_pinned_gets_below()
        self.core.close()

    def all_pinned_gets_below(self) -> None:
        """There is room for it, since pins come out of a reservation; copies take a moment."""
        if self.host is None:
            return
        until = time.monotonic() + 20
        while self.host.pins.due(1000) or self.host.tier.usage().writing:
            self.core._tiers.settle()
            assert time.monotonic() < until, "a pinned block never got into host memory"
        self.core.check_integrity()


class AheadCommonsMachine(CommonsMachine):
    """The same while every step is launched before the one before it has landed."""

    backend = AheadBackend()


class StoredCommonsMachine(AheadCommonsMachine):
    """And with a store below that all engines share, and that loses, garbles and delays."""

    def tiers(self, host: int, seed: int) -> MakeTiers:
        return Below(host=host, store=_SHARED, seed=seed, shared=True) if host else build_tiers


_SHARED = MemoryStore(limit=1 << 20)
_SETTINGS = settings(
    max_examples=15,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
TestCommonsMachine = CommonsMachine.TestCase
TestCommonsMachine.settings = _SETTINGS
TestAheadCommonsMachine = AheadCommonsMachine.TestCase
TestAheadCommonsMachine.settings = _SETTINGS
TestStoredCommonsMachine = StoredCommonsMachine.TestCase
TestStoredCommonsMachine.settings = _SETTINGS
