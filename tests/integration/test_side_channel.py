"""What one tenant has cached, no other can tell: not by counts, not by work, not by time to first token.

Tenant b asks for what tenant a has cached, and for what nobody has. Whatever tier a's blocks are in, pinned or not, of
whatever adapter: the engine does the same work for both questions, and a guess by time is as good as a coin. Tenant a
itself sees the difference, so the probe works.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from torch import Tensor

from fixtures.engines import TINY, drive, publish_adapter, request, tiny_core, write_adapter
from lamina.engine.batch import Batch
from lamina.engine.core import EngineCore
from lamina.engine.runner import Runner
from lamina.types import PinOrder, QuotaPolicy, TierQuota
from lamina_kvtier.memory_tier import MemoryStore
from support.below import Below

BLOCK = 16
LONG = 5 * BLOCK + 1  # tokens of a prompt
PAIRS = 12
_CHUNK = 32
QUOTAS = [QuotaPolicy(namespace=name, gpu=TierQuota(reserved=PAIRS * 10, pin_limit=PAIRS * 8)) for name in "ab"]


SMALLEST = TINY | {
    "num_hidden_layers": 1,
    "hidden_size": 24,
    "intermediate_size": 24,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
}


@dataclass(frozen=True)
class Probe:
    """One request, up to its first token."""

    cached: int
    computed: int  # tokens through the model
    steps: int


class CountingRunner:
    """Counts the tokens that the model computes."""

    def __init__(self, inner: Runner) -> None:
        self._inner = inner
        self.tokens = 0

    def forward(self, batch: Batch) -> Tensor:
        self.tokens += batch.num_tokens
        return self._inner.forward(batch)

    def warm_up(self) -> None:
        self._inner.warm_up()


class Prober:
    """Asks an engine on behalf of tenants. Every prompt is a new one unless it is given."""

    def __init__(self, core: EngineCore, adapter: str | None, seed: int = 0) -> None:
        self.core, self.adapter = core, adapter
        self.runner = CountingRunner(core._runner)
        core._runner = self.runner
        self._dice = random.Random(seed)
        self._count = 0

    def prompt(self, length: int = LONG) -> list[int]:
        return self._dice.choices(range(3, 211), k=length)

    def ask(self, tenant: str, prompt: Sequence[int]) -> Probe:
        self._count += 1
        name = f"probe{self._count}"
        self.core.submit(request(name, prompt, adapter=self.adapter, tenant=tenant, max_tokens=1))
        before, steps = self.runner.tokens, 0
        while True:
            steps += 1
            for event in self.core.step():
                if event.token_ids:
                    assert event.request_id == name
                    return Probe(event.cached_tokens, self.runner.tokens - before, steps)

    def pairs(self, tenant: str, cached: Sequence[Sequence[int]]) -> list[tuple[Probe, Probe]]:
        """For each prompt that a has cached: the probe of that, and of one that nobody has. They take turns."""
        found = []
        for number, prompt in enumerate(cached):
            if number % 2:
                other = self.ask(tenant, self.prompt())
                found.append((self.ask(tenant, prompt), other))
            else:
                one = self.ask(tenant, prompt)
                found.append((one, self.ask(tenant, self.prompt())))
        return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("probe")


@pytest.fixture(scope="module")
def adapter(folder: Path) -> str:
    return publish_adapter(folder, write_adapter(folder / "peft", rank=4, seed=4))


Prepare = Callable[[Path, str | None], tuple[Prober, list[list[int]]]]


def in_the_pool(folder: Path, adapter: str | None) -> tuple[Prober, list[list[int]]]:
    """The device pool alone, and all of it is there."""
    core = tiny_core(folder, num_blocks=PAIRS * 30, max_batch_tokens=_CHUNK)
    return _cached_by_a(Prober(core, adapter))


def in_host_memory(folder: Path, adapter: str | None) -> tuple[Prober, list[list[int]]]:
    """Evicted from the pool by a's next prompts."""
    core = tiny_core(folder, num_blocks=12, max_batch_tokens=_CHUNK, tiers=Below(host=PAIRS * 20))
    return _cached_by_a(Prober(core, adapter), settle=3)


def in_a_store(folder: Path, adapter: str | None) -> tuple[Prober, list[list[int]]]:
    """Written there by an engine that is gone."""
    below = Below(host=PAIRS * 20, store=MemoryStore())
    first, prompts = _cached_by_a(
        Prober(tiny_core(folder, num_blocks=12, max_batch_tokens=_CHUNK, tiers=below), adapter), settle=3
    )
    first.core.close()
    core = tiny_core(folder, num_blocks=12, max_batch_tokens=_CHUNK, tiers=below)
    return Prober(core, adapter, seed=1), prompts


def pinned(folder: Path, adapter: str | None) -> tuple[Prober, list[list[int]]]:
    """Leased by a, and in the pool."""
    core = tiny_core(folder, num_blocks=PAIRS * 30, max_batch_tokens=_CHUNK)
    core.commons.set_quotas(QUOTAS)
    prober, prompts = _cached_by_a(Prober(core, adapter))
    for prompt in prompts:
        answer = core.commons.pin(_order("a", prompt, adapter))
        assert answer.pin is not None
        assert answer.pin.resident_blocks == LONG // BLOCK
    return prober, prompts


def _order(tenant: str, prompt: Sequence[int], adapter: str | None) -> PinOrder:
    return PinOrder(namespace=tenant, token_ids=tuple(prompt), adapter=adapter, ttl_s=1000.0, hard_max_s=1000.0)


