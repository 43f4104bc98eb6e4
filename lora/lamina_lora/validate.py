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
_Key = tuple[str, str]  # module name; "A", "B" or
_MAGNITUDE = "magnitude_vector"
_PIECE = 4 << 20  # bytes read at a time
_LORA = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<part>[AB])(?:\.default)?\.weight")
_DORA = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<part>magnitude_vector)(?:(?:\.default)?\.weight)?")
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
    magnitude: TensorEntry | None = None  # [out_features], with DoRA


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterManifest:
    """What a validated adapter is. Equal digests mean equal effect on the same base model."""

    digest: str
    modules: Mapping[str, AdapterModule]  # by module name, in the model's order
    max_rank: int
    num_parameters: int
    has_effect: bool  # False: every B is zero, as before training, and DoRA sets no lengths: this is the base model

    @property
    def targets(self) -> tuple[str, ...]:
        """The projections that are changed in at least one layer."""
        return tuple(dict.fromkeys(module.lora.target for module in self.modules.values()))


def validate_adapter(folder: Path, geometry: BaseGeometry, *, max_rank: int) -> AdapterManifest:
    """Reads `adapter_config.json` and `adapter_model.safetensors` in `folder` completely.

    Raises AdapterRejected with all violations: of the configuration (see `peft_config`, `targets`), of the
    file's structure (see `safetensors_header`), tensors that match no target, targets without both tensors or,
    with DoRA, without a magnitude, magnitudes without DoRA, shapes that do not fit the base model and the rank, NaN
    and infinite values.
    """
    report = Report()
    targets: Mapping[str, ModuleLora] = {}
    parts: dict[_Key, TensorEntry] = {}
    with report.absorb():
        targets = resolve_targets(read_peft_config(folder), geometry, max_rank=max_rank)
    with report.absorb():
        entries = _read_entries(folder)
        parts = _parts(entries, report)
        if targets:
            _check_presence(parts, targets, report)
            _check_shapes(parts, targets, geometry, report)
    digest, has_effect = _scan(folder / WEIGHTS_NAME, parts, targets, report)
    report.raise_if_any()
    modules = {
        name: AdapterModule(lora, parts[name, "A"], parts[name, "B"], parts.get((name, _MAGNITUDE)))
        for name, lora in targets.items()
    }
    return AdapterManifest(
        digest=digest,
        modules=modules,
        max_rank=max(lora.rank for lora in targets.values()),
        num_parameters=sum(prod(entry.shape) for entry in parts.values()),
        has_effect=has_effect,
    )


def _read_entries(folder: Path) -> tuple[TensorEntry, ...]:
    if not (folder / WEIGHTS_NAME).exists() and (folder / _PICKLE_NAME).exists():
        raise AdapterRejected(
            [f"{_PICKLE_NAME} is a pickle, which can run code when it is loaded; save {WEIGHTS_NAME} instead"]
        )
    return read_header(folder / WEIGHTS_NAME)


def _parts(entries: Iterable[TensorEntry], report: Report) -> dict[_Key, TensorEntry]:
    """Tensors by module and part; what is not a LoRA weight is reported."""
    found: dict[_Key, TensorEntry] = {}
    for entry in entries:
        match = _LORA.fullmatch(entry.name) or _DORA.fullmatch(entry.name)
        if match is None:
            report.add(f"tensor {quoted(entry.name)} is not understood")
            continue
        key = (match["module"], match["part"])
        if key in found:
            report.add(f"tensor {quoted(entry.name)} is given twice, under two spellings of its name")
        found[key] = entry
    return found


def _check_presence(parts: Mapping[_Key, TensorEntry], targets: Mapping[str, ModuleLora], report: Report) -> None:
    for (module, part), entry in parts.items():
        if module not in targets:
            report.add(f"tensor {quoted(entry.name)} belongs to no targeted module of the base model")
        elif part == _MAGNITUDE and not targets[module].dora:
            report.add(f"{module} has a lora_{_MAGNITUDE}, but use_dora is not set")
        elif part != _MAGNITUDE and (module, "B" if part == "A" else "A") not in parts:
            report.add(f"{module} has lora_{part} only; both A and B are needed")
    for module, lora in targets.items():
        if (module, "A") not in parts and (module, "B") not in parts:
            report.add(f"{module} is targeted, but its lora_A and lora_B are missing")
        if lora.dora and (module, _MAGNITUDE) not in parts:
            report.add(f"{module} is targeted with use_dora, but its lora_{_MAGNITUDE} is missing")


def _check_shapes(
    parts: Mapping[_Key, TensorEntry],
    targets: Mapping[str, ModuleLora],
    geometry: BaseGeometry,
    report: Report,
) -> None:
    for module, lora in targets.items():
        fan_in, fan_out = geometry.targets[lora.target]
        for part, shape in (("A", (lora.rank, fan_in)), ("B", (fan_out, lora.rank)), (_MAGNITUDE, (fan_out,))):
            found = parts.get((module, part))
            if found is not None and found.shape != shape:
                report.add(f"{module}: lora_{part} has shape {list(found.shape)}, {list(shape)} is needed")


def _scan(
    path: Path, parts: Mapping[_Key, TensorEntry], targets: Mapping[str, ModuleLora], report: Report
) -> tuple[str, bool]:
    """Reads every weight once: reports values that are not finite; gives the digest and whether it has an effect."""
    hasher, has_effect = AdapterHasher(), False
    for name, lora in sorted(targets.items()):
        hasher.module(name, lora.rank, lora.scaling)
    if not parts:
        return hasher.hexdigest(), False
    with path.open("rb") as file:
        for (module, part), entry in sorted(parts.items()):
            hasher.tensor(f"{module}.lora_{part}", entry.dtype, entry.shape)
            not_finite, not_zero = _scan_tensor(file, entry, hasher)
            if not_finite:
                report.add(f"tensor {quoted(entry.name)} has {not_finite} values that are NaN or infinite")
            has_effect |= part == _MAGNITUDE or (not_zero and part == "B")  # lengths as they were: only W could tell
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
