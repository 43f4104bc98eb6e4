"""How much memory this process may still take: the least of what the machine has and what its control groups allow.

By cgroup v2's `memory.max` and `memory.current`, and v1's `memory.limit_in_bytes` and `memory.usage_in_bytes`. Pages of
files that nobody uses count as usage there, but are given back for the asking, so they are left out. Where there are no
such files (not Linux), only the machine counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from lamina.config import HALF_OF_WHAT_IS_LEFT
from lamina.errors import ConfigurationInvalid
from lamina.wiring.control_groups import groups_v1, groups_v2, lines, number

__all__ = ["host_bytes", "memory_left"]


def host_bytes(wanted: int, *, root: Path = Path("/")) -> int:
    """The size of a host tier: `wanted`, or half of what is left when it is HALF_OF_WHAT_IS_LEFT.

    Raises ConfigurationInvalid for more than is left: the kernel would end this process under load, not at its start.
    """
    left = memory_left(root)
    if wanted == HALF_OF_WHAT_IS_LEFT:
        return 0 if left is None else left // 2
    if left is not None and wanted > left:
        raise ConfigurationInvalid(
            f"host_kv_bytes is {wanted}, but with the model loaded this process may take only {left} bytes more "
            "(by the machine's free memory and the limits of its control groups). Lower it, or set it to auto.",
            param="host_kv_bytes",
        )
    return wanted


def memory_left(root: Path = Path("/")) -> int | None:
    """Bytes; None where nobody says. `root`: where `proc` and `sys` are."""
    bounds = [*_machine(root), *_cgroup_v2(root), *_cgroup_v1(root)]
    return max(0, min(bounds)) if bounds else None


def _machine(root: Path) -> Iterator[int]:
    for line in lines(root / "proc/meminfo"):
        if line.startswith("MemAvailable:"):
            yield int(line.split()[1]) * 1024


def _cgroup_v2(root: Path) -> Iterator[int]:
    for group in groups_v2(root):
        limit, used = number(group / "memory.max"), number(group / "memory.current")
        if limit is not None and used is not None:
            yield limit - used + _statistic(group, "inactive_file")


def _cgroup_v1(root: Path) -> Iterator[int]:
    for group in groups_v1(root, "memory"):
        limit, used = number(group / "memory.limit_in_bytes"), number(group / "memory.usage_in_bytes")
        if limit is not None and used is not None:
            yield limit - used + _statistic(group, "total_inactive_file")


def _statistic(group: Path, name: str) -> int:
    return next((int(line.split()[1]) for line in lines(group / "memory.stat") if line.split()[0] == name), 0)