def _cached_by_a(prober: Prober, *, settle: int = 0) -> tuple[Prober, list[list[int]]]:
    prompts = [prober.prompt() for _ in range(PAIRS)]
    for prompt in [*prompts, *(prober.prompt() for _ in range(settle))]:
        prober.ask("a", prompt)
        drive(prober.core)
    return prober, prompts


@pytest.mark.parametrize("with_adapter", [False, True], ids=["base", "adapter"])
@pytest.mark.parametrize("prepare", [in_the_pool, in_host_memory, in_a_store, pinned], ids=lambda p: p.__name__)
def test_the_engine_does_the_same_for_what_another_has_cached(
    folder: Path, adapter: str, prepare: Prepare, with_adapter: bool
) -> None:
    """Tokens computed, steps and cached tokens are the same in every pair; for the owner they are not."""
    prober, prompts = prepare(folder, adapter if with_adapter else None)
    prober.ask("b", prober.prompt())  # loads the adapter
    half = len(prompts) // 2
    for one, other in prober.pairs("b", prompts[:half]):
        assert one == other
        assert (one.cached, one.computed) == (0, LONG)
    assert prober.core.stats().promoted_blocks == 0
    for own, other in prober.pairs("a", prompts[half:]):
        assert own.cached == LONG - 1
        assert own.computed == 1
        assert (other.cached, other.computed) == (0, LONG)
    prober.core.check_integrity()
    prober.core.close()


def test_a_pin_does_not_tell_what_another_has(folder: Path) -> None:
    """How much of a new pin is there already counts the tenant's own blocks alone."""
    prober, prompts = in_the_pool(folder, None)
    prober.core.commons.set_quotas(QUOTAS)
    answers = [prober.core.commons.pin(_order("b", prompt, None)) for prompt in (prompts[0], prober.prompt())]
    assert [(answer.status, answer.pin and answer.pin.resident_blocks) for answer in answers] == [("granted", 0)] * 2
    prober.core.close()


def test_a_prefix_being_computed_is_shared_with_its_tenant_only(folder: Path) -> None:
    """Two tenants ask the same at the same moment: each has it computed for itself."""
    prober, _ = in_the_pool(folder, None)
    prompt = prober.prompt()
    before = prober.runner.tokens
    drive(prober.core, [request(f"{tenant}-now", prompt, tenant=tenant, max_tokens=1) for tenant in "ab"])
    assert prober.runner.tokens - before == 2 * LONG
    prober.core.close()


def test_time_to_first_token_tells_nothing(folder: Path) -> None:
    """The area under the curve of guessing from it is within 0.45 ... 0.55, which is 4 standard deviations for so many
    samples of equal distributions; above 0.9 for the owner of the blocks, by the fastest of some probes."""
    core = tiny_core(
        folder,
        fields=SMALLEST,
        num_blocks=256,
        max_batch_tokens=BLOCK + 1,  # a prompt takes three steps, and one if it is cached
        max_running=4,
        tiers=Below(host=64, store=MemoryStore(limit=1 << 20)),
    )
    core.commons.set_quotas([QuotaPolicy(namespace="a", gpu=TierQuota(reserved=100, pin_limit=100))])
    prober = Prober(core, None)
    prompts = [prober.prompt(3 * BLOCK + 1) for _ in range(25)]
    for prompt in prompts:
        prober.ask("a", prompt)
        assert core.commons.pin(_order("a", prompt, None)).status == "granted"
    cached, uncached = [], []
    for stranger in range(44):  # each asks for everything once: the second time it would be their own
        times = _times(prober, f"b{stranger}", prompts)
        cached += times[0]
        uncached += times[1]
    assert 4 * (1 / (6 * len(cached))) ** 0.5 < 0.05
    assert 0.45 < area_under_curve(cached, uncached) < 0.55
    rounds = [_times(prober, "a", prompts) for _ in range(6)]
    # Whatever else runs on this machine only ever slows a probe down.
    own, new = ([min(times) for times in zip(*kind, strict=True)] for kind in zip(*rounds, strict=True))
    assert area_under_curve(own, new) > 0.9
    core.close()


def _times(prober: Prober, tenant: str, prompts: Sequence[Sequence[int]]) -> tuple[list[float], list[float]]:
    """Seconds to the first token of prompts that a has cached, and of such that nobody has: ABBA BAAB ..."""
    times: tuple[list[float], list[float]] = [], []
    for number, prompt in enumerate(prompts):
        fresh = prober.prompt(len(prompt))
        for which in (number % 2, 1 - number % 2):
            started = time.perf_counter()
            prober.ask(tenant, fresh if which else prompt)
            times[which].append(time.perf_counter() - started)
    return times


def area_under_curve(low: Sequence[float], high: Sequence[float]) -> float:
    """How likely a sample of `low` is below one of `high`: 0.5 if they cannot be told apart."""
    ordered = np.sort(np.array(high))
    below = len(ordered) - (np.searchsorted(ordered, low, "left") + np.searchsorted(ordered, low, "right")) / 2
    return float(below.mean() / len(ordered))


def test_the_area_is_that_of_all_pairs() -> None:
    low, high = [1.0, 2.0, 2.0], [2.0, 3.0]
    expected = sum((a < b) + (a == b) / 2 for a in low for b in high) / 6
    assert area_under_curve(low, high) == pytest.approx(expected)
