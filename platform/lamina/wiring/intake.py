"""The judge of adapter folders and the store of their files, as `lamina.tenancy` wants them. Loads no torch."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lamina.config import EngineConfig
from lamina.errors import InvalidAdapter
from lamina.models.config import ModelConfig
from lamina.tenancy.intake import ValidatedAdapter
from lamina_lora.errors import AdapterMissing, AdapterRejected, InvalidDigest
from lamina_lora.geometry import BaseGeometry
from lamina_lora.store import ADAPTER_FILES, AdapterStore
from lamina_lora.validate import WEIGHTS_NAME, validate_adapter

__all__ = ["LoraIntake"]


class LoraIntake:
    """Implements `lamina.tenancy.intake.AdapterIntake` with `lamina_lora`. Thread-safe."""

    def __init__(self, store: AdapterStore, geometry: BaseGeometry, *, max_rank: int) -> None:
        self._store = store
        self._geometry = geometry
        self._max_rank = max_rank

    @classmethod
    def for_model(cls, engine: EngineConfig) -> LoraIntake:
        """For adapters of this engine's base model. Raises UnsupportedModel."""
        geometry = ModelConfig.from_folder(engine.model).geometry()
        return cls(AdapterStore(engine.adapters), geometry, max_rank=engine.max_lora_rank)

    def validate(self, folder: Path) -> ValidatedAdapter:
        """Raises InvalidAdapter with all violations."""
        with _refusals():
            manifest = validate_adapter(folder, self._geometry, max_rank=self._max_rank)
            return ValidatedAdapter(
                digest=manifest.digest,
                rank=manifest.max_rank,
                size_bytes=(folder / WEIGHTS_NAME).stat().st_size,
            )

    def publish(self, folder: Path, adapter: ValidatedAdapter) -> None:
        """Raises InvalidAdapter if the folder changed after it was validated.

        What enters is a private copy that was validated itself: tenants share the store, and a wrong file under
        a digest would be wrong for everyone who owns it.
        """
        if self._store.contains(adapter.digest):
            return
        with _refusals(), self._store.staging() as copy:
            for name in ADAPTER_FILES:
                shutil.copyfile(folder / name, copy / name)
            if self.validate(copy).digest != adapter.digest:
                raise InvalidAdapter(["the files changed while they were taken in; upload them again"])
            self._store.publish(copy, adapter.digest)

    def contains(self, digest: str) -> bool:
        with suppress(InvalidDigest):
            return self._store.contains(digest)
        return False

    def remove(self, digest: str) -> None:
        with suppress(AdapterMissing, InvalidDigest):
            self._store.remove(digest)

    def digests(self) -> tuple[str, ...]:
        return tuple(self._store.digests())


@contextmanager
def _refusals() -> Iterator[None]:
    try:
        yield
    except AdapterRejected as error:
        raise InvalidAdapter(error.violations) from error
    except FileNotFoundError as error:
        raise InvalidAdapter([f"{Path(error.filename).name} is missing"]) from error
