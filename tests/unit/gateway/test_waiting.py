"""Requests that the engine gives up on before their first token, and the time that others waited."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from fixtures.gateway import BASE, Kit, build
from lamina.engine.failures import failure_of
from lamina.errors import WaitExceeded


def waiting_kit(tmp_path: Path, **config: Any) -> Kit:
    """Its engine refuses after a tenth of a second, which is many times the interval of pings."""
    kit = build(tmp_path, ping_interval_s=0.01, **config)
    kit.engine.delay_s = 0.1
    kit.engine.failure = failure_of(
        WaitExceeded("It waited 50 s.", limit=64, need=9, have=2, decision="kv-1", retry_after_s=3.5)
    )
    return kit


async def post(kit: Kit, *, stream: bool) -> httpx.Response:
    body = {"model": BASE, "prompt": "Hello", "max_tokens": 4, "stream": stream}
    transport = httpx.ASGITransport(app=kit.app)
    headers = {"authorization": f"Bearer {kit.key}"}
    async with httpx.AsyncClient(transport=transport, base_url="http://test", headers=headers) as client:
        return await client.post("/v1/completions", json=body)


@pytest.mark.parametrize("stream", [True, False])
async def test_who_waited_too_long_gets_429_with_all_that_is_known(tmp_path: Path, stream: bool) -> None:
    """For streams too: their status is held back for as long as the engine may let them wait."""
    answer = await post(waiting_kit(tmp_path, max_queue_s=30.0), stream=stream)
    assert answer.status_code == 429
    assert (answer.headers["retry-after"], answer.headers["retry-after-ms"]) == ("4", "3500")
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "wait_exceeded")
    assert error["details"] == {"limit": 64, "need": 9, "have": 2, "decision": "kv-1"}


async def test_without_a_bound_a_silent_stream_begins(tmp_path: Path) -> None:
    """It gets comments after the interval, and what fails later is an event."""
    answer = await post(waiting_kit(tmp_path), stream=True)
    assert answer.status_code == 200
    assert answer.text.startswith(": ping")
    assert '"code": "wait_exceeded"' in answer.text


async def test_the_wait_is_measured_by_tenant(tmp_path: Path) -> None:
    kit = build(tmp_path)
    for stream in (True, False):
        assert (await post(kit, stream=stream)).status_code == 200
    text = kit.deps.metrics.render(None, None).decode()
    counts = [line for line in text.splitlines() if line.startswith("lamina_queue_wait_seconds_count{")]
    assert len(counts) == 1
    assert counts[0].endswith(" 2.0")
