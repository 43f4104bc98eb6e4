"""The adapter store and the judge of adapter folders, by `lamina_lora`. Loads no torch."""

from __future__ import annotations

import contextlib
from pathlib import Path

from lamina.errors import InvalidAdapter
from lamina.tenancy.intake import ValidatedAdapter
from lamina_lora.errors import AdapterMissing, AdapterRejected
from lamina_lora.geometry import BaseGeometry
from lamina_lora.store import ADAPTER_FILES, AdapterStore
from lamina_lora.validate import validate_adapter

__all__ = ["LoraFiles", "LoraIntake"]

_NO_EFFECT = (
    "every lora_B is zero, as before training, so the adapter would answer exactly like the base model; "
    "upload a trained one"
)


class LoraFiles:
    """`AdapterFiles` over an adapter store; enough for whoever takes nothing in."""

    def __init__(self, *, store: AdapterStore) -> None:
        self._store = store

    def contains(self, digest: str) -> bool:
        return self._store.contains(digest)

    def remove(self, digest: str) -> None:
        with contextlib.suppress(AdapterMissing):
            self._store.remove(digest)

    def digests(self) -> tuple[str, ...]:
        return tuple(self._store.digests())

    def sweep(self) -> int:
        return self._store.sweep()


class LoraIntake(LoraFiles):
    """`AdapterIntake` for one base model."""

    def __init__(self, *, store: AdapterStore, geometry: BaseGeometry, max_rank: int) -> None:
        super().__init__(store=store)
        self._geometry = geometry
        self._max_rank = max_rank

    def validate(self, folder: Path) -> ValidatedAdapter:
        """Reads both files completely. Raises InvalidAdapter, also for an adapter that changes nothing."""
        try:
            manifest = validate_adapter(folder, self._geometry, max_rank=self._max_rank)
        except AdapterRejected as rejected:
            raise InvalidAdapter(rejected.violations) from rejected
        if not manifest.has_effect:
            raise InvalidAdapter([_NO_EFFECT])
        size = sum((folder / name).stat().st_size for name in ADAPTER_FILES)
        return ValidatedAdapter(digest=manifest.digest, rank=manifest.max_rank, size_bytes=size)

    def publish(self, folder: Path, adapter: ValidatedAdapter) -> None:
        """Copies the two files. `folder` must not change between validation and this."""
        try:
            self._store.publish(folder, adapter.digest)
        except AdapterRejected as rejected:
            raise InvalidAdapter(rejected.violations) from rejected
