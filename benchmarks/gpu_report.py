"""Sections of a check: each item timed and caught on its own, a wall-clock budget per section, one JSON at the end."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["ERROR", "Figure", "Item", "Report", "Skipped", "line"]


class Skipped(Exception):
    """Raised by an item that cannot run here; the message says why. Not a failure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One measured number beside its roofline. `percent` of the roofline: 100 is the floor or ceiling itself."""

    name: str
    unit: str
    measured: float
    predicted: float | None = None
    percent: float | None = None
    note: str = ""

    @classmethod
    def of_time(cls, name: str, measured_s: float, predicted_s: float | None, note: str = "") -> Figure:
        """Microseconds; percent = predicted / measured."""
        percent = round(100 * predicted_s / measured_s, 1) if predicted_s and measured_s else None
        predicted = None if predicted_s is None else round(1e6 * predicted_s, 2)
        return cls(
            name=name, unit="us", measured=round(1e6 * measured_s, 2), predicted=predicted, percent=percent, note=note
        )

    @classmethod
    def of_rate(cls, name: str, measured_gb_s: float, ceiling_gb_s: float | None, note: str = "") -> Figure:
        """GB/s; percent = measured / ceiling."""
        percent = round(100 * measured_gb_s / ceiling_gb_s, 1) if ceiling_gb_s else None
        predicted = None if ceiling_gb_s is None else round(ceiling_gb_s, 2)
        return cls(
            name=name,
            unit="GB/s",
            measured=round(measured_gb_s, 2),
            predicted=predicted,
            percent=percent,
            note=note,
        )


ERROR = "of the largest value"
"""Unit of a deviation from an oracle: dozens of them, so only the JSON lists them all."""

Item = tuple[str, Callable[[], Iterable[Figure] | None]]
"""A name, and what to do; an exception is a failure."""


@dataclass(slots=True)
class _Section:
    name: str
    seconds: float = 0.0
    passed: int = 0
    failed: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    figures: list[Figure] = field(default_factory=list)


class Report:
    """Runs sections in order and remembers what they found. `path` is rewritten after every section, so that a crash
    or a hang loses the section that it happened in and no more."""

    def __init__(self, environment: dict[str, Any], path: Path, *, total_s: float) -> None:
        self._environment = environment
        self._path = path
        self._deadline = time.monotonic() + total_s
        self._sections: list[_Section] = []
        self._lost: str | None = None  # why the device cannot be used any more

    @property
    def left_s(self) -> float:
        """Seconds until the whole run must end."""
        return max(0.0, self._deadline - time.monotonic())

    @property
    def failures(self) -> int:
        return sum(len(section.failed) for section in self._sections)

    def below(self, percent: float) -> list[Figure]:
        """Figures that reach less of their roofline: each of them needs an explanation."""
        figures = (figure for section in self._sections for figure in section.figures)
        return [figure for figure in figures if figure.percent is not None and figure.percent < percent]

    def run(self, name: str, budget_s: float, items: Callable[[], Iterator[Item]]) -> None:
        """One section. Items that do not fit into its budget are skipped, and the report says so."""
        section = _Section(name)
        self._sections.append(section)
        print(f"\n== {name} (at most {min(budget_s, self.left_s):.0f} s)", flush=True)
        started = time.monotonic()
        end = min(started + budget_s, self._deadline)
        try:
            for label, work in items():
                self._item(section, label, work, end)
        except Exception:  # noqa: BLE001 - a section that cannot even list its items must not stop the next one
            self._fail(section, "setting up", traceback.format_exc(limit=-4))
        section.seconds = round(time.monotonic() - started, 2)
        errors = [figure for figure in section.figures if figure.unit == ERROR]
        if errors:
            worst = max(errors, key=lambda figure: figure.measured)
            print(f"   largest error: {worst.measured:.1e} in {worst.name}", flush=True)
        print(
            f"   {section.passed} passed, {len(section.failed)} failed, {len(section.skipped)} skipped "
            f"in {section.seconds:.1f} s",
            flush=True,
        )
        self.save()

    def _item(self, section: _Section, label: str, work: Callable[[], Iterable[Figure] | None], end: float) -> None:
        if self._lost:
            section.skipped[label] = self._lost
        elif time.monotonic() >= end:
            section.skipped[label] = "the section's time was up"
        else:
            try:
                figures = list(work() or ())
            except Skipped as reason:
                section.skipped[label] = str(reason)
                print(f"   skip {label}: {reason}", flush=True)
            except Exception as error:  # noqa: BLE001 - the rest of the section still runs
                self._fail(section, label, traceback.format_exc(limit=-4))
                if "CUDA error" in str(error) or "HIP error" in str(error):
                    self._lost = f"the device was lost in {label!r}"
            else:
                section.passed += 1
                section.figures += figures
                for figure in figures:
                    if figure.unit != ERROR:
                        print(f"   {line(figure)}", flush=True)

    def _fail(self, section: _Section, label: str, trace: str) -> None:
        section.failed[label] = trace
        print(f"   FAIL {label}\n{trace}", flush=True)

    def save(self) -> Path:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        document = {
            "environment": self._environment,
            "failures": self.failures,
            "sections": [asdict(section) for section in self._sections],
        }
        self._path.write_text(json.dumps(document, indent=1) + "\n")
        return self._path


def line(figure: Figure) -> str:
    """For people."""
    text = f"{figure.name:<58} {figure.measured:>12.2f} {figure.unit:<5}"
    if figure.predicted is not None:
        text += f" roofline {figure.predicted:>12.2f}"
    if figure.percent is not None:
        text += f" {figure.percent:>6.1f} %"
    return f"{text}  {figure.note}".rstrip()
