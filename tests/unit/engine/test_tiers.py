"""Tiers below the device in a running engine: the same tokens, fewer of them computed, whatever the store does."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from fixtures.engines import drive, publish_adapter, request, tiny_core, write_adapter
from lamina.engine.core import EngineCore
from lamina.types import GenerationRequest
from lamina_kvtier.memory_tier import MemoryStore, Steps
from support.ahead import AheadBackend
from support.below import Below


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


def conversations(digests: list[str], rounds: int = 2) -> list[list[GenerationRequest]]:
    """Each round asks for the same long prefixes again, with another end: together far more than the pool holds."""
    prefixes = [random.Random(seed).choices(range(3, 211), k=16 * 5) for seed in range(6)]
    return [
        [
            request(
                f"r{turn}-{i}",
                [*prefix, 5 + turn, 9],
                adapter=[None, *digests][i % (1 + len(digests))],
                tenant=f"t{i % 2}",
                max_tokens=4,
            )
            for i, prefix in enumerate(prefixes)
        ]
        for turn in range(rounds)
    ]


def play(core: EngineCore, rounds: list[list[GenerationRequest]]) -> dict[tuple[str, int], list[int]]:
    """One request after the other, so that each finds what the ones before left."""
    said: dict[tuple[str, int], list[int]] = {}
    for items in rounds:
        for item in items:
            tokens, _ = drive(core, [item])
            said |= tokens
    return said


@pytest.fixture
def digests(store: Path, tmp_path: Path) -> list[str]:
    return [publish_adapter(store, write_adapter(tmp_path / str(i), rank=4 * i, seed=i)) for i in (1, 2)]


SMALL: dict[str, Any] = {"num_blocks": 14, "max_batch_tokens": 64}


@pytest.mark.parametrize("backend", [None, AheadBackend()], ids=["at once", "ahead"])
def test_host_memory_holds_what_the_pool_cannot(store: Path, digests: list[str], backend: AheadBackend | None) -> None:
    """Prefixes that were evicted from the pool come back instead of being computed again, and are right."""
    rounds = conversations(digests)
    expected = play(tiny_core(store, prefix_caching=False), rounds)
    plain = tiny_core(store, **SMALL)
    assert play(plain, rounds) == expected
    below = Below()
    core = tiny_core(store, backend=backend, tiers=below, **SMALL)
    assert play(core, rounds) == expected
    stats = core.stats()
    assert stats.spilled_blocks >= stats.promoted_blocks > 0
    assert stats.prefix_hit_tokens > plain.stats().prefix_hit_tokens + 3 * 80
    assert stats.failed_blocks == 0
    below.made[-1].check_integrity()
    core.close()


def test_a_store_serves_the_next_engine(store: Path, digests: list[str]) -> None:
    """After a restart, or in another replica, prefixes are found again; those of another tenant are not."""
    rounds = conversations(digests)
    expected = play(tiny_core(store, prefix_caching=False), rounds)
    below = Below(store=MemoryStore())
    first = tiny_core(store, tiers=below, **SMALL)
    play(first, rounds[:1])
    assert first.stats().stored_blocks > 0
    first.close()
    second = tiny_core(store, tiers=below, **SMALL)
    assert play(second, rounds[1:]) == {key: said for key, said in expected.items() if key[0].startswith("r1")}
    assert second.stats().loaded_blocks > 0
    assert second.stats().prefix_hit_tokens > 0
    loaded = second.stats().loaded_blocks
    stranger = [request(f"s{i}", item.prompt_token_ids, tenant="stranger") for i, item in enumerate(rounds[0])]
    play(second, [stranger])
    assert second.stats().loaded_blocks == loaded
    second.close()


@pytest.mark.parametrize("seed", range(6))
def test_a_failing_store_costs_no_request(store: Path, digests: list[str], seed: int) -> None:
    """Slow, missing after look-up, truncated, flipped, gone, of another layout: the same tokens, books that add up."""
    rounds = conversations(digests)
    expected = play(tiny_core(store, prefix_caching=False), rounds)
    below = Below(host=8, store=MemoryStore(), seed=seed)
    core = tiny_core(store, tiers=below, **SMALL)
    assert play(core, rounds) == expected
    below.made[-1].check_integrity()
    core.close()


def test_others_run_while_blocks_come_up(store: Path) -> None:
    """A choice that waits for a slow store holds up nobody, and a cancelled one leaves nothing behind."""
    rounds = conversations([])
    below = Below(host=8, store=MemoryStore())
    first = tiny_core(store, tiers=below, **SMALL)
    play(first, rounds[:1])
    first.close()
    steps = Steps()
    below.run = steps
    core = tiny_core(store, tiers=below, **SMALL)
    core.submit(rounds[1][0])
    for _ in range(3):
        core.step()
        core.check_integrity()
    assert core.stats().waiting == 1
    tokens, _ = drive_other(core, request("other", [7, 8, 9], tenant="t9", max_tokens=3))
    assert len(tokens["other", 0]) == 3
    assert core.stats().waiting == 1
    core.cancel(rounds[1][0].request_id)
    steps.run()
    core.step()
    core.check_integrity()
    assert not core.has_work()
    assert core.stats().blocks_active == 0
    core.close()


def drive_other(core: EngineCore, item: GenerationRequest) -> tuple[dict[tuple[str, int], list[int]], int]:
    """Steps until this request has ended, others or not."""
    core.submit(item)
    tokens: dict[tuple[str, int], list[int]] = {}
    for step in range(100):
        for event in core.step():
            tokens.setdefault((event.request_id, event.index), []).extend(event.token_ids)
            if event.request_id == item.request_id and event.finish_reason is not None:
                return tokens, step
    raise AssertionError("the other request did not end")
