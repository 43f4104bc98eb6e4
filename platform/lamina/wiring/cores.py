"""How many CPU cores this process may use: the least of what the machine has and what it is allowed."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

import psutil

from lamina.wiring.control_groups import groups_v1, groups_v2, number, numbers

__all__ = ["compute_threads", "store_lanes", "usable_cores"]

_MOST_LANES = 2


def compute_threads(root: Path = Path("/")) -> int:
    """Of arithmetic: two on one core only wait for each other."""
    usable = usable_cores(root)
    return min(psutil.cpu_count(logical=False) or usable, usable)


def store_lanes(root: Path = Path("/")) -> int:
    """Connections for blocks to a store, each with a thread that copies. With two cores a second lane would only take
    turns with the first, the engine and the server: measured, it moves no more and costs a tenth more CPU."""
    return max(1, min(_MOST_LANES, usable_cores(root) // 2))


def usable_cores(root: Path = Path("/")) -> int:
    """By affinity and by the quotas of the control groups, at least 1. `root`: where `proc` and `sys` are."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.floor(min([allowed, *_quotas(root)])))


def _quotas(root: Path) -> Iterator[float]:
    """In cores."""
    files = [numbers(group / "cpu.max") for group in groups_v2(root)]
    for group in groups_v1(root, "cpu"):
        files.append([number(group / "cpu.cfs_quota_us"), number(group / "cpu.cfs_period_us")])
    for found in files:
        match found:
            case [int(quota), int(period)] if period > 0:
                yield quota / period
