"""Progress bars on the terminal for model work."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from lamina.models.progress import Progress as ProgressCallback

__all__ = ["console_progress"]


@contextmanager
def console_progress() -> Iterator[ProgressCallback]:
    """One bar per stage, on standard error. Shows nothing if nothing is reported."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    display = Progress(*columns, console=Console(stderr=True), transient=True)
    bars: dict[str, TaskID] = {}

    def report(stage: str, done: int, total: int) -> None:
        display.start()  # not before there is something to show; again and again does no harm
        if stage not in bars:
            bars[stage] = display.add_task(stage)
        display.update(bars[stage], completed=done, total=total or None)

    try:
        yield report
    finally:
        if bars:
            display.stop()
