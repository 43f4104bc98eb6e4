"""A private place for sockets while the server runs."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["runtime_directory"]

_MAX_LENGTH = 80  # bytes; a unix socket's path holds 107, and the file's own name needs some


@contextmanager
def runtime_directory() -> Iterator[Path]:
    """A new directory that only this user can enter (mode 0700), removed at the end."""
    path = Path(tempfile.mkdtemp(prefix="lamina-", dir=_parent()))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _parent() -> str:
    for candidate in (os.environ.get("XDG_RUNTIME_DIR"), tempfile.gettempdir()):
        if candidate and len(os.fsencode(candidate)) <= _MAX_LENGTH and os.access(candidate, os.W_OK):
            return candidate
    return "/tmp"  # noqa: S108 - mkdtemp makes the private folder in it
