"""Folders that are either whole or absent: built aside, hashed, synced, then renamed into place.

<parent>/
    .<name>.lock                  one builder at a time; the kernel frees it if the builder dies
    .<name>.<random>.partial/     being built; left-overs of a crash are swept by the next builder
    <name>/                       published; manifest.json names every file with size and SHA-256
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["MANIFEST", "is_published", "publish_folder", "publishing_lock"]

MANIFEST = "manifest.json"
_MANIFEST_VERSION = 1


@contextmanager
def publishing_lock(folder: Path, *, on_wait: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Holds the right to build `folder`, across processes; `on_wait` is called once if another has it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f".{folder.name}.lock").open("a") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield  # closing the file frees the lock


def publish_folder(folder: Path, build: Callable[[Path], None], source: Mapping[str, str]) -> None:
    """Builds a folder with `build(empty folder)` and puts it at `folder`, replacing a damaged one.

    `source` goes into the manifest and is what `is_published` compares. Call it under `publishing_lock`.
    Whatever `build` raises passes through and leaves nothing behind.
    """
    _sweep_partial(folder)
    partial = folder.parent / f".{folder.name}.{secrets.token_hex(8)}.partial"
    partial.mkdir()
    try:
        build(partial)
        _write_manifest(partial, source)
        _sync_folder(partial)
        if folder.exists():
            folder.rename(folder.parent / f".{folder.name}.{secrets.token_hex(8)}.replaced.partial")
        partial.rename(folder)
        _sync(folder.parent)
    finally:
        _sweep_partial(folder)


def is_published(folder: Path, source: Mapping[str, str], *, deep: bool = False) -> bool:
    """Whether `folder` was published from `source` and has every file at its size (`deep`: and hash)."""
    manifest = _read_manifest(folder)
    if manifest is None or manifest.get("source") != dict(source):
        return False
    return all(_matches(folder / name, facts, deep=deep) for name, facts in manifest["files"].items())


def _read_manifest(folder: Path) -> dict[str, Any] | None:
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
    except (OSError, ValueError):
        return None
    known = isinstance(manifest, dict) and manifest.get("manifest_version") == _MANIFEST_VERSION
    return manifest if known and isinstance(manifest.get("files"), dict) else None


def _matches(path: Path, facts: Mapping[str, Any], *, deep: bool) -> bool:
    try:
        return path.stat().st_size == facts["bytes"] and (not deep or _sha256(path) == facts["sha256"])
    except OSError:
        return False


def _write_manifest(folder: Path, source: Mapping[str, str]) -> None:
    files = {path.name: {"bytes": path.stat().st_size, "sha256": _sha256(path)} for path in sorted(folder.iterdir())}
    manifest = {"manifest_version": _MANIFEST_VERSION, "source": dict(source), "files": files}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def _sha256(path: Path) -> str:
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def _sync_folder(folder: Path) -> None:
    for path in folder.iterdir():
        _sync(path)
    _sync(folder)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sweep_partial(folder: Path) -> None:
    for path in folder.parent.glob(f".{folder.name}.*.partial"):
        shutil.rmtree(path, ignore_errors=True)
