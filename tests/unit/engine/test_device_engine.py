"""The whole engine on Triton kernels (interpreted here): the tokens of the torch engine, under every LoRA plan."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from fixtures.engines import DEVICE, drive, publish_adapter, request, tiny_core, write_adapter
from lamina.engine.adapter_stream import InlineLane
from lamina.engine.core import EngineCore
from lamina.engine.device_runner import DeviceRunner, decode_buckets
from lamina.engine.graphs import NoGraphs
from lamina.errors import ConfigurationInvalid
from lamina.types import GenerationRequest
from lamina.wiring.triton_backend import TritonBackend

ONE_LAYER = DEVICE | {"num_hidden_layers": 1, "attention_bias": True}
SAMPLING: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "top_k": 7, "seed": 6, "frequency_penalty": 0.7},
    {"temperature": 0.9, "seed": 1, "n": 2},
]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def digests(store: Path, tmp_path: Path) -> list[str]:
    folders = [write_adapter(tmp_path / str(rank), rank=rank, seed=rank, fields=ONE_LAYER) for rank in (3, 8)]
    return [publish_adapter(store, folder, fields=ONE_LAYER) for folder in folders]


def triton_core(store: Path, **options: Any) -> EngineCore:
    backend = TritonBackend(graphs=NoGraphs(), copies=InlineLane(), beside=InlineLane())
    small = {"max_lora_rank": 8, "adapter_bytes": 1 << 20, "max_running": 4}
    return tiny_core(store, backend=backend, fields=ONE_LAYER, **(small | options))


def requests(digests: list[str]) -> list[GenerationRequest]:
    prompts = [random.Random(seed).choices(range(3, 211), k=9 + 9 * seed) for seed in range(3)]
    return [
        request(f"r{i}", prompts[i], adapter=[None, *digests][i], **({"max_tokens": 3} | SAMPLING[i])) for i in range(3)
    ]


@pytest.mark.parametrize("plan", ["overlapped", "two-launch", "fused"])
def test_the_torch_engines_tokens(store: Path, digests: list[str], plan: str) -> None:
    """Prefill and decode, base and adapters in one step, sampling with state, siblings that copy a block on write."""
    expected, _ = drive(tiny_core(store, fields=ONE_LAYER), requests(digests))
    core = triton_core(store, lora_plan=plan, max_batch_tokens=32)
    tokens, _ = drive(core, requests(digests))
    assert tokens == expected
    runner = core._runner
    assert isinstance(runner, DeviceRunner)
    assert plan in {name for _, name in runner._captured}


def test_a_captured_step_holds_no_adapter(store: Path, digests: list[str]) -> None:
    """One slot, used by one adapter after the other: the same captured inputs serve both, and the base model."""
    items = [request(f"r{i}", [5, 6, 7], adapter=digest, max_tokens=3) for i, digest in enumerate([*digests, None])]
    core = triton_core(store, max_adapters=1)
    for item in items:
        expected, _ = drive(tiny_core(store, fields=ONE_LAYER), [item])
        assert drive(core, [item])[0] == expected
    runner = core._runner
    assert isinstance(runner, DeviceRunner)
    assert sorted(runner._captured, key=str) == [(1, "overlapped"), (1, None)]


@pytest.mark.parametrize(
    ("options", "param"),
    [({"block_size": 8}, "block_size"), ({"max_logprobs": 65}, "max_logprobs")],
)
def test_what_kernels_cannot_do_is_refused_at_start(store: Path, options: dict[str, Any], param: str) -> None:
    """Not in the middle of a step."""
    with pytest.raises(ConfigurationInvalid, match="Triton kernels cannot") as caught:
        triton_core(store, **options)
    assert caught.value.param == param


def test_buckets_end_with_the_limit() -> None:
    """Every step up to the limit has one; none is larger than the limit."""
    for limit in range(1, 300):
        buckets = decode_buckets(limit)
        assert list(buckets) == sorted(set(buckets))
        assert buckets[-1] == limit
        assert buckets[0] == 1
