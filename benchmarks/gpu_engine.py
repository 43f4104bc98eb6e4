"""The whole engine on random Llama-3-8B-shaped weights: the same tokens on this device as plain torch gives on the CPU,
for requests alone and mixed, with and without adapters."""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from chips import Chip
from gpu_case import short
from gpu_report import Figure, Item
from gpu_scale import Scale
from gpu_setup import DEVICE, ON_GPU

__all__ = ["items"]

LLAMA_LIKE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32768,  # a quarter of Llama's: the head is one more GEMM, and drawing weights takes seconds
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 3,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}
TINY: dict[str, Any] = LLAMA_LIKE | {
    "vocab_size": 211,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 256,
}
SHAPE = LLAMA_LIKE if ON_GPU else TINY
RANKS = (16, 8) if ON_GPU else (4,)
REQUESTS, PROMPT, NEW = (8, 40, 12) if ON_GPU else (3, 5, 3)
AGREE = 0.95
"""Share of tokens up to the first difference. The devices add in different orders, so two logits within rounding may
change places; one wrong kernel makes all of them differ."""

Tokens = dict[tuple[str, int], list[int]]


def items(scale: Scale, chip: Chip) -> Iterator[Item]:
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as scratch:
        engines = _Engines(Path(scratch))
        yield "plain torch on the CPU", engines.prepare
        for dtype in (torch.float32, torch.bfloat16, torch.float16) if ON_GPU else (torch.float32,):
            yield f"this device, {short(dtype)}", partial(engines.compare, dtype)


class _Engines:
    """One set of requests, and its tokens as plain torch generates them in float32."""

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch
        self._items: list[Any] = []
        self._expected: Tokens = {}

    def prepare(self) -> None:
        digests = [self._adapter(number, rank) for number, rank in enumerate(RANKS)]
        self._items = [_request(i, [None, *digests][i % (1 + len(digests))]) for i in range(REQUESTS)]
        self._expected = self._run(torch.float32, torch.device("cpu"), self._items)

    def compare(self, dtype: torch.dtype) -> list[Figure]:
        """Mixed, then each request alone."""
        assert self._expected, "there is no reference to compare with"
        mixed = self._run(dtype, DEVICE, self._items)
        alone: Tokens = {}
        for item in self._items[:3]:
            alone |= self._run(dtype, DEVICE, [item])
        reference = {key: self._expected[key] for key in mixed}
        against, together = _agreement(mixed, reference), _agreement(alone, {key: mixed[key] for key in alone})
        if dtype is torch.float32:
            assert against >= AGREE, f"only {against:.0%} of the tokens agree with plain torch on the CPU"
            assert together >= AGREE, f"only {together:.0%} of the tokens are the same alone and mixed"
        note = "of tokens up to the first difference"
        return [
            Figure(name=f"engine {short(dtype)} against fp32 on the CPU", unit="%", measured=100 * against, note=note),
            Figure(name=f"engine {short(dtype)} alone against mixed", unit="%", measured=100 * together, note=note),
        ]

    def _run(self, dtype: torch.dtype, device: torch.device, requests: Sequence[Any]) -> Tokens:
        from fixtures.engines import drive
        from lamina.config import EngineConfig
        from lamina.models.config import ModelConfig
        from lamina.models.loader import random_model
        from lamina.wiring.core import assemble

        config = EngineConfig(
            model=Path("random"), adapters=self._scratch / "store", num_blocks=64, max_batch_tokens=64, max_running=8
        )
        model = random_model(ModelConfig.from_dict(SHAPE), seed=7, dtype=dtype, device=device)
        core = assemble(model, config, digest="random-7", dtype=dtype, device=device)
        try:
            tokens, endings = drive(core, requests)
        finally:
            core.close()
        assert len(endings) == len(requests), "not every request ended"
        return tokens

    def _adapter(self, number: int, rank: int) -> str:
        from lamina.models.config import ModelConfig
        from lamina_lora.store import AdapterStore
        from lamina_lora.validate import validate_adapter

        geometry = ModelConfig.from_dict(SHAPE).geometry()
        folder = self._scratch / f"adapter-{number}"
        _write_adapter(folder, geometry, rank, seed=number)
        manifest = validate_adapter(folder, geometry, max_rank=256)
        AdapterStore(self._scratch / "store").publish(folder, manifest.digest)
        return manifest.digest


def _request(number: int, adapter: str | None) -> Any:
    from fixtures.engines import request

    source = random.Random(number)
    prompt = source.choices(range(3, SHAPE["vocab_size"]), k=PROMPT + 8 * number % 30)
    return request(f"r{number}", prompt, adapter=adapter, max_tokens=NEW)


def _write_adapter(folder: Path, geometry: Any, rank: int, seed: int) -> None:
    folder.mkdir()
    draw, tensors = torch.Generator().manual_seed(seed), {}
    for layer, target in geometry.modules():
        inputs, outputs = geometry.targets[target]
        stem = f"base_model.model.{geometry.module_name(layer, target)}"
        tensors[f"{stem}.lora_A.weight"] = torch.randn(rank, inputs, generator=draw) / inputs**0.5
        tensors[f"{stem}.lora_B.weight"] = torch.randn(outputs, rank, generator=draw) / rank
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


def _agreement(found: Tokens, wanted: Tokens) -> float:
    same = total = 0
    for key, tokens in wanted.items():
        total += len(tokens)
        for a, b in zip(found[key], tokens, strict=True):
            if a != b:
                break
            same += 1
    return same / total
