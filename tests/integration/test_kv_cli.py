"""`lamina kv` beside a running server: a real engine process with a small pool and host memory below it."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import structlog
from typer.testing import CliRunner, Result

from fixtures.gateway import BASE, serve
from fixtures.tenancy import SECRET
from lamina.cli.main import app
from lamina.config import GatewayConfig
from lamina.engine.client import ZmqEngineClient
from lamina.gateway.app import create_app
from lamina.gateway.deps import GatewayDeps
from lamina.gateway.testing import ByteCodec
from lamina.tenancy.adapters import AdapterService
from lamina.tenancy.database import Database
from lamina.tenancy.keys import KeyService
from lamina.tenancy.memory import MemoryIntake
from lamina.tenancy.operator import OperatorDoor
from lamina.tenancy.pins import PinService
from lamina.tenancy.quotas import QuotaService
from lamina.tenancy.tenants import TenantService
from lamina.types import CommonsReport
from lamina.wiring.address import announced, announced_address
from lamina.wiring.supervisor import EngineSupervisor
from support.tiny_engine import spawn_tiny

BLOCK = 16
Run = Callable[..., Coroutine[Any, Any, Result]]


def text(name: str) -> str:
    """A prompt of six blocks, and one token that is always computed."""
    return f"What {name} said. ".ljust(6 * BLOCK, name) + "!"


@dataclass
class House:
    url: str
    client: ZmqEngineClient
    key: str

    async def complete(self, prompt: str) -> dict[str, int]:
        """Cached tokens by tier."""
        body = {"model": BASE, "prompt": prompt, "max_tokens": 2, "ignore_eos": True, "temperature": 0}
        headers = {"authorization": f"Bearer {self.key}"}
        async with httpx.AsyncClient(base_url=self.url, headers=headers, timeout=120, trust_env=False) as client:
            answer = await client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        details = answer.json()["usage"]["prompt_tokens_details"]
        assert sum(details["cached_tokens_by_tier"].values()) == details["cached_tokens"]
        found: dict[str, int] = details["cached_tokens_by_tier"]
        return found

    async def report(self) -> CommonsReport:
        return await self.client.commons()


@pytest.fixture
async def house(sqlite_template: Path, tmp_path: Path) -> AsyncIterator[House]:
    shutil.copy(sqlite_template, tmp_path / "lamina.db")
    (tmp_path / "secret").write_bytes(SECRET)
    (tmp_path / "secret").chmod(0o600)
    database = Database.open(f"sqlite+aiosqlite:///{tmp_path / 'lamina.db'}")
    keys, tenants = KeyService(database=database, secret=SECRET), TenantService(database=database)
    acme = await tenants.create(name="acme")
    key = (await keys.issue(acme.id, name="k", scopes=["inference"])).raw
    client = ZmqEngineClient(f"ipc://{tmp_path}/engine")
    await client.start()
    options = ["num_blocks=16", "max_batch_tokens=64", "max_running=2", f"host_kv_bytes={1 << 20}"]
    supervisor = EngineSupervisor(
        client, lambda identity: spawn_tiny(client.address, identity, tmp_path / "adapters", options)
    )
    watching = asyncio.create_task(supervisor.run())
    deps = GatewayDeps(
        engine=client,
        tokenizer=ByteCodec(),
        keys=keys,
        adapters=AdapterService(database=database, intake=MemoryIntake(), base_model=BASE),
        quotas=QuotaService(database=database, secret=SECRET),
        pins=PinService(database=database, secret=SECRET),
        operator=OperatorDoor(SECRET),
        config=GatewayConfig(),
        base_model=BASE,
        uploads=tmp_path / "uploads",
        created=0,
    )
    try:
        await asyncio.wait_for(client.wait_ready(), 60)
        # The server's log must not come into what the command prints: they share this process's standard output.
        with structlog.testing.capture_logs():
            async with serve(create_app(deps)) as url:
                with announced(tmp_path, url):
                    yield House(url, client, key)
    finally:
        supervisor.kill()
        await asyncio.gather(watching, return_exceptions=True)
        await client.close()
        await keys.close()
        await database.close()


@pytest.fixture
def lamina(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("LAMINA_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")
    for name in ("LAMINA_DATABASE_URL", "LAMINA_ENVIRONMENT"):
        monkeypatch.delenv(name, raising=False)

    async def run(*arguments: str, fails: int = 0) -> Result:
        result = await asyncio.to_thread(CliRunner().invoke, app, ["kv", *arguments])
        assert result.exit_code == fails, result.output
        return result

    return run


async def of_json(running: Coroutine[Any, Any, Result]) -> Any:
    return json.loads((await running).stdout)


async def spilled(house: House) -> int:
    """Fills the pool more than once, until something of it lies in host memory."""
    for name in "abcd":
        await house.complete(text(name))
    for _ in range(200):
        if stored := (await house.client.stats()).host_blocks_used:
            return stored
        await asyncio.sleep(0.05)
    raise AssertionError("nothing was spilled")


async def test_top(house: House, lamina: Run) -> None:
    """Tenants by name; what they have in each tier, and how their prompts fared."""
    await spilled(house)
    found = await of_json(lamina("top", "--json"))
    assert found["server"] == house.url
    (share,) = found["tenants"]
    assert share["host_bytes"] > 0
    assert found["pool"]["total"] == 16
    shown = (await lamina("top", "--once")).stdout
    assert "acme" in shown
    assert "none never_stored" in shown
    assert "host" in shown


async def test_explain(house: House, lamina: Run, tmp_path: Path) -> None:
    """What it says is what the next request finds."""
    await spilled(house)
    arguments = ["explain", "--tenant", "acme", "--model", BASE]
    found = await of_json(lamina(*arguments, "--prompt", text("a"), "--json"))
    assert found["blocks"] == 6
    here = {tier for run in found["runs"] for tier in run["tiers"]}
    assert "host" in here or any(run["reason"] == "pressure" for run in found["runs"])
    cached = await house.complete(text("a"))
    leading = 0
    for run in found["runs"]:
        if not run["tiers"]:
            break
        leading += run["blocks"]
    assert sum(cached.values()) == leading * BLOCK
    (tmp_path / "new.txt").write_text("Nobody ever asked this before, however long it may be.")
    shown = (await lamina("explain", "--model", BASE, "--prompt-file", str(tmp_path / "new.txt"))).stdout
    assert "nobody computed it here" in shown
    assert "host +" in shown
    chat = tmp_path / "chat.json"
    chat.write_text(json.dumps({"messages": [{"role": "user", "content": "hi"}]}))
    assert "1 blocks" in (await lamina("explain", "--model", BASE, "--messages", str(chat))).stdout


async def test_explain_refuses_what_cannot_be(house: House, lamina: Run) -> None:
    """With a message for people, and status 2 for wrong input."""
    assert house.url
    unknown = await lamina("explain", "--model", "nope", "--prompt", "x", fails=1)
    assert "nope" in unknown.stderr
    assert "one of" in (await lamina("explain", "--model", BASE, fails=2)).stderr
    nobody = await lamina("explain", "--tenant", "nobody", "--model", BASE, "--prompt", "x", fails=1)
    assert "nobody" in nobody.stderr
    wrong = await lamina("top", "--url", "127.0.0.1:8000", fails=2)
    assert "http://" in wrong.stderr


async def test_verify(house: House, lamina: Run) -> None:
    """A sample, or all, while the engine serves."""
    stored = await spilled(house)
    asking = asyncio.create_task(house.complete(text("e")))
    found = await of_json(lamina("verify", "--all", "--json"))
    await asking
    assert found["sound"]
    by_tier = {report["tier"]: report for report in found["tiers"]}
    assert all(report["complete"] for report in found["tiers"])
    assert by_tier["gpu"]["checked"] == 16
    assert by_tier["host"]["checked"] >= min(stored, 6)
    assert by_tier["store"]["total"] == 0
    shown = (await lamina("verify", "--sample", "3")).stdout
    assert "All sound." in shown
    assert "nothing to check" in shown


async def test_a_server_over_another_folder_is_told_apart(house: House, lamina: Run, tmp_path: Path) -> None:
    """Its tickets do not fit; the key of a tenant would not either."""
    assert announced_address(tmp_path) == house.url
    os.replace(tmp_path / "secret", tmp_path / "old-secret")
    refused = await lamina("verify", fails=2)
    assert "another data folder" in refused.stderr


async def test_without_a_server(lamina: Run, tmp_path: Path) -> None:
    """`top` falls back to the database, the others say what to do; a server that was killed left its address."""
    (tmp_path / "address").write_text("http://127.0.0.1:9\n")
    shown = (await lamina("top")).stdout
    assert "No server has run" in shown
    assert "lamina serve" in shown
    assert (await of_json(lamina("top", "--json")))["server"] is None
    assert "lamina serve" in (await lamina("verify", fails=1)).stderr
    for command in ("top", "explain", "verify"):
        assert f"Example: lamina kv {command}" in (await lamina(command, "--help")).stdout
