"""Adapter identity: blake3 over the effective configuration and the weights. Torch-free.

Two folders have the same digest exactly when they mean the same adapter: per module the rank and the scaling, then
every tensor's name, dtype, shape and bytes, in the order of their names. Metadata, tensor order, JSON formatting and
keys without effect do not enter. rsLoRA and the patterns enter through each module's scaling.
"""

from __future__ import annotations

import re
import struct

from blake3 import blake3

from lamina_lora.errors import InvalidDigest

__all__ = ["AdapterHasher", "check_digest"]

_FORMAT = b"lamina-adapter-1"
_DIGEST = re.compile(r"[0-9a-f]{64}")


def check_digest(digest: str) -> str:
    """Returns `digest`, or raises InvalidDigest unless it is 64 lower-case hexadecimal digits."""
    if not _DIGEST.fullmatch(digest):
        raise InvalidDigest(digest)
    return digest


class AdapterHasher:
    """Feeds one adapter into its digest: all modules first, then all tensors, each in the order of their names."""

    def __init__(self) -> None:
        self._hash = blake3()
        self._text(_FORMAT)

    def module(self, name: str, rank: int, scaling: float) -> None:
        self._text(b"module")
        self._text(name.encode())
        self._hash.update(struct.pack("<Qd", rank, scaling))

    def tensor(self, name: str, dtype: str, shape: tuple[int, ...]) -> None:
        """Opens a tensor; its bytes follow through `data`, as many as dtype and shape say."""
        self._text(b"tensor")
        self._text(name.encode())
        self._text(dtype.encode())
        self._hash.update(struct.pack(f"<Q{len(shape)}Q", len(shape), *shape))

    def data(self, piece: bytes | bytearray | memoryview) -> None:
        self._hash.update(piece)

    def hexdigest(self) -> str:
        return self._hash.hexdigest()

    def _text(self, field: bytes) -> None:
        self._hash.update(struct.pack("<Q", len(field)))
        self._hash.update(field)
