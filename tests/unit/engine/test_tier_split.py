"""A choice computes the head of its prompt while the tail comes from the store, and takes what others compute."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fixtures.engines import Outputs, collect, drive, request, tiny_core
from lamina.engine.core import EngineCore
from lamina.types import GenerationRequest
from lamina_kvtier.memory_tier import MemoryStore, Steps
from support.ahead import AheadBackend
from support.below import Below
from support.fixed_rates import FixedRates, HandClock

BLOCKS = 8
PROMPT = random.Random(3).choices(range(3, 211), k=16 * BLOCKS + 5)
OPTIONS: dict[str, Any] = {"num_blocks": 40, "max_batch_tokens": 32}
backends = pytest.mark.parametrize("backend", [None, AheadBackend()], ids=["at once", "ahead"])


def item(name: str, prompt: list[int] = PROMPT, **sampling: Any) -> GenerationRequest:
    return request(name, prompt, max_tokens=4, **sampling)


@pytest.fixture
def below(tmp_path: Path) -> Below:
    """A store that has the prompt's blocks; what is asked of it now waits for `run.run()`."""
    below = Below(host=16, store=MemoryStore())
    first = tiny_core(tmp_path, tiers=below, num_blocks=10, max_batch_tokens=64)
    drive(first, [item("first")])
    drive(first, [item(f"other{i}", random.Random(i).choices(range(3, 211), k=140)) for i in range(3)])
    assert first.stats().stored_blocks >= BLOCKS
    first.close()
    below.run, below.clock = Steps(), HandClock()
    return below


@pytest.fixture
def expected(tmp_path: Path) -> list[int]:
    return drive(tiny_core(tmp_path, prefix_caching=False), [item("alone")])[0]["alone", 0]


def steps(core: EngineCore, count: int, tokens: Outputs) -> None:
    for _ in range(count):
        collect(core.step(), tokens, {})
        core.check_integrity()


def no_tokens() -> Outputs:
    return {}


def computed(core: EngineCore) -> int:
    return core.scheduler.running[0].computed if core.scheduler.running else 0


