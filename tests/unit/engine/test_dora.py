"""DoRA through the whole engine: an adapter answers as the model whose weights were changed for good."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fixtures.engines import (
    DEVICE,
    TARGETS,
    TINY,
    drive,
    publish_adapter,
    request,
    tiny_config,
    tiny_core,
    write_adapter,
)
from lamina.config import EngineConfig
from lamina.engine.core import EngineCore
from lamina.errors import ConfigurationInvalid
from lamina.models.base_weights import StoredWeights
from lamina.models.loader import load_model
from lamina.models.placement import placements
from lamina.types import FinishReason
from lamina.wiring.backends import Backend, TorchBackend
from lamina.wiring.core import assemble
from lamina_lora.geometry import BaseGeometry

BIASED = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}  # q, k and v have biases
FIELDS = TINY | BIASED
CPU = torch.device("cpu")
PROMPTS = [[1, 2, 3, 4, 5], [7, 7, 7], [9, 30, 31, 32], [100, 3], [1, 2, 3, 4, 5]]
Tensors = dict[str, Tensor]


def write_model(folder: Path, weights: Tensors, fields: dict[str, Any] = FIELDS) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(fields))
    save_file(weights, folder / "model.safetensors")
    return folder


def random_weights(fields: dict[str, Any] = FIELDS) -> Tensors:
    random = torch.Generator().manual_seed(3)
    return {
        item.source: torch.randn(item.shape, generator=random) * item.shape[-1] ** -0.5
        for item in placements(tiny_config(fields))
    }


def write_dora(folder: Path, seed: int, fields: dict[str, Any] = FIELDS) -> Path:
    """As `write_adapter`, with magnitudes around the norms of the base."""
    write_adapter(folder, rank=4, seed=seed, fields=fields)
    random = torch.Generator().manual_seed(seed)
    tensors = load_file(folder / "adapter_model.safetensors")
    for name in [name for name in tensors if "lora_B" in name]:
        magnitude = torch.rand(len(tensors[name]), generator=random) + 0.5
        tensors[name.replace("lora_B.weight", "lora_magnitude_vector")] = magnitude
    save_file(tensors, folder / "adapter_model.safetensors")
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"use_dora": True}))
    return folder


def merged(weights: Tensors, adapter: Path, layers: int) -> Tensors:
    """The base with the adapter in it for good, by DoRA's definition; its scaling is 1."""
    changed, tensors = dict(weights), load_file(adapter / "adapter_model.safetensors")
    for layer in range(layers):
        for target in TARGETS:
            name = BaseGeometry.module_name(layer, target)
            stem = f"base_model.model.{name}.lora_"
            a, b, magnitude = (tensors[stem + part].double() for part in ("A.weight", "B.weight", "magnitude_vector"))
            total = weights[f"{name}.weight"].double() + b @ a
            lengths = total.norm(dim=1)
            changed[f"{name}.weight"] = ((magnitude / lengths)[:, None] * total).float()
    return changed


def core_of(folder: Path, store: Path, backend: Backend, **options: Any) -> EngineCore:
    small = {"num_blocks": 64, "max_batch_tokens": 32, "max_running": 4, "adapter_bytes": 1 << 20, "max_lora_rank": 8}
    config = EngineConfig(model=folder, adapters=store, **(small | options))
    model = load_model(folder, dtype=torch.float32, device=CPU, ops=backend.ops)
    base = StoredWeights(folder, torch.float32)
    return assemble(model, config, digest="tiny", dtype=torch.float32, device=CPU, backend=backend, base=base)


def check_mixed(tmp_path: Path, backend: Backend, fields: dict[str, Any], tokens: int, **options: Any) -> None:
    """Two DoRA adapters, a plain one and the base in one batch; DoRA's answers are the merged models'."""
    weights, store = random_weights(fields), tmp_path / "store"
    dora = [write_dora(tmp_path / f"dora-{seed}", seed, fields) for seed in (1, 2)]
    plain = write_adapter(tmp_path / "plain", rank=3, seed=3, fields=fields)
    digests = [None, *(publish_adapter(store, folder, fields=fields) for folder in (*dora, plain))]
    core = core_of(write_model(tmp_path / "base", weights, fields), store, backend, **options)
    wanted = [1, 2, 0, 3, 1]
    requests = [
        request(f"r{i}", prompt, adapter=digests[who], max_tokens=tokens)
        for i, (prompt, who) in enumerate(zip(PROMPTS, wanted, strict=True))
    ]
    together, _ = drive(core, requests)
    core.close()
    assert len({tuple(together[f"r{i}", 0]) for i in (0, 1, 2, 3)}) == 4
    for number, adapter in enumerate(dora, start=1):
        changed = merged(weights, adapter, fields["num_hidden_layers"])
        folder = write_model(tmp_path / f"merged-{number}", changed, fields)
        alone = core_of(folder, store, TorchBackend())
        mine = [i for i, who in enumerate(wanted) if who == number]
        want, _ = drive(alone, [request(f"r{i}", PROMPTS[i], max_tokens=tokens) for i in mine])
        alone.close()
        assert want == {(f"r{i}", 0): together[f"r{i}", 0] for i in mine}


def test_dora_beside_plain_adapters_and_the_base(tmp_path: Path) -> None:
    """On the CPU's own kernels, with biases in q, k and v."""
    check_mixed(tmp_path, TorchBackend(), FIELDS, tokens=12)


@pytest.mark.parametrize("plan", ["overlapped", "fused"])
def test_dora_on_triton_kernels(tmp_path: Path, plan: str) -> None:
    """The same, interpreted, prefill and decode."""
    pytest.importorskip("triton")
    from lamina.engine.adapter_stream import InlineLane
    from lamina.engine.graphs import NoGraphs
    from lamina.wiring.triton_backend import TritonBackend

    backend = TritonBackend(graphs=NoGraphs(), copies=InlineLane(), beside=InlineLane())
    check_mixed(tmp_path, backend, DEVICE | BIASED | {"num_hidden_layers": 1}, tokens=3, lora_plan=plan)


def test_without_base_weights_the_request_fails(tmp_path: Path) -> None:
    """An engine whose weights are in no folder says why; others go on."""
    digest = publish_adapter(tmp_path / "store", write_dora(tmp_path / "dora", 1, TINY))
    core = tiny_core(tmp_path / "store")
    tokens, endings = drive(core, [request("dora", [1, 2], adapter=digest), request("base", [1, 2])])
    core.close()
    assert len(tokens["base", 0]) == 8
    assert endings["dora", 0] is FinishReason.ERROR


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_stored_weights_are_the_models(tmp_path: Path, dtype: torch.dtype) -> None:
    """Rounded as the model's are; a folder that vanished is an error with its name."""
    weights = random_weights()
    stored = StoredWeights(write_model(tmp_path / "model", weights), dtype)
    want = weights["model.layers.1.mlp.down_proj.weight"].to(dtype)
    assert torch.equal(stored.rows(1, "down_proj"), want)
    (tmp_path / "model" / "model.safetensors").unlink()
    with pytest.raises(ConfigurationInvalid, match="model"):
        stored.rows(1, "down_proj")
