"""Logs: one format for both loggers."""

from __future__ import annotations

import json
import subprocess
import sys

_PROGRAM = """
import logging, structlog
from lamina.wiring.logs import set_up_logging
set_up_logging("INFO")
logging.getLogger("plain").info("hello %s", "there")
structlog.get_logger("ours").info("hello", tenant="acme")
structlog.get_logger("ours").debug("unseen")
try:
    1 / 0
except ZeroDivisionError:
    logging.getLogger("plain").exception("broke")
"""


def test_lines_are_json_when_nobody_watches() -> None:
    """Each record is one object with time, level and logger, exceptions included; below the level nothing."""
    done = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=True)
    records = [json.loads(line) for line in done.stderr.splitlines()]
    assert [record["event"] for record in records] == ["hello there", "hello", "broke"]
    assert all({"timestamp", "level", "logger"} <= set(record) for record in records)
    assert records[1]["tenant"] == "acme"
    assert "ZeroDivisionError" in records[2]["exception"]
    assert done.stdout == ""
