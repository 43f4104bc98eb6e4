"""Where the server of a data folder listens: a file in it, so that the command line finds the server."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["announced", "announced_address"]


@contextmanager
def announced(home: Path, url: str) -> Iterator[None]:
    """Says so while the server runs. Of several servers over one folder the one that started last is found."""
    home.mkdir(parents=True, exist_ok=True, mode=0o700)
    file = _file(home)
    draft = file.with_name(f".{file.name}.{os.getpid()}")
    draft.write_text(url + "\n")
    draft.replace(file)
    try:
        yield
    finally:
        if announced_address(home) == url:
            file.unlink(missing_ok=True)


def announced_address(home: Path) -> str | None:
    """The base URL, without `/v1`. Whoever was killed left it: nobody may be there."""
    try:
        return _file(home).read_text().strip() or None
    except OSError:
        return None


def _file(home: Path) -> Path:
    return home / "address"
