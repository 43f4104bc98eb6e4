"""Two tenants on one small pool, through HTTP: what one was promised the other cannot take. A real engine process."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from fixtures.gateway import BASE, serve, until
from fixtures.tenancy import SECRET
from lamina.config import GatewayConfig
from lamina.engine.client import ZmqEngineClient
from lamina.gateway.app import create_app
from lamina.gateway.deps import GatewayDeps
from lamina.gateway.testing import ByteCodec
from lamina.tenancy.adapters import AdapterService
from lamina.tenancy.database import Database
from lamina.tenancy.keys import KeyService
from lamina.tenancy.memory import MemoryIntake
from lamina.tenancy.pins import PinService
from lamina.tenancy.quotas import QuotaService
from lamina.tenancy.tenants import TenantService
from lamina.wiring.supervisor import Backoff, EngineSupervisor
from support.tiny_engine import spawn_tiny

BLOCK = 16
POOL = 48  # blocks
SYSTEM = "You are the harbour's pilot; answer in one short sentence, and never leave the channel. ".ljust(
    6 * BLOCK, "."
)
HISTORY = "A conversation that has gone on for some time already, and that is worth keeping".ljust(5 * BLOCK, "-")


@dataclass
class House:
    url: str
    client: ZmqEngineClient
    supervisor: EngineSupervisor
    quotas: QuotaService
    keys: dict[str, str]

    async def call(self, tenant: str, method: str, path: str, **body: Any) -> httpx.Response:
        headers = {"authorization": f"Bearer {self.keys[tenant]}"}
        async with httpx.AsyncClient(base_url=self.url, headers=headers, timeout=120, trust_env=False) as client:
            return await client.request(method, path, json=body or None)

    async def complete(self, tenant: str, prompt: str, *, tokens: int = 4) -> httpx.Response:
        body: dict[str, Any] = {"model": BASE, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True}
        return await self.call(tenant, "POST", "/v1/completions", temperature=0, **body)

    async def cached(self, tenant: str, prompt: str) -> int:
        answer = await self.complete(tenant, prompt)
        assert answer.status_code == 200, answer.text
        return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    async def metric(self, name: str) -> float:
        """Summed over all labels."""
        text = (await self.call("a", "GET", "/metrics")).text
        return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(name + "{"))


@asynccontextmanager
async def engine_at(folder: Path) -> AsyncIterator[tuple[ZmqEngineClient, EngineSupervisor]]:
    options = [f"num_blocks={POOL}", "max_batch_tokens=128", "max_running=6", "max_waiting=8"]
    client = ZmqEngineClient(f"ipc://{folder}/engine")
    await client.start()
    supervisor = EngineSupervisor(
        client,
        lambda identity: spawn_tiny(client.address, identity, folder / "adapters", options),
        backoff=Backoff(first_s=0.05),
    )
    watching = asyncio.create_task(supervisor.run())
    try:
        yield client, supervisor
    finally:
        supervisor.kill()
        await asyncio.gather(watching, return_exceptions=True)
        await client.close()


@pytest.fixture
async def house(sqlite_template: Path, tmp_path: Path) -> AsyncIterator[House]:
    shutil.copy(sqlite_template, tmp_path / "lamina.db")
    database = Database.open(f"sqlite+aiosqlite:///{tmp_path / 'lamina.db'}")
    keys, tenants = KeyService(database=database, secret=SECRET), TenantService(database=database)
    quotas = QuotaService(database=database, secret=SECRET)
    raw = {}
    for name in "ab":
        tenant = await tenants.create(name=name)
        raw[name] = (await keys.issue(tenant.id, name="k", scopes=["inference"])).raw
    await quotas.set("b", reserved_blocks=24, pin_limit_blocks=8)
    async with engine_at(tmp_path) as (client, supervisor):
        deps = GatewayDeps(
            engine=client,
            tokenizer=ByteCodec(),
            keys=keys,
            adapters=AdapterService(database=database, intake=MemoryIntake(), base_model=BASE),
            quotas=quotas,
            pins=PinService(database=database, secret=SECRET),
            config=GatewayConfig(policy_poll_s=0.2),
            base_model=BASE,
            uploads=tmp_path / "uploads",
            created=0,
        )
        await asyncio.wait_for(client.wait_ready(), 60)
        async with serve(create_app(deps)) as url:
            made = House(url, client, supervisor, quotas, raw)
            await loaded(made)
            yield made
    await keys.close()
    await database.close()


async def loaded(house: House) -> None:
    for _ in range(600):
        if house.client.ready and (await house.client.commons()).loaded:
            return
        await asyncio.sleep(0.05)
    raise AssertionError("the engine never got its quotas")


async def flood(house: House, rounds: int) -> Counter[int]:
    """Tenant a asks for all that it can get: long prompts, never the same twice. Its statuses."""
    statuses: Counter[int] = Counter()

    async def ask(number: int) -> None:
        for turn in range(rounds):
            answer = await house.complete("a", f"flood {number} {turn} ".ljust(12 * BLOCK, "x"), tokens=12)
            statuses[answer.status_code] += 1
            if answer.status_code == 429:
                details = answer.json()["error"]["details"]
                assert details["need"] > details["limit"] >= details["have"] - 1
                assert "retry-after" in answer.headers
                await asyncio.sleep(0.05)

    await asyncio.gather(*(ask(number) for number in range(9)))
    return statuses


async def test_a_flood_takes_nothing_that_was_promised(house: House) -> None:
    """B's pinned prefix, and its cached ones within its reservation, hit all the while; A waits, or gets 429."""
    made = await house.call("b", "POST", "/v1/pins", model=BASE, prompt=SYSTEM, ttl=600)
    assert made.status_code == 201, made.text
    pin = made.json()
    assert (pin["status"], pin["blocks"], pin["resident_blocks"]) == ("granted", 6, 6)
    assert pin["bytes"] == 6 * house.client.info.block_bytes > 0
    assert await house.cached("b", HISTORY + "?") == 0
    flooding = asyncio.create_task(flood(house, rounds=4))
    hits = []
    while not flooding.done():
        hits.append((await house.cached("b", SYSTEM + f"{len(hits)}?"), await house.cached("b", HISTORY + "?")))
    statuses = await flooding
    assert len(hits) >= 3
    assert set(hits) == {(6 * BLOCK, 5 * BLOCK)}
    assert statuses.keys() == {200, 429}
    assert statuses[200] >= 9
    stats = await house.client.stats()
    assert stats.waiting == stats.running == 0
    shown = (await house.call("b", "GET", f"/v1/pins/{pin['id']}")).json()
    assert shown["hits"] == len(hits)
    shares = (await house.client.commons()).tenants
    assert sum(dict(share.evictions).get("over_share", 0) for share in shares) > 0  # so the pool was full
    assert await house.metric("lamina_kv_pin_hits_total") == len(hits)


