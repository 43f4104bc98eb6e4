"""One adapter's weights in memory, per layer and fused site, in real ranks."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from lamina_kernels.lora import LoraWeights, PreparedLora, SlotTable
from lamina_lora.dora import BaseWeights, dora_gains
from lamina_lora.errors import AdapterRejected
from lamina_lora.geometry import SITES, BaseGeometry
from lamina_lora.report import Report
from lamina_lora.safetensors_header import TensorEntry
from lamina_lora.validate import WEIGHTS_NAME, AdapterManifest, AdapterModule, validate_adapter

__all__ = ["AdapterWeights", "PreparedAdapter", "load_adapter", "prepare_adapter", "site_index"]

_DTYPES: Mapping[str, torch.dtype] = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_SITE_NUMBER: Mapping[str, int] = {site: number for number, site in enumerate(SITES)}


def site_index(layer: int, site: str) -> int:
    """Numbers the fused sites of all layers from 0, layer by layer."""
    return layer * len(_SITE_NUMBER) + _SITE_NUMBER[site]


@dataclass(frozen=True)
class AdapterWeights:
    """`sites[site_index(layer, site)]` is the adapter there, None where it changes nothing. B holds the scaling."""

    digest: str
    sites: tuple[LoraWeights | None, ...]
    dtype: torch.dtype
    device: torch.device

    @cached_property
    def nbytes(self) -> int:
        return sum(lora.nbytes for lora in self.sites if lora is not None)


@dataclass(frozen=True, slots=True)
class PreparedAdapter:
    """One adapter's weights in the layout of the kernel that will use them."""

    digest: str
    lora: PreparedLora
    table: SlotTable

    @property
    def nbytes(self) -> int:
        return self.lora.nbytes


def prepare_adapter(weights: AdapterWeights, table: SlotTable) -> PreparedAdapter:
    """Lays the weights out for `table`, in any thread, so that taking them into a slot costs the step loop nothing."""
    return PreparedAdapter(weights.digest, table.prepare(weights.sites), table)


def load_adapter(
    folder: Path,
    geometry: BaseGeometry,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    *,
    max_rank: int = 256,
    digest: str | None = None,
    base: BaseWeights | None = None,
) -> AdapterWeights:
    """Validates and reads an adapter folder, converted to `dtype` on `device`.

    A DoRA adapter is measured against `base`, one projection of the base model after the other: it loads as slowly as
    they do. Raises AdapterRejected with all violations: those of `validate_adapter`, values that overflow `dtype`, and,
    if `digest` is given, contents that do not have it any more; a DoRA adapter without `base`.
    """
    manifest = validate_adapter(folder, geometry, max_rank=max_rank)
    if digest is not None and manifest.digest != digest:
        raise AdapterRejected([f"the stored adapter changed: its digest is {manifest.digest}, not {digest}"])
    if base is None and any(module.lora.dora for module in manifest.modules.values()):
        raise AdapterRejected(["it is a DoRA adapter, and the base model's plain weights are not at hand to load it"])
    report = Report()
    with (folder / WEIGHTS_NAME).open("rb") as file:
        reader = _Reader(file.fileno(), base, dtype, torch.device(device), report)
        sites = tuple(
            _site(manifest, geometry, layer, site, reader) for layer in range(geometry.num_layers) for site in SITES
        )
    report.raise_if_any()
    return AdapterWeights(manifest.digest, sites, dtype, torch.device(device))


class _Reader:
    """Reads modules of one open file and converts them."""

    def __init__(
        self, file: int, base: BaseWeights | None, dtype: torch.dtype, device: torch.device, report: Report
    ) -> None:
        self.file, self.base, self.dtype, self.device, self.report = file, base, dtype, device, report

    def module(self, module: AdapterModule) -> tuple[Tensor, Tensor, Tensor | None]:
        """A [rank, in], B [rank, out], the transpose of PEFT's lora_B times the scaling, and DoRA's gains [out]."""
        a, b = self._exact(module.a), self._exact(module.b) * module.lora.scaling
        gains = self._gains(module, a, b)
        b_t = self._converted(module.b, b, module.lora.scaling).t().contiguous()
        return self._converted(module.a, a), b_t, gains

    def _exact(self, entry: TensorEntry) -> Tensor:
        raw = bytearray(entry.stop - entry.start)
        if os.preadv(self.file, [raw], entry.start) != len(raw):
            raise AdapterRejected([f"{WEIGHTS_NAME} was truncated while it was read"])
        return torch.frombuffer(raw, dtype=_DTYPES[entry.dtype]).view(entry.shape).float()

    def _gains(self, module: AdapterModule, a: Tensor, b: Tensor) -> Tensor | None:
        if module.magnitude is None or self.base is None:
            return None
        weight = self.base.rows(module.lora.layer, module.lora.target)
        gains = dora_gains(weight, a, b, self._exact(module.magnitude))
        if not bool(torch.isfinite(gains).all()):
            self.report.add(f"tensor {module.magnitude.name} meets rows of W + BA that are zero or overflow")
        return gains.to(self.device)

    def _converted(self, entry: TensorEntry, exact: Tensor, scaling: float = 1.0) -> Tensor:
        value = exact.to(self.dtype)
        if not bool(torch.isfinite(value).all()):
            self.report.add(f"tensor {entry.name} with its scaling of {scaling:g} overflows {self.dtype}")
        return value.to(self.device)


def _site(
    manifest: AdapterManifest, geometry: BaseGeometry, layer: int, site: str, reader: _Reader
) -> LoraWeights | None:
    slices = [
        (target, module)
        for target in SITES[site]
        if (module := manifest.modules.get(geometry.module_name(layer, target))) is not None
    ]
    if not slices:
        return None
    a, b, gains = zip(*(reader.module(module) for _, module in slices), strict=True)
    return LoraWeights(
        a=torch.cat(a),
        b=b,
        columns=tuple(geometry.column_of(target) for target, _ in slices),
        gains=gains if any(gain is not None for gain in gains) else None,
    )
