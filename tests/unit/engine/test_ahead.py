"""Steps that run ahead: the same tokens as step by step, whatever ends, leaves or fails in between."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from fixtures.engines import collect, drive, publish_adapter, request, tiny_core, write_adapter
from lamina.engine.core import EngineCore
from lamina.types import FinishReason, GenerationRequest
from support.ahead import AheadBackend, AheadSampler

SAMPLING: list[dict[str, Any]] = [
    {},
    {"temperature": 0.8, "seed": 5},
    {"temperature": 1.0, "top_k": 7, "seed": 6, "frequency_penalty": 0.7},
    {"repetition_penalty": 1.4, "min_tokens": 5, "ignore_eos": False},
    {"temperature": 1.2, "top_p": 0.7, "seed": 9, "logprobs": 3, "presence_penalty": 0.4},
    {"temperature": 0.9, "seed": 1, "n": 3, "max_tokens": 7},
]


def requests(digests: list[str], count: int = 9) -> list[GenerationRequest]:
    return [
        request(
            f"r{i}",
            random.Random(i).choices(range(3, 211), k=5 + 7 * i),
            adapter=[None, *digests][i % 3],
            tenant=f"t{i % 2}",
            **({"max_tokens": 6 + i} | SAMPLING[i % len(SAMPLING)]),
        )
        for i in range(count)
    ]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def digests(store: Path, tmp_path: Path) -> list[str]:
    return [publish_adapter(store, write_adapter(tmp_path / str(i), rank=4 * i, seed=i)) for i in (1, 2)]


def ahead(store: Path, **options: Any) -> EngineCore:
    return tiny_core(store, backend=AheadBackend(), **options)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_batch_tokens": 16},
        {"num_blocks": 6},  # preempts
        {"max_running": 3},
        {"prefix_caching": False},
    ],
    ids=str,
)
def test_the_same_tokens_as_step_by_step(store: Path, digests: list[str], options: dict[str, Any]) -> None:
    """All sampling rules, siblings, adapters, preemption: running ahead shows in the timing only."""
    expected, endings = drive(tiny_core(store, **options), requests(digests))
    core = ahead(store, **options)
    tokens, ends = drive(core, requests(digests))
    assert tokens == expected
    assert ends == endings
    if "num_blocks" in options:
        assert core.scheduler.preemptions > 0
    core.check_integrity()


def test_a_step_is_launched_before_the_one_before_lands(store: Path) -> None:
    """The first step shows nothing yet; from the second on each shows the token of the step before."""
    core = ahead(store)
    core.submit(request("a", [5, 6, 7], max_tokens=3))
    shown = [len([token for event in core.step() for token in event.token_ids]) for _ in range(4)]
    assert shown == [0, 1, 1, 1]
    assert not core.has_work()
    sampler = core._sampler
    assert isinstance(sampler, AheadSampler)
    assert sampler.launches == 3  # the last token is known to be the last: nothing is computed behind it


def test_nothing_follows_an_end_that_the_host_learns_late(store: Path) -> None:
    """A stop token ends the choice although the next step was launched already; its draw is dropped."""
    free, _ = drive(tiny_core(store), [request("a", [5, 6, 7], max_tokens=8)])
    stop = free["a", 0][2]
    item = request("a", [5, 6, 7], max_tokens=8, stop_token_ids=(stop,))
    tokens, ends = drive(ahead(store), [item])
    assert tokens["a", 0] == free["a", 0][:3]
    assert ends["a", 0] is FinishReason.STOP


def test_prefix_hits_hold_what_was_computed_ahead(store: Path) -> None:
    """Blocks that a step behind the end had filled in are found by the next turn of the conversation, and are right."""
    core, plain = ahead(store), tiny_core(store)
    first = request("a", list(range(3, 36)), max_tokens=20)
    (said,) = drive(core, [first])[0].values()
    again = request("b", [*range(3, 36), *said, 9, 8, 7], max_tokens=9)
    tokens, _ = drive(core, [again])
    drive(plain, [first])
    assert tokens == drive(plain, [again])[0]
    assert core.scheduler.prefix_hit_tokens >= plain.scheduler.prefix_hit_tokens > 0


@pytest.mark.parametrize("steps", range(1, 7))
def test_cancelling_under_way(store: Path, digests: list[str], steps: int) -> None:
    """A choice that is cancelled between launch and landing says nothing more; the others do not notice."""
    kept = [item for item in requests(digests) if item.request_id != "r4"]
    expected, _ = drive(tiny_core(store), requests(digests))
    core = ahead(store)
    for item in requests(digests):
        core.submit(item)
    tokens: dict[tuple[str, int], list[int]] = {}
    ends: dict[tuple[str, int], FinishReason] = {}
    for _ in range(steps):
        collect(core.step(), tokens, ends)
    core.cancel("r4")
    while core.has_work():
        collect(core.step(), tokens, ends)
        core.check_integrity()
    for item in kept:
        for index in range(item.sampling.n):
            assert tokens[item.request_id, index] == expected[item.request_id, index]


def test_everybody_may_leave_under_way(store: Path) -> None:
    """The flight lands with nobody on board, and the engine comes to rest."""
    core = ahead(store)
    core.submit(request("a", [5, 6, 7], max_tokens=9))
    core.step()
    core.cancel("a")
    assert core.has_work()
    (event,) = core.step()
    assert event.finish_reason is FinishReason.CANCELLED
    assert not core.has_work()
    core.check_integrity()


class _Failing:
    """Draws that fail when they are collected, as a device reports its errors."""

    def collect(self) -> list[Any]:
        raise RuntimeError("the device is gone")


def test_a_failure_that_shows_late_ends_its_requests(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They get an error once, blocks come back, and the engine serves the next request."""
    core = ahead(store)
    sampler = core._sampler
    core.submit(request("a", [5, 6, 7], max_tokens=9))
    core.step()
    launch = sampler.launch

    def fail(logits: torch.Tensor, states: Any) -> _Failing:
        launch(logits, states)
        return _Failing()

    monkeypatch.setattr(sampler, "launch", fail)
    core.step()
    monkeypatch.setattr(sampler, "launch", launch)
    tokens, ends = drive(core)
    assert ends == {("a", 0): FinishReason.ERROR}
    tokens, ends = drive(core, [request("b", [5, 6, 7], max_tokens=4)])
    assert len(tokens["b", 0]) == 4