async def test_a_request_beyond_its_limit_is_refused_with_numbers(house: House) -> None:
    """At once, however empty the pool is: what others reserved is out of reach."""
    answer = await house.complete("a", "x" * 20 * BLOCK, tokens=8 * BLOCK)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["code"] == "exceeds_quota"
    assert {name: error["details"][name] for name in ("limit", "need", "have")} == {"limit": 18, "need": 28, "have": 18}
    assert (await house.complete("b", "x" * 20 * BLOCK, tokens=8 * BLOCK)).status_code == 200


async def test_quotas_follow_the_command_line(house: House) -> None:
    """A running server takes them over within the poll time, and records how large its pool is."""
    pool = await house.quotas.pool()
    assert pool is not None
    assert (pool.capacity_blocks, pool.coverable_blocks) == (POOL, POOL - 6)
    await house.quotas.set("b", reserved_blocks=4)
    for _ in range(100):
        if (await house.complete("a", "x" * 20 * BLOCK, tokens=8 * BLOCK)).status_code == 200:
            break
        await asyncio.sleep(0.05)
    else:
        raise AssertionError("the limit never moved")
    denied = await house.call("b", "POST", "/v1/pins", model=BASE, prompt=SYSTEM)
    assert denied.status_code == 409
    assert denied.json()["error"]["details"]["reason"] == "pin_limit"


async def test_a_killed_engine_comes_back_with_quotas_and_pins(house: House) -> None:
    """The pool is empty then; the pin keeps its blocks again as soon as they are computed."""
    pin = (await house.call("b", "POST", "/v1/pins", model=BASE, prompt=SYSTEM, ttl=600)).json()
    assert await house.cached("b", SYSTEM + "?") == 6 * BLOCK
    await asyncio.sleep(0.5)  # the hit is written back
    os.kill(house.supervisor.pid, signal.SIGKILL)
    await asyncio.wait_for(house.client.wait_lost(), 30)
    await asyncio.wait_for(house.client.wait_ready(), 60)
    await loaded(house)

    async def shown() -> dict[str, Any]:
        body: dict[str, Any] = (await house.call("b", "GET", f"/v1/pins/{pin['id']}")).json()
        return body

    for _ in range(100):
        if (await shown())["status"] == "granted":
            break
        await asyncio.sleep(0.05)
    assert ((await shown())["resident_blocks"], (await shown())["hits"]) == (0, 1)
    assert await house.cached("b", SYSTEM + "?") == 0
    await flood(house, rounds=1)
    assert await house.cached("b", SYSTEM + "?") == 6 * BLOCK
    assert (await shown())["hits"] == 2
    await until(lambda: house.client.ready)
