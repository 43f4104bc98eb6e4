"""One way of measuring: warm-up, repetitions, medians, rows with device and versions, goals that are met or not."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

__all__ = [
    "GOAL_COLUMNS",
    "MIB",
    "RESULTS",
    "Goal",
    "Progress",
    "add_quick",
    "environment",
    "finish",
    "goal_table",
    "measure",
    "save",
    "table",
]

RESULTS = Path(__file__).parent / "results"
MIB = 1 << 20
GOAL_COLUMNS = ["what", "figure", "must reach", "reached"]


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


@dataclass(frozen=True, slots=True)
class Goal:
    """One figure that has to be reached, ready to be printed."""

    what: str
    figure: str
    must_reach: str
    reached: bool

    @classmethod
    def at_least(cls, what: str, value: float, least: float, of: str, *, percent: bool = False) -> Goal:
        return cls(what, _show(value, of, percent), f"at least {_show(least, of, percent)}", value >= least)

    @classmethod
    def at_most(cls, what: str, value: float, most: float, of: str, *, percent: bool = False) -> Goal:
        return cls(what, _show(value, of, percent), f"at most {_show(most, of, percent)}", value <= most)


def _show(value: float, of: str, percent: bool) -> str:
    return f"{value:.1%} {of}" if percent else f"{value:.3g} {of}"


def goal_table(goals: Sequence[Goal]) -> str:
    """A Markdown table."""
    rows = [
        {"what": g.what, "figure": g.figure, "must reach": g.must_reach, "reached": "yes" if g.reached else "NO"}
        for g in goals
    ]
    return table(rows, GOAL_COLUMNS)


class Progress:
    """Says on stderr how far long work has come: on one line on a terminal, on lines of their own in a log."""

    def __init__(self, what: str, total: int) -> None:
        self._what, self._total, self._done = what, total, 0
        self._started = time.monotonic()
        self._is_terminal = sys.stderr.isatty()

    def step(self, detail: str = "") -> None:
        self._done += 1
        seconds = time.monotonic() - self._started
        line = f"{self._what}: {self._done} of {self._total}, {seconds:.0f} s {detail}"
        if self._is_terminal:
            print(f"\r\033[K{line}", end="\n" if self._done == self._total else "", file=sys.stderr, flush=True)
        else:
            print(line, file=sys.stderr, flush=True)


def add_quick(parser: argparse.ArgumentParser, **smaller: Any) -> None:
    """`--quick` sets these options, and what it finds is saved beside the full run's results."""

    class Quick(argparse.Action):
        def __call__(self, _parser: object, space: argparse.Namespace, *_: object) -> None:
            space.quick = True
            for name, value in smaller.items():
                setattr(space, name, value)

    parser.add_argument("--quick", action=Quick, nargs=0, default=False, help="a short look")


def finish(
    name: str,
    rows: Sequence[dict[str, Any]],
    columns: Sequence[str],
    goals: Sequence[Goal],
    options: argparse.Namespace,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Prints and saves what a benchmark found."""
    import torch

    env = environment(torch.get_num_threads()) | dict(extra or {})
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}{'-quick' if options.quick else ''}.json"
    found = {"environment": env, "goals": [asdict(goal) for goal in goals], "rows": list(rows)}
    path.write_text(json.dumps(found, indent=1) + "\n")
    print(f"{table(rows, columns)}\n\n{goal_table(goals)}\n\n{json.dumps(env)}\nsaved to {path}", flush=True)
