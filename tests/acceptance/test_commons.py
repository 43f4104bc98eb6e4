"""Two tenants on one small pool, through HTTP: what one was promised the other cannot take. A real engine process."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from fixtures.gateway import BASE, until
from fixtures.house import BLOCK, POOL, House, flood, loaded, open_house

SYSTEM = "You are the harbour's pilot; answer in one short sentence, and never leave the channel. ".ljust(
    6 * BLOCK, "."
)
HISTORY = "A conversation that has gone on for some time already, and that is worth keeping".ljust(5 * BLOCK, "-")


@pytest.fixture
async def house(sqlite_template: Path, tmp_path: Path) -> AsyncIterator[House]:
    quotas = {"b": {"reserved_blocks": 24, "pin_limit_blocks": 8}}
    async with open_house(sqlite_template, tmp_path, quotas=quotas) as made:
        yield made


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
