"""Showing records: aligned columns for people, JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import fields, is_dataclass
from datetime import UTC, datetime
from typing import Annotated, Any

import typer

__all__ = ["Json", "echo_json", "echo_table", "instant"]

Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


def echo_json(value: object) -> None:
    """Records as objects, instants as ISO 8601 in UTC, sets as sorted lists."""
    typer.echo(json.dumps(value, default=_plain, indent=2))


def echo_table(headers: Sequence[str], rows: Iterable[Sequence[str]], *, empty: str) -> None:
    """Columns as wide as their widest cell, never cut, so that ids can be copied; `empty` if there is no row."""
    lines = [tuple(headers), *(tuple(row) for row in rows)]
    if len(lines) == 1:
        typer.echo(empty)
        return
    widths = [max(len(cell) for cell in column) for column in zip(*lines, strict=True)]
    for line in lines:
        typer.echo("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def instant(value: datetime | None, *, none: str = "-") -> str:
    """For people: UTC, to the second."""
    return none if value is None else value.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def _plain(value: object) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat()
    if isinstance(value, frozenset):
        return sorted(value)
    raise TypeError(f"cannot show {type(value).__name__}")
