"""The least of all bounds counts, and what nobody says is no bound."""

from __future__ import annotations

from pathlib import Path

import pytest

from lamina.config import HALF_OF_WHAT_IS_LEFT
from lamina.errors import ConfigurationInvalid
from lamina.wiring.memory_left import host_bytes, memory_left

GIB = 1 << 30


def machine(root: Path, *, available: int, cgroup: str, files: dict[str, object]) -> Path:
    for name, text in {
        "proc/meminfo": f"MemTotal: 999999999 kB\nMemAvailable: {available // 1024} kB\n",
        "proc/self/cgroup": cgroup,
        **{f"sys/fs/cgroup/{name}": f"{text}\n" for name, text in files.items()},
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_the_machine_alone(tmp_path: Path) -> None:
    assert memory_left(machine(tmp_path, available=5 * GIB, cgroup="0::/\n", files={})) == 5 * GIB


def test_version_2_with_a_limit_above_the_own_group(tmp_path: Path) -> None:
    files = {
        "a/memory.max": 4 * GIB,
        "a/memory.current": 3 * GIB,
        "a/memory.stat": f"anon {2 * GIB}\ninactive_file {GIB // 2}",
        "a/b/memory.max": "max",
        "a/b/memory.current": GIB,
    }
    assert memory_left(machine(tmp_path, available=9 * GIB, cgroup="0::/a/b\n", files=files)) == GIB + GIB // 2


def test_version_1_in_a_container_that_sees_another_path(tmp_path: Path) -> None:
    files = {
        "memory/memory.limit_in_bytes": 2 * GIB,
        "memory/memory.usage_in_bytes": GIB,
        "memory/memory.stat": "total_inactive_file 4096",
    }
    cgroup = "5:cpu,cpuacct:/x\n4:memory:/docker/0123\n0::/\n"
    assert memory_left(machine(tmp_path, available=9 * GIB, cgroup=cgroup, files=files)) == GIB + 4096


def test_an_exceeded_limit_leaves_nothing(tmp_path: Path) -> None:
    files = {"memory.max": GIB, "memory.current": 2 * GIB}
    assert memory_left(machine(tmp_path, available=9 * GIB, cgroup="0::/\n", files=files)) == 0


def test_nobody_says(tmp_path: Path) -> None:
    assert memory_left(tmp_path) is None
    assert host_bytes(GIB, root=tmp_path) == GIB


def test_sizes(tmp_path: Path) -> None:
    root = machine(tmp_path, available=4 * GIB, cgroup="0::/\n", files={})
    assert host_bytes(HALF_OF_WHAT_IS_LEFT, root=root) == 2 * GIB
    assert host_bytes(0, root=root) == 0
    assert host_bytes(4 * GIB, root=root) == 4 * GIB
    with pytest.raises(ConfigurationInvalid, match=f"only {4 * GIB} bytes"):
        host_bytes(4 * GIB + 1, root=root)


def test_this_machine_has_something_left() -> None:
    left = memory_left()
    assert left is None or left > 0
