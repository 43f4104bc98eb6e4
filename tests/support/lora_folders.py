"""Builds small adapters and base geometries for tests."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from lamina_lora.geometry import TARGETS, BaseGeometry

TINY = BaseGeometry(
    num_layers=2,
    vocab_size=50,
    hidden_size=24,
    targets={
        "q_proj": (24, 24),
        "k_proj": (24, 12),
        "v_proj": (24, 12),
        "o_proj": (24, 24),
        "gate_proj": (24, 40),
        "up_proj": (24, 40),
        "down_proj": (40, 24),
    },
)


def config(**changes: Any) -> dict[str, Any]:
    """The smallest valid adapter_config.json, changed."""
    base: dict[str, Any] = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}
    return base | changes


def tensors(
    geometry: BaseGeometry = TINY,
    targets: tuple[str, ...] = ("q_proj", "v_proj"),
    rank: int = 4,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    layers: tuple[int, ...] | None = None,
    dora: bool = False,
) -> dict[str, Tensor]:
    """Random A and B and, for DoRA, magnitudes, of both signs, under PEFT's names."""
    generator = torch.Generator().manual_seed(seed)
    found: dict[str, Tensor] = {}
    for layer in layers if layers is not None else range(geometry.num_layers):
        for target in TARGETS:
            if target in targets:
                fan_in, fan_out = geometry.targets[target]
                stem = f"base_model.model.{geometry.module_name(layer, target)}"
                found[f"{stem}.lora_A.weight"] = torch.randn(rank, fan_in, generator=generator).to(dtype)
                found[f"{stem}.lora_B.weight"] = torch.randn(fan_out, rank, generator=generator).to(dtype)
                if dora:
                    found[f"{stem}.lora_magnitude_vector"] = torch.randn(fan_out, generator=generator).to(dtype)
    return found


def write(folder: Path, settings: Mapping[str, Any], weights: Mapping[str, Tensor]) -> Path:
    """Saves an adapter folder as PEFT does."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(dict(settings)))
    save_file(dict(weights), folder / "adapter_model.safetensors", metadata={"format": "pt"})
    return folder


def write_plain(folder: Path, *, rank: int = 4, seed: int = 0, targets: tuple[str, ...] = TARGETS) -> Path:
    """A valid adapter for TINY."""
    settings = config(r=rank, lora_alpha=2 * rank, target_modules=list(targets))
    return write(folder, settings, tensors(TINY, targets, rank, seed=seed))
