"""Folders for uploads under way. A folder lives exactly as long as its upload, a crash excepted."""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import structlog

__all__ = ["PREFIX", "staged", "sweep"]

log = structlog.get_logger(__name__)

PREFIX = "incoming-"
YOUNG_S = 60.0  # a folder this young may not have its lock yet


@asynccontextmanager
async def staged(uploads: Path) -> AsyncIterator[Path]:
    """An empty folder in `uploads`, removed on exit with its content. Locked, so that `sweep` spares it."""
    folder = _make(uploads)
    try:
        lock = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield folder
        finally:
            os.close(lock)
    finally:
        # To unlink a GiB takes time. A caller that is cancelled once more stops waiting; the thread goes on.
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)


def sweep(uploads: Path) -> list[Path]:
    """Removes what a killed gateway left behind, spares uploads of living ones. Returns what it removed."""
    removed = [folder for folder in sorted(uploads.glob(f"{PREFIX}*")) if _is_left_behind(folder)]
    for folder in removed:
        log.warning("removing an unfinished upload of an earlier run", folder=folder.name)
        shutil.rmtree(folder, ignore_errors=True)
    return removed


def _make(uploads: Path) -> Path:
    uploads.mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix=PREFIX, dir=uploads))


def _is_left_behind(folder: Path) -> bool:
    try:
        if time.time() - folder.stat().st_mtime < YOUNG_S:
            return False
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except (FileNotFoundError, NotADirectoryError):
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(lock)
    return True
