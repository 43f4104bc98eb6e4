"""An adapter's weights, ready to be applied: stacked by fused site, at real rank, scaled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from lamina_kernels.lora import SiteWeights, Slice
from lamina_lora.geometry import SITES, BaseGeometry
from lamina_lora.validate import WEIGHTS_NAME, AdapterManifest, AdapterModule, validate_adapter

__all__ = ["AdapterWeights", "load_adapter"]


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    """By (layer, site); sites that the adapter leaves alone are absent."""

    sites: Mapping[tuple[int, str], SiteWeights]
    nbytes: int


def load_adapter(
    folder: Path, geometry: BaseGeometry, *, dtype: torch.dtype, device: torch.device, max_rank: int = 1 << 16
) -> AdapterWeights:
    """Validates the folder again (the store is on disk, where anything may happen) and loads it.

    Products of B and the scaling are rounded once, from float32. Raises AdapterRejected.
    """
    manifest = validate_adapter(folder, geometry, max_rank=max_rank)
    sites: dict[tuple[int, str], SiteWeights] = {}
    with safe_open(folder / WEIGHTS_NAME, framework="pt", device=str(device)) as file:
        for layer in range(geometry.num_layers):
            for site, targets in SITES.items():
                stacked = _stack(file, manifest, geometry, layer, targets, dtype)
                if stacked is not None:
                    sites[layer, site] = stacked
    return AdapterWeights(sites, sum(_nbytes(site) for site in sites.values()))


def _stack(  # type: ignore[no-untyped-def]  # safetensors ships no type for the open file
    file,
    manifest: AdapterManifest,
    geometry: BaseGeometry,
    layer: int,
    targets: tuple[str, ...],
    dtype: torch.dtype,
) -> SiteWeights | None:
    down, slices, first = [], [], 0
    for target in targets:
        module: AdapterModule | None = manifest.modules.get(geometry.module_name(layer, target))
        if module is None:
            continue
        down.append(file.get_tensor(module.a.name).to(dtype))
        up = file.get_tensor(module.b.name).float().t().mul(module.lora.scaling)
        slices.append(Slice(first, geometry.column_of(target), up.to(dtype).contiguous()))
        first += module.lora.rank
    return SiteWeights(torch.cat(down), tuple(slices)) if down else None


def _nbytes(site: SiteWeights) -> int:
    tensors: list[Tensor] = [site.a, *(part.b for part in site.slices)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
