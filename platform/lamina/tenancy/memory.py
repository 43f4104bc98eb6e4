"""The in-memory twin of the adapter store, for tests of everything above it."""

from __future__ import annotations

import hashlib
import threading
from pathlib import Path

from lamina.errors import InvalidAdapter
from lamina.tenancy.intake import ValidatedAdapter

__all__ = ["MemoryIntake"]


class MemoryIntake:
    """Accepts any folder that holds both PEFT file names; the digest is a hash of their bytes."""

    def __init__(self, *, rank: int = 8) -> None:
        self.files: dict[str, bytes] = {}
        self._rank = rank
        self._lock = threading.Lock()

    def validate(self, folder: Path) -> ValidatedAdapter:
        content = _content(folder)
        return ValidatedAdapter(digest=hashlib.sha256(content).hexdigest(), rank=self._rank, size_bytes=len(content))

    def publish(self, folder: Path, adapter: ValidatedAdapter) -> None:
        content = _content(folder)
        if hashlib.sha256(content).hexdigest() != adapter.digest:
            raise InvalidAdapter(["the files changed after they were validated"])
        with self._lock:
            self.files.setdefault(adapter.digest, content)

    def contains(self, digest: str) -> bool:
        return digest in self.files

    def remove(self, digest: str) -> None:
        with self._lock:
            self.files.pop(digest, None)

    def digests(self) -> tuple[str, ...]:
        with self._lock:
            return tuple(sorted(self.files))

    def sweep(self) -> int:
        return 0  # nothing is ever half-written here


def _content(folder: Path) -> bytes:
    parts = []
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        try:
            data = (folder / name).read_bytes()
        except OSError:
            raise InvalidAdapter([f"{name} is missing"]) from None
        parts.append(len(data).to_bytes(8, "big") + data)
    return b"".join(parts)
