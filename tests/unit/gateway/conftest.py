from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from fixtures.gateway import Kit, build


@pytest.fixture(autouse=True)
def _plain_logs() -> Iterator[None]:
    """JSON lines on standard output, as in production; structlog's own default draws tracebacks for seconds."""
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ]
    )
    yield
    structlog.reset_defaults()


@pytest.fixture
def kit(tmp_path: Path) -> Kit:
    return build(tmp_path)
