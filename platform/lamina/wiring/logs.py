"""One format for structlog's and the standard library's records, on standard error."""

from __future__ import annotations

import logging
import sys

import structlog
from structlog.typing import Processor

__all__ = ["set_up_logging"]

_SHARED: list[Processor] = [
    structlog.contextvars.merge_contextvars,
    structlog.stdlib.add_log_level,
    structlog.stdlib.add_logger_name,
    structlog.processors.TimeStamper(fmt="iso", utc=True),
]


def set_up_logging(level: str) -> None:
    """Readable lines on a terminal, one JSON object a line elsewhere. Call once, before anything logs."""
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *_SHARED,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_formatter(for_people=sys.stderr.isatty()))
    logging.basicConfig(level=level, handlers=[handler], force=True)
    for chatty in ("uvicorn.error", "alembic", "httpx"):
        logging.getLogger(chatty).setLevel(max(logging.WARNING, logging.getLevelName(level)))


def _formatter(*, for_people: bool) -> logging.Formatter:
    render: list[Processor] = (
        # Not the pretty tracebacks: they print local variables, so perhaps keys, and take seconds each.
        [structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)]
        if for_people
        else [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    )
    return structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=_SHARED,
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *render],
    )
