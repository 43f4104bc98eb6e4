"""Quotas and pins over a running engine: any interleaving keeps the books, the promises and the outputs."""

from __future__ import annotations

import random
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fixtures.engines import collect, drive, request, tiny_core
from lamina.engine.commons import Commons
from lamina.errors import ExceedsQuota, LimitExceeded, QuotaNotCoverable
from lamina.types import FinishReason, GenerationRequest, PinOrder, PinRecord, QuotaPolicy
from lamina.wiring.backends import Backend, TorchBackend
from support.ahead import AheadBackend

_SCRATCH = TemporaryDirectory(prefix="lamina-tests-")
_STORE = Path(_SCRATCH.name) / "store"
_EXPECTED: dict[tuple[object, ...], list[int]] = {}
TENANTS = ("a", "b", "c")
BLOCK = 16


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
def policies(draw: st.DrawFn) -> list[QuotaPolicy]:
    found = []
    for name in draw(st.sets(st.sampled_from(TENANTS))):
        reserved = draw(st.integers(0, 8))
        limit = draw(st.none() | st.integers(reserved, reserved + 12))
        pins = draw(st.integers(0, reserved))
        weight = draw(st.sampled_from([1.0, 3.0]))
        found.append(
            QuotaPolicy(
                namespace=name, reserved_blocks=reserved, limit_blocks=limit, pin_limit_blocks=pins, weight=weight
            )
        )
    return found


class CommonsMachine(RuleBasedStateMachine):
    """A small pool, three tenants, policies that come and go; with and without host memory below."""

    backend: Backend = TorchBackend()

    @initialize(chunk=st.sampled_from([8, 40]), blocks=st.integers(10, 22), host=st.sampled_from([0, 1 << 20]))
    def start(self, chunk: int, blocks: int, host: int) -> None:
        self.core = tiny_core(
            _STORE,
            backend=self.backend,
            num_blocks=blocks,
            max_batch_tokens=chunk,
            max_running=4,
            max_waiting=64,
            host_kv_bytes=host,
        )
        self.now = 1000.0
        self.core.commons = Commons(self.core.scheduler.kv, self.core._root, clock=lambda: self.now)
        self.core.scheduler.prefix_hit = self.core.commons.hit
        self.requests: dict[str, GenerationRequest] = {}
        self.orders: dict[str, PinOrder] = {}
        self.cancelled: set[str] = set()
        self.changed = False  # policy, while requests were under way
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.endings: dict[tuple[str, int], FinishReason] = {}

    @rule(wanted=policies())
    def set_quotas(self, wanted: list[QuotaPolicy]) -> None:
        before = self.core.commons.report()
        if sum(policy.reserved_blocks for policy in wanted) > before.coverable:
            with pytest.raises(QuotaNotCoverable) as refusal:
                self.core.commons.set_quotas(wanted)
            assert refusal.value.need > refusal.value.have
            assert self.core.commons.report().loaded == before.loaded
            return
        self.core.commons.set_quotas(wanted)
        self.changed = True

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

    @rule(seed=st.integers(0, 3), length=st.sampled_from([8, 33, 60]), tenant=st.sampled_from(TENANTS))
    def pin(self, seed: int, length: int, tenant: str) -> None:
        order = PinOrder(namespace=tenant, token_ids=prompt(seed, length), ttl_s=10.0, hard_max_s=40.0)
        answer = self.core.commons.pin(order)
        assert (answer.pin is None) == (answer.status == "denied")
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

    @invariant()
    def the_books_agree(self) -> None:
        if not hasattr(self, "core"):
            return
        self.core.check_integrity()
        report, usage = self.core.commons.report(), self.core.scheduler.kv.usage()
        assert sum(tenant.active for tenant in report.tenants) == usage.active
        assert sum(tenant.cached + tenant.pinned for tenant in report.tenants) == usage.cached
        assert sum(tenant.pinned for tenant in report.tenants) == usage.pinned

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
            assert ends == {FinishReason.LENGTH} or (self.changed and ends == {FinishReason.ERROR})
            if ends == {FinishReason.LENGTH}:
                assert self.tokens[name, 0] == expected(item)
        self.core.check_integrity()
        ledger = self.core.scheduler.kv.ledger
        assert ledger is not None
        assert all(account.pending == 0 for account in ledger.accounts.values())
        assert self.core.stats().blocks_active == 0
        self.core.close()


class AheadCommonsMachine(CommonsMachine):
    """The same while every step is launched before the one before it has landed."""

    backend = AheadBackend()


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
