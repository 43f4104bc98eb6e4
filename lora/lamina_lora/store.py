"""Adapters on disk, addressed by their digest. Torch-free.

    <root>/<digest>/adapter_config.json, adapter_model.safetensors    published: complete and never changed
    <root>/.staging-*/                                                 being written; swept when left over

A folder appears under its digest by one rename, after its files have reached the disk, so that a reader finds all of
an adapter or nothing, whatever was killed when. The two files are the only ones that are kept.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lamina_lora.digest import check_digest
from lamina_lora.errors import AdapterMissing, AdapterRejected
from lamina_lora.peft_config import CONFIG_NAME
from lamina_lora.validate import WEIGHTS_NAME

__all__ = ["ADAPTER_FILES", "AdapterStore"]

ADAPTER_FILES = (CONFIG_NAME, WEIGHTS_NAME)
_STAGING = ".staging-"


class AdapterStore:
    """The content-addressed adapters below one root folder, which is created when needed.

    Safe to use from several threads and processes at once: publishing the same digest twice is one adapter.
    A digest that is not 64 lower-case hexadecimal digits raises InvalidDigest, so no name ever leaves the root.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, digest: str) -> Path:
        """The adapter's folder; AdapterMissing if it is not published."""
        folder = self.root / check_digest(digest)
        if not folder.is_dir():
            raise AdapterMissing(digest)
        return folder

    def contains(self, digest: str) -> bool:
        return (self.root / check_digest(digest)).is_dir()

    def digests(self) -> list[str]:
        """Every published digest, sorted."""
        if not self.root.is_dir():
            return []
        return sorted(p.name for p in self.root.iterdir() if p.is_dir() and not p.name.startswith("."))

    def publish(self, folder: Path, digest: str) -> Path:
        """Copies the adapter's two files from `folder` into the store and returns where they are now.

        `digest` is what `validate_adapter(folder, ...)` gave; the caller vouches for it. Nothing happens if the
        digest is published already. AdapterRejected if one of the files is missing; OSError if the disk fails.
        """
        target = self.root / check_digest(digest)
        if target.is_dir():
            return target
        with self.staging() as staged:
            for name in ADAPTER_FILES:
                _copy(folder / name, staged / name)
            _sync_folder(staged)
            self._rename(staged, target)
        return target

    def remove(self, digest: str) -> None:
        """Removes the adapter; AdapterMissing if it is not there. It vanishes by one rename, then is deleted."""
        folder = self.path(digest)
        with self.staging() as trash:
            try:
                folder.rename(trash / digest)
            except FileNotFoundError as error:
                raise AdapterMissing(digest) from error
            _sync_folder(self.root)

    @contextmanager
    def staging(self) -> Iterator[Path]:
        """A private folder (mode 0700) on the store's file system, deleted with its contents afterwards."""
        self.root.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=_STAGING, dir=self.root))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)  # gone if it was published

    def sweep(self, *, older_than_s: float = 3600.0) -> int:
        """Deletes staging folders that a killed process left behind, and returns how many.

        Only those untouched for `older_than_s` seconds: younger ones may belong to a running upload.
        """
        if not self.root.is_dir():
            return 0
        limit = time.time() - older_than_s
        left = [p for p in self.root.glob(f"{_STAGING}*") if _modified(p) <= limit]
        for folder in left:
            shutil.rmtree(folder, ignore_errors=True)
        return len(left)

    def _rename(self, staged: Path, target: Path) -> None:
        try:
            staged.rename(target)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
            return  # another publisher of the same content was first
        _sync_folder(self.root)


def _copy(source: Path, target: Path) -> None:
    try:
        with source.open("rb") as reader, target.open("xb") as writer:
            shutil.copyfileobj(reader, writer, 4 << 20)
            writer.flush()
            os.fsync(writer.fileno())
    except FileNotFoundError as error:
        raise AdapterRejected([f"{source.name} is missing"]) from error


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _modified(folder: Path) -> float:
    try:
        return folder.stat().st_mtime
    except FileNotFoundError:
        return float("inf")
