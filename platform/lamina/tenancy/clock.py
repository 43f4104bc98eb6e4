"""Time, passed in, so that tests can move it."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime

__all__ = ["Clock", "utcnow"]

Clock = Callable[[], datetime]  # timezone-aware


def utcnow() -> datetime:
    """The present instant, timezone-aware, in UTC."""
    return datetime.now(UTC)
