"""Writes a safetensors file tensor by tensor, so that a model is never in memory whole."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

__all__ = ["Bf16Writer", "to_bf16"]

_ALIGN = 8  # bytes; the format wants the tensor data aligned


def to_bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Rounds to the nearest bfloat16 (ties to even), as bit patterns. `values` must be finite."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounding = ((bits >> np.uint32(16)) & np.uint32(1)) + np.uint32(0x7FFF)
    return ((bits + rounding) >> np.uint32(16)).astype(np.uint16)


@dataclass(frozen=True, slots=True)
class _Span:
    start: int  # bytes, from the start of the data
    stop: int


class Bf16Writer:
    """Use as a context manager: shapes first, then `write` each tensor once, in that order."""

    def __init__(self, path: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._spans: dict[str, _Span] = {}
        offset = 0
        for name, shape in shapes.items():
            size = int(np.prod(shape, dtype=np.int64)) * 2
            self._spans[name] = _Span(offset, offset + size)
            offset += size
        self.total_bytes = offset
        self._pending = list(shapes)
        self._file = path.open("xb")
        self._file.write(_header(shapes, self._spans))

    def write(self, name: str, values: NDArray[np.float32]) -> int:
        """Appends one tensor; returns how many bytes of data are written by now."""
        assert self._pending.pop(0) == name, "tensors come in the order of `shapes`"
        span = self._spans[name]
        assert values.size * 2 == span.stop - span.start, name
        self._file.write(to_bf16(values).astype("<u2", copy=False).tobytes())
        return span.stop

    def __enter__(self) -> Bf16Writer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        assert kind is not None or not self._pending, self._pending


def _header(shapes: Mapping[str, tuple[int, ...]], spans: Mapping[str, _Span]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    for name, shape in shapes.items():
        span = spans[name]
        entries[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [span.start, span.stop]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGN)
    return len(text).to_bytes(8, "little") + text
