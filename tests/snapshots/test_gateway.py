"""What clients see, byte for byte. LAMINA_UPDATE_SNAPSHOTS=1 rewrites the files: read the difference then."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from fixtures.gateway import BASE, Kit, build, zipped
from lamina import errors as e
from lamina.engine.testing import saying
from lamina.gateway.errors import describe
from lamina.types import EngineFailure

FOLDER = Path(__file__).parent / "gateway"
MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture
def kit(tmp_path: Path) -> Kit:
    made = build(tmp_path)
    made.engine.script = saying(*"hé".encode())
    return made


def matches(name: str, found: str) -> None:
    file = FOLDER / name
    if os.environ.get("LAMINA_UPDATE_SNAPSHOTS"):
        FOLDER.mkdir(exist_ok=True)
        file.write_text(found)
    assert found == file.read_text(), f"{name} has changed; if it was meant to, update the snapshot"


def pretty(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False, sort_keys=True) + "\n"


def steady(text: str) -> str:
    """Without what differs in every run."""
    text = re.sub(r"(chatcmpl|cmpl|req)([-_])[0-9a-f]{32}", r"\1\2ID", text)
    return re.sub(r'"created":\d+', '"created":0', text)


async def stream(kit: Kit, path: str, **body: Any) -> str:
    async with kit.client() as client:
        response = await client.post(path, json={"model": BASE, "stream": True, **body})
    return steady(response.text)


def test_openapi(kit: Kit) -> None:
    matches("openapi.json", pretty(kit.app.openapi()))


async def test_chat_transcript(kit: Kit) -> None:
    options = {"stream_options": {"include_usage": True}, "logprobs": True, "top_logprobs": 1, "n": 2}
    matches("chat.sse", await stream(kit, "/v1/chat/completions", messages=MESSAGES, **options))


async def test_chat_transcript_of_a_failure(kit: Kit) -> None:
    kit.engine.failure, kit.engine.fail_after = EngineFailure("engine_error", "hidden"), 1
    matches("chat_failure.sse", await stream(kit, "/v1/chat/completions", messages=MESSAGES))


async def test_completions_transcript(kit: Kit) -> None:
    options = {"stream_options": {"include_usage": True}, "logprobs": 1}
    matches("completions.sse", await stream(kit, "/v1/completions", prompt="p", **options))


async def test_whole_bodies(kit: Kit) -> None:
    async with kit.client() as client:
        chat = await client.post("/v1/chat/completions", json={"model": BASE, "messages": MESSAGES})
        completion = await client.post("/v1/completions", json={"model": BASE, "prompt": "p", "logprobs": 1})
        adapter = await client.post("/v1/adapters", files={"file": ("a", zipped())}, data={"name": "poet"})
        bodies = {
            "adapter": adapter,
            "adapters": await client.get("/v1/adapters"),
            "chat": chat,
            "completion": completion,
            "files": await client.get("/v1/files"),
            "models": await client.get("/v1/models"),
        }
    matches("bodies.json", pretty({name: json.loads(steady(each.text)) for name, each in bodies.items()}))


def test_error_bodies() -> None:
    """One of each class: status, headers, body."""
    raised = [
        e.InvalidRequest("n is 99, but at most 16 choices are allowed.", param="n"),
        e.ContextLengthExceeded(limit=8192, prompt=9000, completion=100),
        e.UnsupportedParameter(param="tools"),
        e.Unauthenticated(),
        e.PermissionDenied(scope="adapters:write"),
        e.ModelNotFound("gpt-9"),
        e.Conflict(),
        e.TooLarge(limit_bytes=1024),
        e.InvalidAdapter(["rank is 0", "weights hold NaN"], param="file"),
        e.LimitExceeded("60 requests a minute are allowed.", limit=60, need=1, have=0, retry_after_s=1.5),
        e.EngineOverloaded(retry_after_s=2),
        e.EngineUnavailable(),
        e.DatabaseUnavailable(),
    ]
    problems = [describe(error, "req_ID") for error in raised]
    shown = [{"status": p.status, "headers": p.headers, "body": p.body} for p in problems]
    matches("errors.json", pretty(shown))
