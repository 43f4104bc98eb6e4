"""One way of measuring: warm-up, repetitions, medians, rows with device and versions."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

__all__ = ["RESULTS", "environment", "measure", "save", "table"]

RESULTS = Path(__file__).parent / "results"


def measure(run: Callable[[], Any], *, repetitions: int, warmups: int = 1) -> list[float]:
    """Seconds of each repetition."""
    for _ in range(warmups):
        run()
    seconds = []
    for _ in range(repetitions):
        started = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - started)
    return seconds


def summary(seconds: Sequence[float]) -> dict[str, float]:
    """p20, median and p80 in seconds."""
    ordered = sorted(seconds)
    return {
        "p20_s": round(ordered[int(0.2 * (len(ordered) - 1))], 4),
        "median_s": round(statistics.median(ordered), 4),
        "p80_s": round(ordered[round(0.8 * (len(ordered) - 1))], 4),
    }


def environment(threads: int) -> dict[str, Any]:
    """What a figure depends on besides the code."""
    import torch

    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit.stdout.strip() or "unknown",
        "cpu": _cpu_name(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "threads": threads,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "load_average": round(os.getloadavg()[0], 2),
    }


def _cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")


def save(name: str, rows: Sequence[dict[str, Any]], env: dict[str, Any]) -> Path:
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"environment": env, "rows": list(rows)}, indent=1) + "\n")
    return path


def table(rows: Sequence[dict[str, Any]], columns: Sequence[str]) -> str:
    """A Markdown table."""
    cells = [[str(row.get(column, "")) for column in columns] for row in rows]
    widths = [max(len(column), *(len(line[i]) for line in cells)) for i, column in enumerate(columns)]

    def draw(line: Sequence[str]) -> str:
        return "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |"

    return "\n".join([draw(columns), draw(["-" * width for width in widths]), *map(draw, cells)])
