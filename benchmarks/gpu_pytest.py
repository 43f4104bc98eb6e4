"""The tests under tests/gpu, in a process of their own, if pytest is there."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator

from chips import Chip
from gpu_report import Item, Skipped
from gpu_scale import Scale
from gpu_setup import ON_GPU, ROOT

__all__ = ["SECONDS", "items"]

SECONDS = 60 if ON_GPU else 280  # a CPU may be shared


def items(scale: Scale, chip: Chip) -> Iterator[Item]:
    yield "pytest tests/gpu", _run


def _run() -> None:
    if importlib.util.find_spec("pytest") is None:
        raise Skipped("pytest is not installed")
    # Neither pyproject's options nor tests/conftest.py: they want plugins and packages that a bare machine lacks.
    command = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "--rootdir", str(ROOT), "--confcutdir"]
    command += [str(ROOT / "tests" / "gpu"), "--import-mode=importlib", "-p", "gpu_setup", "-p", "no:cacheprovider"]
    command.append(str(ROOT / "tests" / "gpu"))
    path = os.pathsep.join([str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=SECONDS, env=os.environ | {"PYTHONPATH": path}
    )
    if done.returncode:
        raise AssertionError(f"pytest ended with {done.returncode}:\n{done.stdout[-3000:]}{done.stderr[-1000:]}")
