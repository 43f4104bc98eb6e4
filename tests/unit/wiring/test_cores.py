"""The least of all bounds counts, in whole cores, and there is always one."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from lamina.wiring.cores import compute_threads, store_lanes, usable_cores

V2 = "0::/a/b\n"
V1 = "4:cpu,cpuacct:/docker/0123\n5:memory:/x\n0::/\n"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine of 16 cores, of which 12 are allowed."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(12)), raising=False)
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: 16 if logical else 8)
    return tmp_path


def groups(root: Path, cgroup: str, files: dict[str, str]) -> None:
    for name, text in {
        "proc/self/cgroup": cgroup,
        **{f"sys/fs/cgroup/{name}": text for name, text in files.items()},
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


@pytest.mark.parametrize(
    ("cgroup", "files", "cores"),
    [
        ("", {}, 12),
        (V2, {"a/b/cpu.max": "max 100000\n"}, 12),
        (V2, {"a/b/cpu.max": "350000 100000\n"}, 3),
        (V2, {"a/cpu.max": "200000 100000\n", "a/b/cpu.max": "max 100000\n"}, 2),
        (V2, {"cpu.max": "50000 100000\n"}, 1),
        (V2, {"a/b/cpu.max": "9900000 100000\n"}, 12),
        (V2, {"a/b/cpu.max": "what 0\n"}, 12),
        (V2, {"a/b/cpu.max": "\n", "a/cpu.max": "100000 0\n"}, 12),
        (V1, {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 12),
        (V1, {"cpu/cpu.cfs_quota_us": "400000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 4),
        (V1, {"cpu/cpu.cfs_quota_us": "400000\n"}, 12),
    ],
)
def test_affinity_and_the_quota_of_any_group_above(root: Path, cgroup: str, files: dict[str, str], cores: int) -> None:
    groups(root, cgroup, files)
    assert usable_cores(root) == cores


@pytest.mark.parametrize(("quota", "threads", "lanes"), [(1, 1, 1), (2, 2, 1), (3, 3, 1), (4, 4, 2), (12, 8, 2)])
def test_threads_and_lanes_fit_the_cores(root: Path, quota: int, threads: int, lanes: int) -> None:
    groups(root, V2, {"a/b/cpu.max": f"{quota}00000 100000\n"})
    assert compute_threads(root) == threads
    assert store_lanes(root) == lanes


def test_this_machine_has_some() -> None:
    assert 1 <= compute_threads() <= usable_cores() <= (os.cpu_count() or 1)
