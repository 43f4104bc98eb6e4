"""Engines on random weights, which are drawn on the device in seconds, and adapters and requests for them."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from fixtures.engines import request
from gpu_setup import DEVICE, ON_GPU
from lamina.config import EngineConfig
from lamina.engine.core import EngineCore
from lamina.models.build import build_decoder
from lamina.models.config import ModelConfig
from lamina.models.interface import CausalLM
from lamina.models.placement import fused_shapes, placements
from lamina.types import GenerationRequest
from lamina.wiring.backends import Backend, TorchBackend
from lamina.wiring.core import assemble
from lamina_lora.geometry import BaseGeometry
from lamina_lora.store import AdapterStore
from lamina_lora.validate import validate_adapter
from shapes import Shape

__all__ = ["Workshop", "device_backend", "model_config", "prompt"]


def model_config(shape: Shape, layers: int) -> ModelConfig:
    """A Llama of that shape."""
    return ModelConfig.from_dict(
        {
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": shape.vocab,
            "hidden_size": shape.hidden,
            "intermediate_size": shape.inner,
            "num_hidden_layers": layers,
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.kv_heads,
            "head_dim": shape.head_dim,
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "tie_word_embeddings": False,
            "hidden_act": "silu",
        }
    )


def device_backend() -> Backend:
    """The Triton backend: with graphs and side streams on a GPU, interpreted and one after the other on a CPU."""
    if ON_GPU:
        from lamina.wiring.backends import choose_backend

        return choose_backend(DEVICE)
    from lamina.engine.adapter_stream import InlineLane
    from lamina.engine.graphs import NoGraphs
    from lamina.wiring.triton_backend import TritonBackend

    return TritonBackend(graphs=NoGraphs(), copies=InlineLane(), beside=InlineLane())


@dataclass
class Workshop:
    """Makes engines that share one model's weights and one store of adapters."""

    config: ModelConfig
    scratch: Path
    dtype: torch.dtype = torch.float32  # of the weights as they are kept
    weights: dict[str, Tensor] = field(default_factory=dict)

    def draw(self) -> None:
        """The weights: matrices of variance 1 / in, norms near 1."""
        generator = torch.Generator(device=DEVICE).manual_seed(7)
        for name, shape in fused_shapes(placements(self.config)).items():
            drawn = torch.empty(shape, dtype=self.dtype, device=DEVICE).normal_(generator=generator)
            self.weights[name] = drawn.mul_(shape[1] ** -0.5) if len(shape) == 2 else drawn.mul_(0.1).add_(1.0)

    def model(self, dtype: torch.dtype, device: torch.device, backend: Backend) -> CausalLM:
        weights = {name: tensor.to(device, dtype) for name, tensor in self.weights.items()}
        return build_decoder(self.config, weights, dtype=dtype, ops=backend.ops)

    def core(
        self, model: CausalLM, dtype: torch.dtype, device: torch.device, backend: Backend | None = None, **options: Any
    ) -> EngineCore:
        """`options` are EngineConfig fields."""
        defaults: dict[str, Any] = {"num_blocks": 64, "max_batch_tokens": 64, "max_running": 8}
        defaults |= {"max_context": 2048 if ON_GPU else 256, "adapter_bytes": 256 << 20, "max_lora_rank": 64}
        config = EngineConfig(model=Path("random"), adapters=self.scratch / "store", **(defaults | options))
        backend = backend or TorchBackend()
        return assemble(model, config, digest="random-7", dtype=dtype, device=device, backend=backend)

    def adapter(self, rank: int, seed: int) -> str:
        """Writes, validates and publishes an adapter on all seven projections; its digest."""
        geometry, folder = self.config.geometry(), self.scratch / f"adapter-{seed}"
        _write_adapter(folder, geometry, rank, seed)
        manifest = validate_adapter(folder, geometry, max_rank=256)
        AdapterStore(self.scratch / "store").publish(folder, manifest.digest)
        return manifest.digest


def prompt(
    config: ModelConfig, number: int, tokens: int, new: int, adapters: Sequence[str | None]
) -> GenerationRequest:
    """Request `number`, a greedy one, with the adapters dealt in turn."""
    source = random.Random(number)
    ids = source.choices(range(3, config.vocab_size), k=tokens)
    return request(f"r{number}", ids, adapter=adapters[number % len(adapters)], max_tokens=new)


def _write_adapter(folder: Path, geometry: BaseGeometry, rank: int, seed: int) -> None:
    folder.mkdir()
    draw, tensors = torch.Generator().manual_seed(seed), {}
    for layer, target in geometry.modules():
        inputs, outputs = geometry.targets[target]
        stem = f"base_model.model.{geometry.module_name(layer, target)}"
        tensors[f"{stem}.lora_A.weight"] = torch.randn(rank, inputs, generator=draw).div_(inputs**0.5).bfloat16()
        tensors[f"{stem}.lora_B.weight"] = torch.randn(outputs, rank, generator=draw).div_(rank).bfloat16()
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": sorted(geometry.targets),
        "base_model_name_or_path": "random",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
