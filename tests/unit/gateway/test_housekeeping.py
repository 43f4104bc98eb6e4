"""What a gateway does now and then."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from fixtures.gateway import Kit, build, until
from lamina.errors import DatabaseUnavailable
from lamina.gateway import housekeeping

HI: Any = [{"role": "user", "content": "hi"}]


@asynccontextmanager
async def using(kit: Kit, model: str) -> AsyncIterator[None]:
    """A request under way, so that the engine has the adapter loaded."""
    kit.engine.pause()
    async with kit.client() as client:
        call = client.post("/v1/chat/completions", json={"model": model, "messages": HI, "max_tokens": 2})
        answering = asyncio.create_task(call)
        await until(lambda: kit.engine.running)
        yield
        kit.engine.resume()
        assert (await answering).status_code == 200  # what runs, runs on


async def test_an_adapter_that_another_process_deleted_is_unloaded(kit: Kit, tmp_path: Path) -> None:
    """The command line writes to the database only: no call of this gateway's API tells the engine."""
    digest = await kit.add_adapter(tmp_path, "poet")
    async with using(kit, "poet"):
        await housekeeping.unload_unowned(kit.deps)
        assert kit.engine.unloaded == []
        await kit.adapters.delete("ten_alice", "poet")
        await housekeeping.unload_unowned(kit.deps)
        assert kit.engine.unloaded == [digest]


async def test_an_adapter_that_another_tenant_has_too_stays(kit: Kit, tmp_path: Path) -> None:
    await kit.add_adapter(tmp_path, "poet")
    await kit.adapters.intake("ten_bob", name="mine", folder=tmp_path / "alice-poet-4")
    async with using(kit, "poet"):
        await kit.adapters.delete("ten_alice", "poet")
        await housekeeping.unload_unowned(kit.deps)
    assert kit.engine.unloaded == []


async def test_an_engine_that_starts_is_left_alone(kit: Kit) -> None:
    kit.engine.ready = False
    await housekeeping.unload_unowned(kit.deps)


async def test_rounds_go_on_after_failures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Expected ones and bugs; both are logged."""
    kit = build(tmp_path, housekeeping_s=0.001)
    failures: list[Exception] = [DatabaseUnavailable(), RuntimeError("a bug")]
    digest = await kit.add_adapter(tmp_path, "poet")
    stats = kit.engine.stats

    async def flaky() -> Any:
        if failures:
            raise failures.pop(0)
        return await stats()

    monkeypatch.setattr(kit.engine, "stats", flaky)
    async with using(kit, "poet"), kit.app.router.lifespan_context(kit.app):
        await kit.adapters.delete("ten_alice", "poet")
        await until(lambda: digest in kit.engine.unloaded)
    log = capsys.readouterr().out
    assert "database_unavailable" in log
    assert "a bug" in log
    assert len(asyncio.all_tasks()) == 1


async def test_a_gateway_that_restarts_at_once_removes_later_what_was_too_young(tmp_path: Path) -> None:
    """At the start, a folder of an upload that was killed seconds ago may be one that begins in another process."""
    kit = build(tmp_path, housekeeping_s=0.001)
    left = kit.uploads / "incoming-left"
    left.mkdir(parents=True)
    async with kit.app.router.lifespan_context(kit.app):
        assert left.exists()
        os.utime(left, (0, 0))
        await until(lambda: not left.exists())
