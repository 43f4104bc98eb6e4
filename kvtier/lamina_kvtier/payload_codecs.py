"""How a block's bytes are written in a store: as they are, compressed, or in eight bits a number.

    raw      the block itself; received right where it belongs
    zstd     exact; keys and values are noise to a compressor, so it saves little: 5 to 15 % (needs `zstandard`)
    fp8      lossy: E4M3 (Micikevicius et al., "FP8 formats for deep learning", 2022) with one float32 scale per head
             vector. A quarter of float32's bytes, half of bfloat16's, and an error of 1/16 of each number at most

What is lossy is another layout to a store (`block_codec.layout_digest`): nobody who wants exact blocks finds such ones.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from lamina_kvtier.identity import Layout

__all__ = ["EXACT_CODECS", "LOSSY_CODECS", "Buffer", "NotRepresentable", "PayloadCodec", "codecs_for", "optional"]

Buffer = bytes | bytearray | memoryview

LOSSY_CODECS: Final = frozenset({"fp8"})
_LARGEST = 448.0  # of E4M3: no infinities, one NaN


class NotRepresentable(ValueError):
    """A block that this codec cannot write: it has numbers that are none."""


class PayloadCodec(Protocol):
    """Any thread may use it, several at once."""

    def encode(self, block: memoryview) -> Buffer:
        """Raises NotRepresentable."""
        ...

    def decode(self, payload: Buffer, into: memoryview) -> bool:
        """False: it is no payload of exactly as many bytes as `into` has. Then `into` is undefined."""
        ...


def codecs_for(layout: Layout) -> dict[str, PayloadCodec]:
    """What can be read and written here for blocks of this layout, by name."""
    codecs = dict(EXACT_CODECS)
    if layout.dtype in _WIDEN:
        codecs["fp8"] = _Fp8(layout.dtype, layout.head_dim)
    return codecs


def optional(module: str) -> Any:
    """The module, or None if it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError:
        return None


class _Raw:
    def encode(self, block: memoryview) -> Buffer:
        return block

    def decode(self, payload: Buffer, into: memoryview) -> bool:
        into[:] = payload
        return True


class _Zstd:
    """Level 1: more effort finds nothing more."""

    def __init__(self, zstandard: Any) -> None:
        self._library = zstandard

    def encode(self, block: memoryview) -> Buffer:
        compressed: bytes = self._library.ZstdCompressor(level=1).compress(block)  # not shared: one thread each
        return compressed

    def decode(self, payload: Buffer, into: memoryview) -> bool:
        try:
            if self._library.frame_content_size(payload) != into.nbytes:
                return False
            block = self._library.ZstdDecompressor().decompress(payload)
        except self._library.ZstdError:
            return False
        into[:] = block
        return True


class _Fp8:
    """Scales of all vectors (float32, little-endian), then their numbers (one byte each), in the block's order.

    Tables instead of arithmetic: numpy has no eight-bit floats, and torch would start threads of its own in each of
    the store's. The upper half of a float32 has more digits than E4M3, so a table of 65,536 rounds to nearest, but for
    ties.
    """

    def __init__(self, dtype: str, head_dim: int) -> None:
        self._dtype, self._head_dim = dtype, head_dim
        self._width = _WIDTHS[dtype]

    def encode(self, block: memoryview) -> Buffer:
        numbers = _WIDEN[self._dtype](block).reshape(-1, self._head_dim)
        scales = np.maximum(np.abs(numbers).max(axis=1), np.float32(1e-30)) / np.float32(_LARGEST)
        if not np.isfinite(scales).all():
            raise NotRepresentable("a block with infinities or NaNs has no FP8 form")
        scaled = np.ascontiguousarray(numbers / scales[:, None])
        eighths = _TO_FP8[scaled.view(np.uint32) >> np.uint32(16)]
        return bytes(scales.astype("<f4").tobytes() + eighths.tobytes())

    def decode(self, payload: Buffer, into: memoryview) -> bool:
        count = into.nbytes // self._width
        vectors = count // self._head_dim
        if len(payload) != 4 * vectors + count or vectors * self._head_dim * self._width != into.nbytes:
            return False
        scales = np.frombuffer(payload, "<f4", vectors)
        numbers = _FROM_FP8[np.frombuffer(payload, np.uint8, count, 4 * vectors)].reshape(vectors, self._head_dim)
        into[:] = _NARROW[self._dtype](numbers * scales[:, None]).reshape(-1).view(np.uint8).data
        return bool(np.isfinite(scales).all())


# Between float32 and what a block holds.


def _float32(block: Buffer) -> NDArray[np.float32]:
    return np.frombuffer(block, np.float32)


def _float16(block: Buffer) -> NDArray[np.float32]:
    return np.frombuffer(block, np.float16).astype(np.float32)


def _bfloat16(block: Buffer) -> NDArray[np.float32]:
    halves = np.frombuffer(block, np.uint16).astype(np.uint32)
    return (halves << np.uint32(16)).view(np.float32)


def _to_bfloat16(numbers: NDArray[np.float32]) -> NDArray[Any]:
    """Rounds to nearest, ties to even."""
    bits = np.ascontiguousarray(numbers, np.float32).view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)


_WIDTHS: Mapping[str, int] = {"float32": 4, "float16": 2, "bfloat16": 2}
_WIDEN: Mapping[str, Callable[[Buffer], NDArray[np.float32]]] = {
    "float32": _float32,
    "float16": _float16,
    "bfloat16": _bfloat16,
}
_NARROW: Mapping[str, Callable[[NDArray[np.float32]], NDArray[Any]]] = {
    "float32": lambda numbers: np.ascontiguousarray(numbers, np.float32),
    "float16": lambda numbers: np.ascontiguousarray(numbers, np.float16),
    "bfloat16": _to_bfloat16,
}


def _from_fp8() -> NDArray[np.float32]:
    """float32 of each of the 256 bytes: sign, 4 bits of exponent (bias 7), 3 of mantissa; 0x7f and 0xff are NaN."""
    byte = np.arange(256)
    exponent, mantissa = (byte >> 3) & 15, byte & 7
    normal = (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    size = np.where(exponent == 0, mantissa / 8 * 2.0**-6, normal)
    values = np.where(byte & 128, -size, size).astype(np.float32)
    values[[0x7F, 0xFF]] = np.nan
    return values


def _to_fp8(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """The nearest byte for each upper half of a float32, judged by the middle of what it stands for."""
    sizes = values[:0x7F].astype(np.float64)  # ascending
    middle = ((np.arange(0x8000, dtype=np.uint32) << np.uint32(16)) | np.uint32(0x8000)).view(np.float32)
    with np.errstate(invalid="ignore"):
        nearest = np.searchsorted((sizes[1:] + sizes[:-1]) / 2, middle.astype(np.float64)).clip(0, 0x7E)
    return np.concatenate([nearest, nearest + 128]).astype(np.uint8)


_FROM_FP8 = _from_fp8()
_TO_FP8 = _to_fp8(_FROM_FP8)


def _exact_codecs() -> dict[str, PayloadCodec]:
    zstandard = optional("zstandard")
    return {"raw": _Raw()} if zstandard is None else {"raw": _Raw(), "zstd": _Zstd(zstandard)}


EXACT_CODECS: Mapping[str, PayloadCodec] = _exact_codecs()
