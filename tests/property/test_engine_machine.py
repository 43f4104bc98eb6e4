"""Any interleaving of submits, steps and cancels keeps the books balanced and the outputs right."""

from __future__ import annotations

import random
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from fixtures.engines import collect, drive, publish_adapter, request, tiny_core, write_adapter
from lamina.engine.tier_rates import Rates
from lamina.types import FinishReason, GenerationRequest
from lamina.wiring.backends import Backend, TorchBackend
from lamina.wiring.tiers import MakeTiers, build_tiers
from lamina_kvtier.memory_tier import MemoryStore
from lamina_kvtier.policies import LoadChoice, Split
from support.ahead import AheadBackend
from support.below import Below

_SCRATCH = TemporaryDirectory(prefix="lamina-tests-")
_STORE = Path(_SCRATCH.name) / "store"
_EXPECTED: dict[tuple[object, ...], list[int]] = {}


def _digests() -> list[str]:
    folder = Path(_SCRATCH.name) / "peft"
    return [publish_adapter(_STORE, write_adapter(folder / str(i), rank=4 + 5 * i, seed=i)) for i in range(2)]


DIGESTS: list[str | None] = [None, *_digests()]


def expected(item: GenerationRequest) -> list[int]:
    """The request alone on a roomy engine; remembered, since few distinct requests are drawn."""
    key = (item.prompt_token_ids, item.adapter, item.sampling)
    if key not in _EXPECTED:
        core = tiny_core(_STORE, prefix_caching=False, max_batch_tokens=512)
        _EXPECTED[key] = drive(core, [item])[0][item.request_id, 0]
        core.close()
    return _EXPECTED[key]


class EngineMachine(RuleBasedStateMachine):
    """A small pool, so that preemption and eviction happen all the time."""

    backend: Backend = TorchBackend()

    def tiers(self, blocks: int) -> MakeTiers:
        """What the engine has below its pool of so many blocks."""
        return build_tiers

    @initialize(chunk=st.sampled_from([4, 16, 40]), blocks=st.integers(8, 20), cache=st.booleans())
    def start(self, chunk: int, blocks: int, cache: bool) -> None:
        self.core = tiny_core(
            _STORE,
            backend=self.backend,
            tiers=self.tiers(blocks) if cache else build_tiers,
            num_blocks=blocks,
            max_batch_tokens=chunk,
            max_running=4,
            prefix_caching=cache,
        )
        self.requests: dict[str, GenerationRequest] = {}
        self.cancelled: set[str] = set()
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.endings: dict[tuple[str, int], FinishReason] = {}

    @rule(
        seed=st.integers(0, 3),
        length=st.sampled_from([1, 15, 16, 17, 33, 60]),
        adapter=st.sampled_from(DIGESTS),
        tenant=st.sampled_from(["a", "b"]),
        count=st.integers(1, 3),
        drawn=st.booleans(),
    )
    def submit(self, seed: int, length: int, adapter: str | None, tenant: str, count: int, drawn: bool) -> None:
        name = f"r{len(self.requests)}"
        prompt = random.Random(seed).choices(range(3, 211), k=length)
        sampling = {"temperature": 1.0, "seed": seed} if drawn else {}
        item = request(name, prompt, adapter=adapter, tenant=tenant, n=count, max_tokens=7, **sampling)
        self.core.submit(item)
        self.requests[name] = item

    @rule(steps=st.integers(1, 4))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            collect(self.core.step(), self.tokens, self.endings)
            self.core.check_integrity()

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        if self.requests:
            name = data.draw(st.sampled_from(sorted(self.requests)))
            self.core.cancel(name)
            self.cancelled.add(name)

    @rule()
    def drop_adapter(self) -> None:
        self.core.unload_adapter(DIGESTS[1] or "")

    @invariant()
    def books_balance(self) -> None:
        if hasattr(self, "core"):
            self.core.check_integrity()

    def teardown(self) -> None:
        if not hasattr(self, "core"):
            return
        drive_on = 0
        while self.core.has_work():
            collect(self.core.step(), self.tokens, self.endings)
            drive_on += 1
            assert drive_on < 3000, "the engine made no progress"
        for name, item in self.requests.items():
            if name not in self.cancelled:
                assert self.tokens[name, 0] == expected(item)
                assert all(self.endings[name, i] is FinishReason.LENGTH for i in range(item.sampling.n))
        assert self.core.stats().blocks_active == 0
        self.core.check_integrity()
        self.core.close()


class AheadMachine(EngineMachine):
    """The same while every step is launched before the one before it has landed."""

    backend = AheadBackend()


class TieredMachine(AheadMachine):
    """And while blocks go down to host memory and a store with faults, and come back up."""

    def tiers(self, blocks: int) -> MakeTiers:
        return Below(host=10, store=_SHARED, seed=blocks)


class Halves(Rates):
    """Whatever the store has, half of it is computed meanwhile; then its load is waited for some of the time."""

    def decide(self, blocks: int, *, blocks_before: float) -> Split:
        return Split(blocks // 2, blocks - blocks // 2, LoadChoice.SPLIT, 0.0)

    def patience(self, blocks: int) -> float:
        return 0.01


class SplitMachine(AheadMachine):
    """And while the rest of a prompt comes from a store with faults, beside computing."""

    def tiers(self, blocks: int) -> MakeTiers:
        below = Below(host=10, store=_SHARED, seed=blocks)
        below.rates = Halves(16, clock=time.monotonic)
        return below


_SHARED = MemoryStore(limit=1 << 20)
_SETTINGS = settings(
    max_examples=20,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = _SETTINGS
TestAheadMachine = AheadMachine.TestCase
TestAheadMachine.settings = _SETTINGS
TestTieredMachine = TieredMachine.TestCase
TestTieredMachine.settings = _SETTINGS
TestSplitMachine = SplitMachine.TestCase
TestSplitMachine.settings = _SETTINGS