@backends
def test_the_head_is_computed_while_the_tail_is_loaded(
    tmp_path: Path, below: Below, expected: list[int], backend: AheadBackend | None
) -> None:
    """Equal rates: half and half. Computing stops where the load begins, as long as that pays, and takes what comes."""
    below.rates = FixedRates(compute_s=1.0, load_s=1.0, clock=below.clock)
    core, tokens = tiny_core(tmp_path, tiers=below, backend=backend, **OPTIONS), no_tokens()
    core.submit(item("a"))
    steps(core, 2, tokens)
    assert not core.scheduler.running  # the look-up is under way
    below.run.run()
    steps(core, 6, tokens)
    assert computed(core) == 16 * BLOCKS // 2
    assert not tokens
    below.run.run()
    for _ in range(200):
        if not core.has_work():
            break
        steps(core, 1, tokens)
    assert tokens["a", 0] == expected
    stats = core.stats()
    assert (stats.loaded_blocks, stats.declined_blocks) == (BLOCKS // 2, BLOCKS // 2)
    assert stats.prefix_hit_tokens == 16 * BLOCKS // 2
    core.close()


@backends
@pytest.mark.parametrize("load_s", [1.0, 0.001], ids=["split", "load"])
def test_a_load_that_does_not_come_costs_no_more_than_computing(
    tmp_path: Path, below: Below, expected: list[int], backend: AheadBackend | None, load_s: float
) -> None:
    """After as long as computing takes, it is computed, whatever becomes of the load."""
    below.rates = FixedRates(compute_s=1.0, load_s=load_s, clock=below.clock)
    core, tokens = tiny_core(tmp_path, tiers=below, backend=backend, **OPTIONS), no_tokens()
    core.submit(item("a"))
    steps(core, 1, tokens)
    below.run.run()
    steps(core, 8, tokens)
    assert not tokens
    below.clock.now += BLOCKS - 0.5 if load_s < 1 else BLOCKS / 2 - 0.5
    steps(core, 4, tokens)
    assert not tokens
    below.clock.now += 1.0
    steps(core, 16, tokens)
    assert tokens["a", 0] == expected
    assert not core.has_work()
    settle(core, below, lambda: core.stats().blocks_active == 0)
    core.close()


def test_computing_is_cheaper(tmp_path: Path, below: Below, expected: list[int]) -> None:
    """Nothing is waited for; after a while a few blocks are loaded all the same, to see whether that is still so."""
    below.rates = FixedRates(compute_s=0.001, load_s=1.0, clock=below.clock)
    core, tokens = tiny_core(tmp_path, tiers=below, **OPTIONS), no_tokens()
    core.submit(item("a"))
    steps(core, 1, tokens)
    below.run.run()
    steps(core, 12, tokens)
    assert tokens["a", 0] == expected
    assert (core.stats().declined_blocks, core.stats().loaded_blocks) == (BLOCKS, 0)
    below.clock.now += 60
    core.scheduler.kv.drop_cached()
    core.submit(item("b"))
    steps(core, 1, tokens)
    below.run.run()
    steps(core, 2, tokens)
    below.run.run()
    steps(core, 12, tokens)
    assert tokens["b", 0] == expected
    assert core.stats().loaded_blocks > 0
    core.close()


@backends
@pytest.mark.parametrize("chunk", [8, 16, 50])
def test_choices_with_one_prefix_compute_it_once(tmp_path: Path, backend: AheadBackend | None, chunk: int) -> None:
    """Started together, with nothing cached: whoever comes to a block that is being computed waits for it."""
    items = [item(f"r{i}", [*PROMPT[: 16 * BLOCKS], 7 + i], n=1 + i) for i in range(3)]
    alone = tiny_core(tmp_path, prefix_caching=False)
    expected = no_tokens()
    for one in items:
        expected |= drive(alone, [one])[0]
    core = tiny_core(tmp_path, backend=backend, num_blocks=64, max_batch_tokens=chunk)
    assert drive(core, items)[0] == expected
    assert core.stats().prefix_hit_tokens == 2 * 16 * BLOCKS
    core.close()


@backends
def test_siblings_and_preemption_while_a_tail_comes(tmp_path: Path, below: Below, backend: AheadBackend | None) -> None:
    """A pool with no room to spare: whoever is preempted lets go of its fetch, and comes to the same tokens."""
    below.rates = FixedRates(compute_s=1.0, load_s=1.0, clock=below.clock)
    items = [item("a", n=3), item("b", [*PROMPT[:90], 9]), item("c", random.Random(1).choices(range(3, 211), k=100))]
    alone = tiny_core(tmp_path, prefix_caching=False)
    expected = no_tokens()
    for one in items:
        expected |= drive(alone, [one])[0]
    core, tokens = tiny_core(tmp_path, tiers=below, backend=backend, num_blocks=14, max_batch_tokens=32), no_tokens()
    for one in items:
        core.submit(one)
    for turn in range(400):
        if not core.has_work():
            break
        steps(core, 1, tokens)
        if turn % 3 == 0:
            below.run.run()
        below.clock.now += 0.4
    assert tokens == expected
    core.close()


def test_the_next_ones_in_the_queue_have_their_blocks_when_their_turn_comes(tmp_path: Path, below: Below) -> None:
    """While another one runs: looked up, loaded and promoted, but no more than a part of the pool."""
    below.rates = FixedRates(compute_s=1.0, load_s=0.001, clock=below.clock)
    core = tiny_core(tmp_path, tiers=below, num_blocks=40, max_batch_tokens=32, max_running=1)
    core.submit(request("running", [5, 6, 7], max_tokens=30))
    steps(core, 2, no_tokens())
    for name in ("next", "second", "third"):
        core.submit(item(name))
    steps(core, 2, no_tokens())
    assert len(below.run.waiting) == 2  # two look-ups, of the first ones only
    settle(core, below, lambda: core.stats().promoted_blocks >= BLOCKS)
    stats = core.stats()
    assert (stats.running, stats.waiting, stats.loaded_blocks) == (1, 3, BLOCKS)
    for name in ("running", "next", "second", "third"):
        core.cancel(name)
    settle(core, below, lambda: core.stats().blocks_active == 0)
    core.close()


def settle(core: EngineCore, below: Below, condition: Callable[[], bool]) -> None:
    """Between two steps, as long as store and copies take."""
    until = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < until, "it never came true"
        below.run.run()
        core._tiers.settle()
        core.check_integrity()
