"""Loads a model folder, tensor by tensor, straight into the fused weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from lamina.errors import ConfigurationInvalid
from lamina.models.build import build_decoder
from lamina.models.checkpoint import Checkpoint, open_checkpoint
from lamina.models.config import ModelConfig
from lamina.models.interface import CausalLM
from lamina.models.layers import LayerOps, TorchOps
from lamina.models.placement import Placement, Shape, fused_shapes, ignored, placements

__all__ = ["load_model", "random_model"]

Progress = Callable[[int, int], None]

_STORED = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
_TORCH = TorchOps()
_SHOWN = 20  # violations in a message; the rest are counted


def load_model(
    folder: Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    ops: LayerOps = _TORCH,
    progress: Progress | None = None,
) -> CausalLM:
    """Loads `config.json` and the safetensors weights of a Hugging Face folder, to compute in `dtype` on `device`.

    `ops` computes what is neither a matrix product nor attention; `progress(done, total)` is in bytes of the
    checkpoint. Peak memory is one copy of the weights plus the largest tensor. Raises ConfigurationInvalid (with every
    missing, unknown, misshapen, mistyped or non-finite tensor) and UnsupportedModel.
    """
    config = ModelConfig.from_folder(folder)
    plan = placements(config)
    with open_checkpoint(folder) as checkpoint:
        _refuse(folder, _violations(config, plan, checkpoint))
        weights = _allocate(plan, _embedding_dtype(checkpoint, dtype), dtype, device)
        broken = _fill(weights, plan, checkpoint, progress or (lambda done, total: None))
    _refuse(folder, broken)
    return build_decoder(config, weights, dtype=dtype, ops=ops)


def random_model(
    config: ModelConfig, seed: int, dtype: torch.dtype, device: torch.device, ops: LayerOps = _TORCH
) -> CausalLM:
    """A model with random weights of sensible size, the same for the same seed on every device."""
    generator = torch.Generator().manual_seed(seed)
    weights = {
        name: _random(name, shape, config, generator).to(dtype).to(device)
        for name, shape in fused_shapes(placements(config)).items()
    }
    return build_decoder(config, weights, dtype=dtype, ops=ops)


def _random(name: str, shape: Shape, config: ModelConfig, generator: torch.Generator) -> Tensor:
    noise = torch.randn(shape, generator=generator)
    if len(shape) == 2:
        return noise.mul_(shape[1] ** -0.5)
    centre = 0.0 if name.endswith(".bias") or config.unit_offset_norm else 1.0
    return noise.mul_(0.1).add_(centre)


def _violations(config: ModelConfig, plan: Sequence[Placement], checkpoint: Checkpoint) -> list[str]:
    entries = checkpoint.entries
    wanted = {item.source: item.shape for item in plan}
    found = [f"{name} is in more than one file" for name in checkpoint.duplicates]
    found += [f"{name} is missing" for name in wanted if name not in entries]
    found += [f"{name} is unknown" for name in entries if name not in wanted and not ignored(config, name)]
    for name in wanted.keys() & entries.keys():
        entry = entries[name]
        if entry.shape != wanted[name]:
            found.append(f"{name} has shape {list(entry.shape)} instead of {list(wanted[name])}")
        if entry.dtype not in _STORED:
            found.append(f"{name} is stored as {entry.dtype}; supported: {', '.join(_STORED)}")
    return sorted(found)


def _refuse(folder: Path, violations: Sequence[str]) -> None:
    if not violations:
        return
    shown = "; ".join(violations[:_SHOWN])
    rest = f"; and {len(violations) - _SHOWN} more" if len(violations) > _SHOWN else ""
    raise ConfigurationInvalid(
        f"The weights in {folder} do not fit its config.json ({len(violations)} violations): {shown}{rest}.",
        param="model",
    )


def _embedding_dtype(checkpoint: Checkpoint, dtype: torch.dtype) -> torch.dtype:
    # A lookup from the stored 16-bit table loses nothing, and on a CPU a tied head is repacked into a copy of its own.
    stored = _STORED[checkpoint.entries["model.embed_tokens.weight"].dtype]
    return stored if stored.itemsize < dtype.itemsize else dtype


def _allocate(
    plan: list[Placement], embedding_dtype: torch.dtype, dtype: torch.dtype, device: torch.device
) -> dict[str, Tensor]:
    shapes = fused_shapes(plan)
    dtypes = dict.fromkeys(shapes, dtype) | {"embedding": embedding_dtype}
    return {name: torch.empty(shape, dtype=dtypes[name], device=device) for name, shape in shapes.items()}


def _fill(
    weights: Mapping[str, Tensor], plan: Sequence[Placement], checkpoint: Checkpoint, progress: Progress
) -> list[str]:
    """Copies every tensor to its place; returns what came out as NaN or infinite."""
    sizes = [torch.Size(item.shape).numel() * _STORED[checkpoint.entries[item.source].dtype].itemsize for item in plan]
    done, total, broken = 0, sum(sizes), []
    progress(done, total)
    for item, size in zip(plan, sizes, strict=True):
        rows = weights[item.target][item.row : item.row + item.shape[0]]
        rows.copy_(checkpoint.tensor(item.source))
        if not bool(torch.isfinite(rows.sum(dtype=torch.float32))):
            broken.append(f"{item.source} holds NaN or infinity (as {rows.dtype})")
        done += size
        progress(done, total)
    return broken
