"""Validates an adapter folder against a base model: everything is understood and fits, or all violations at once.

Torch-free, and bounded in memory: weights are read in pieces, after the header has been checked.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from lamina_lora.digest import AdapterHasher
from lamina_lora.errors import AdapterRejected
from lamina_lora.geometry import BaseGeometry
from lamina_lora.peft_config import read_peft_config
from lamina_lora.report import Report, quoted
from lamina_lora.safetensors_header import TensorEntry, read_header
from lamina_lora.targets import ModuleLora, resolve_targets

__all__ = ["WEIGHTS_NAME", "AdapterManifest", "AdapterModule", "validate_adapter"]

WEIGHTS_NAME = "adapter_model.safetensors"
_PICKLE_NAME = "adapter_model.bin"
_Key = tuple[str, str]  # module name, "A" or "B"
_PIECE = 4 << 20  # bytes read at a time
_NAME = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])(?:\.default)?\.weight")
_EXPONENT: Mapping[str, tuple[np.dtype[Any], int]] = {  # all exponent bits set: infinite or not a number
    "F32": (np.dtype(np.uint32), 0x7F80_0000),
    "F16": (np.dtype(np.uint16), 0x7C00),
    "BF16": (np.dtype(np.uint16), 0x7F80),
}


@dataclass(frozen=True, slots=True)
class AdapterModule:
    """One adapted module and where its weights lie in the file."""

    lora: ModuleLora
    a: TensorEntry  # [rank, in_features]
    b: TensorEntry  # [out_features, rank]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterManifest:
    """What a validated adapter is. Equal digests mean equal effect on the same base model."""

    digest: str
    modules: Mapping[str, AdapterModule]  # by module name, in the model's order
    max_rank: int
    num_parameters: int
    has_effect: bool  # False: every B is zero, as before training, so the adapter serves the base model

    @property
    def targets(self) -> tuple[str, ...]:
        """The projections that are changed in at least one layer."""
        return tuple(dict.fromkeys(module.lora.target for module in self.modules.values()))


def validate_adapter(folder: Path, geometry: BaseGeometry, *, max_rank: int) -> AdapterManifest:
    """Reads `adapter_config.json` and `adapter_model.safetensors` in `folder` completely.

    Raises AdapterRejected with all violations: of the configuration (see `peft_config`, `targets`), of the
    file's structure (see `safetensors_header`), tensors that match no target, targets without both tensors,
    shapes that do not fit the base model and the rank, NaN and infinite values.
    """
    report = Report()
    targets: Mapping[str, ModuleLora] = {}
    pairs: dict[_Key, TensorEntry] = {}
    with report.absorb():
        targets = resolve_targets(read_peft_config(folder), geometry, max_rank=max_rank)
    with report.absorb():
        entries = _read_entries(folder)
        pairs = _pair(entries, report)
        if targets:
            _match(pairs, targets, geometry, report)
    digest, has_effect = _scan(folder / WEIGHTS_NAME, pairs, targets, report)
    report.raise_if_any()
    modules = {name: AdapterModule(lora, pairs[name, "A"], pairs[name, "B"]) for name, lora in targets.items()}
    return AdapterManifest(
        digest=digest,
        modules=modules,
        max_rank=max(lora.rank for lora in targets.values()),
        num_parameters=sum(prod(entry.shape) for entry in pairs.values()),
        has_effect=has_effect,
    )


def _read_entries(folder: Path) -> tuple[TensorEntry, ...]:
    if not (folder / WEIGHTS_NAME).exists() and (folder / _PICKLE_NAME).exists():
        raise AdapterRejected(
            [f"{_PICKLE_NAME} is a pickle, which can run code when it is loaded; save {WEIGHTS_NAME} instead"]
        )
    return read_header(folder / WEIGHTS_NAME)


def _pair(entries: Iterable[TensorEntry], report: Report) -> dict[_Key, TensorEntry]:
    """Tensors by (module name, "A" or "B"); what is not a LoRA weight is reported."""
    found: dict[_Key, TensorEntry] = {}
    for entry in entries:
        match = _NAME.fullmatch(entry.name)
        if match is None:
            report.add(f"tensor {quoted(entry.name)} is not understood")
            continue
        key = (match["module"], match["side"])
        if key in found:
            report.add(f"tensor {quoted(entry.name)} is given twice, with and without '.default'")
        found[key] = entry
    return found


def _match(
    pairs: Mapping[_Key, TensorEntry],
    targets: Mapping[str, ModuleLora],
    geometry: BaseGeometry,
    report: Report,
) -> None:
    for (module, side), entry in pairs.items():
        if module not in targets:
            report.add(f"tensor {quoted(entry.name)} belongs to no targeted module of the base model")
        elif (module, "B" if side == "A" else "A") not in pairs:
            report.add(f"{module} has lora_{side} only; both A and B are needed")
    for module, lora in targets.items():
        if (module, "A") not in pairs and (module, "B") not in pairs:
            report.add(f"{module} is targeted, but its lora_A and lora_B are missing")
        fan_in, fan_out = geometry.targets[lora.target]
        for side, shape in (("A", (lora.rank, fan_in)), ("B", (fan_out, lora.rank))):
            found = pairs.get((module, side))
            if found is not None and found.shape != shape:
                report.add(f"{module}: lora_{side} has shape {list(found.shape)}, {list(shape)} is needed")


def _scan(
    path: Path, pairs: Mapping[_Key, TensorEntry], targets: Mapping[str, ModuleLora], report: Report
) -> tuple[str, bool]:
    """Reads every weight once: reports values that are not finite; gives the digest and whether any B is not zero."""
    hasher, has_effect = AdapterHasher(), False
    for name, lora in sorted(targets.items()):
        hasher.module(name, lora.rank, lora.scaling)
    if not pairs:
        return hasher.hexdigest(), False
    with path.open("rb") as file:
        for (module, side), entry in sorted(pairs.items()):
            hasher.tensor(f"{module}.lora_{side}", entry.dtype, entry.shape)
            not_finite, not_zero = _scan_tensor(file, entry, hasher)
            if not_finite:
                report.add(f"tensor {quoted(entry.name)} has {not_finite} values that are NaN or infinite")
            has_effect |= not_zero and side == "B"
    return hasher.hexdigest(), has_effect


def _scan_tensor(file: BinaryIO, entry: TensorEntry, hasher: AdapterHasher) -> tuple[int, bool]:
    bits, exponent = _EXPONENT[entry.dtype]
    magnitude = np.iinfo(bits).max >> 1  # everything but the sign
    not_finite, not_zero = 0, False
    for piece in _pieces(file, entry):
        hasher.data(piece)
        values = np.frombuffer(piece, dtype=bits)
        not_finite += int(np.count_nonzero((values & exponent) == exponent))
        not_zero = not_zero or bool(np.any(values & magnitude))
    return not_finite, not_zero


def _pieces(file: BinaryIO, entry: TensorEntry) -> Iterator[bytes]:
    file.seek(entry.start)
    left = entry.stop - entry.start
    while left:
        piece = file.read(min(left, _PIECE))
        if len(piece) != min(left, _PIECE):
            raise AdapterRejected([f"{WEIGHTS_NAME} was truncated while it was read"])
        left -= len(piece)
        yield piece
