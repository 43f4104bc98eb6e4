"""Checks a safetensors file's header before anything is allocated for its tensors. Torch-free.

The file is: 8 bytes little-endian header length, the header (a JSON object from tensor name to dtype, shape and
data_offsets), then the tensors' bytes, which the offsets must tile exactly.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

from lamina_lora.errors import AdapterRejected
from lamina_lora.report import Report, quoted
from lamina_lora.strict_json import parse_object

__all__ = ["DTYPE_BYTES", "MAX_HEADER_BYTES", "MAX_TENSORS", "TensorEntry", "read_header"]

MAX_HEADER_BYTES = 8 << 20
MAX_TENSORS = 65_536
MAX_DIMENSIONS = 4
MAX_DIMENSION = 1 << 24

DTYPE_BYTES: Mapping[str, int] = MappingProxyType({"F32": 4, "F16": 2, "BF16": 2})
"""The dtypes that adapter weights may have, and their bytes per element."""

_OTHER_FORMATS: tuple[tuple[bytes, str], ...] = (
    (b"PK\x03\x04", "a zip archive (the format of torch.save), which can run code when it is loaded"),
    (b"\x80\x02", "a Python pickle, which can run code when it is loaded"),
    (b"\x80\x03", "a Python pickle, which can run code when it is loaded"),
    (b"\x80\x04", "a Python pickle, which can run code when it is loaded"),
    (b"\x80\x05", "a Python pickle, which can run code when it is loaded"),
    (b"GGUF", "a GGUF file"),
    (b"\x1f\x8b", "a gzip archive"),
    (b"\x89HDF", "an HDF5 file"),
    (b"version https://git-lfs", "a Git LFS pointer: fetch the real file with `git lfs pull`"),
)


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a checked file. `start` and `stop` are byte offsets from the start of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def read_header(path: Path) -> tuple[TensorEntry, ...]:
    """The file's tensors in file order.

    Raises AdapterRejected with every violation found: not a regular file, another format, a header longer than
    8 MiB or than the file, bad JSON, duplicate names, dtypes other than F32, F16 and BF16, empty or oversized
    shapes, offsets that overlap, leave gaps, disagree with the shape or do not end with the file.
    """
    try:
        if not path.is_file():
            raise AdapterRejected([f"{path.name} is missing"])
        with path.open("rb") as file:
            return _read(file, path.stat().st_size, path.name)
    except OSError as error:
        raise AdapterRejected([f"{path.name} cannot be read ({error.strerror})"]) from error


def _read(file: BinaryIO, size: int, name: str) -> tuple[TensorEntry, ...]:
    start = file.read(32)
    for magic, what in _OTHER_FORMATS:
        if start.startswith(magic):
            raise AdapterRejected([f"{name} is {what}; save the adapter as safetensors"])
    if len(start) < 8:
        raise AdapterRejected([f"{name} is truncated: {size} bytes are too few for a safetensors file"])
    (length,) = struct.unpack("<Q", start[:8])
    if length > MAX_HEADER_BYTES:
        raise AdapterRejected(
            [f"{name} has a header of {length} bytes; the limit is {MAX_HEADER_BYTES} (is it safetensors?)"]
        )
    if 8 + length > size:
        raise AdapterRejected([f"{name} is truncated: its header needs {8 + length} bytes, it has {size}"])
    file.seek(8)
    try:
        header = parse_object(file.read(length))
    except ValueError as error:
        raise AdapterRejected([f"{name} has a bad header: {error}"]) from error
    return _entries(header, data_start=8 + length, size=size, name=name)


def _entries(header: dict[str, Any], *, data_start: int, size: int, name: str) -> tuple[TensorEntry, ...]:
    report = Report()
    _check_metadata(header.pop("__metadata__", None), name, report)
    if len(header) > MAX_TENSORS:
        raise AdapterRejected([f"{name} lists {len(header)} tensors; the limit is {MAX_TENSORS}"])
    entries = [_entry(key, value, data_start, report) for key, value in header.items()]
    report.raise_if_any()
    found = sorted((e for e in entries if e is not None), key=lambda e: (e.start, e.stop))
    _check_tiling(found, data_start, size, name, report)
    report.raise_if_any()
    return tuple(found)


def _check_metadata(metadata: object, name: str, report: Report) -> None:
    if metadata is None:
        return
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        report.add(f"{name}: __metadata__ must map strings to strings")


def _entry(name: str, value: object, data_start: int, report: Report) -> TensorEntry | None:
    label = f"tensor {quoted(name)}"
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        report.add(f"{label} must have exactly dtype, shape and data_offsets")
        return None
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        report.add(f"{label} has dtype {quoted(dtype)}; allowed are {', '.join(DTYPE_BYTES)}")
        return None
    if not _are_ints(shape, 1, MAX_DIMENSION) or len(shape) > MAX_DIMENSIONS:
        report.add(
            f"{label} has shape {quoted(shape)}; at most {MAX_DIMENSIONS} dimensions "
            f"of 1 to {MAX_DIMENSION} are allowed"
        )
        return None
    if not _are_ints(offsets, 0, 1 << 62) or len(offsets) != 2:
        report.add(f"{label} has data_offsets {quoted(offsets)}; two byte offsets are expected")
        return None
    need = prod(shape) * DTYPE_BYTES[dtype]
    if offsets[1] - offsets[0] != need:
        report.add(f"{label} needs {need} bytes for its shape, its data_offsets span {offsets[1] - offsets[0]}")
        return None
    return TensorEntry(name, dtype, tuple(shape), data_start + offsets[0], data_start + offsets[1])


def _are_ints(value: Any, low: int, high: int) -> bool:
    return isinstance(value, list) and all(type(item) is int and low <= item <= high for item in value)


def _check_tiling(entries: list[TensorEntry], data_start: int, size: int, name: str, report: Report) -> None:
    end = data_start
    for entry in entries:
        if entry.start < end:
            report.add(f"tensor {quoted(entry.name)} overlaps the tensor before it")
        elif entry.start > end:
            report.add(f"{entry.start - end} bytes before tensor {quoted(entry.name)} belong to no tensor")
        end = max(end, entry.stop)
    if end > size:
        report.add(f"{name} is truncated: its tensors need {end} bytes, it has {size}")
    elif end < size:
        report.add(f"{name} has {size - end} bytes after its last tensor")
