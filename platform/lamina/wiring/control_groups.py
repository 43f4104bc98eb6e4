"""What this process's control groups say (Linux), in version 1 and 2, as the kernel's documentation describes them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

__all__ = ["groups_v1", "groups_v2", "lines", "number", "numbers"]


def groups_v2(root: Path) -> Iterator[Path]:
    """Folders of this process's group and those above it, any of which may be the one that limits. `root`: where `proc`
    and `sys` are."""
    return _groups(root, "", root / "sys/fs/cgroup")


def groups_v1(root: Path, controller: str) -> Iterator[Path]:
    """The same for `controller`, like `memory` or `cpu`."""
    return _groups(root, controller, root / "sys/fs/cgroup" / controller)


def number(path: Path) -> int | None:
    """The first word of a file. None for `max`, for -1, and for no file."""
    return next(iter(numbers(path)), None)


def numbers(path: Path) -> list[int | None]:
    """The words of a file's first line; None is "no limit"."""
    return [int(word) if word.isdigit() else None for word in next(iter(lines(path)), "").split()]


def lines(path: Path) -> list[str]:
    """No file is an empty one."""
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _groups(root: Path, controller: str, mount: Path) -> Iterator[Path]:
    """In a container the path that the process sees may not exist below its mount; then the mount is its group."""
    for line in lines(root / "proc/self/cgroup"):
        hierarchy, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        if controller in names.split(",") and (controller or hierarchy == "0"):
            group = mount / path.strip("/")
            yield from (place for place in (group, *group.parents) if place.is_relative_to(mount))
