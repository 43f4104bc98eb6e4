"""Pins with floor `host`, through HTTP and a real engine process: whoever floods both tiers takes nothing of them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from fixtures.gateway import BASE
from fixtures.house import BLOCK, BLOCK_BYTES, POOL, House, flood, open_house

SYSTEM = "You are the harbour's pilot; answer in one short sentence, and never leave the channel. ".ljust(
    6 * BLOCK, "."
)
HOST = 24  # blocks
QUOTAS = {
    "a": {"reserved_blocks": 32},
    "b": {"host_reserved_bytes": 7 * BLOCK_BYTES + 1, "host_pin_limit_bytes": 7 * BLOCK_BYTES + 1},
}


@pytest.fixture
async def house(sqlite_template: Path, tmp_path: Path) -> AsyncIterator[House]:
    """Tenant a has two thirds of the device pool reserved, b a third of host memory: 8 blocks, of which 7 for pins."""
    host = f"host_kv_bytes={HOST * BLOCK_BYTES}"
    async with open_house(sqlite_template, tmp_path, host, quotas=QUOTAS) as made:
        yield made


async def test_a_flood_of_both_tiers_takes_no_pinned_block(house: House) -> None:
    """The pool loses the prefix to it, host memory does not: it is served from there."""
    made = await house.call("b", "POST", "/v1/pins", model=BASE, prompt=SYSTEM, ttl=600)
    assert made.status_code == 201, made.text
    pin = made.json()
    assert (pin["floor"], pin["status"], pin["blocks"], pin["resident_blocks"]) == ("host", "granted", 6, 6)
    assert (
        await house.cached(
            "b", "something else that b says once, so that the pinned blocks are its oldest".ljust(8 * BLOCK)
        )
        == 0
    )
    await flood(house, rounds=2)
    report = await house.client.commons()
    shares = {share.host_pinned_bytes: share for share in report.tenants}
    b, a = shares[6 * BLOCK_BYTES], shares[0]
    assert dict(b.evictions)["over_share"] >= 6  # the pool was full, and nothing of it is b's
    assert (b.active, b.pinned) == (0, 0)
    assert dict(a.host_evictions)["pressure"] > HOST  # and so was host memory
    assert a.host_bytes <= (HOST - 8) * BLOCK_BYTES
    promoted = (await house.client.stats()).promoted_blocks
    assert await house.cached("b", SYSTEM + "?") == 6 * BLOCK
    assert (await house.client.stats()).promoted_blocks == promoted + 6
    shown = (await house.call("b", "GET", f"/v1/pins/{pin['id']}")).json()
    assert (shown["hits"], shown["resident_blocks"]) == (1, 6)


async def test_denials_say_how_much_in_blocks_and_in_bytes(house: House) -> None:
    """Each floor has a limit of its own: that of the device is 0 here."""
    denied = await house.call("b", "POST", "/v1/pins", model=BASE, prompt=SYSTEM, floor="gpu")
    assert denied.status_code == 409
    assert "floor 'gpu'" in denied.json()["error"]["message"]
    clipped = (await house.call("b", "POST", "/v1/pins", model=BASE, prompt=SYSTEM + "x" * 2 * BLOCK)).json()
    assert (clipped["status"], clipped["blocks"], clipped["clipped_blocks"]) == ("clipped", 7, 1)
    denied = await house.call("b", "POST", "/v1/pins", model=BASE, prompt="y" * 2 * BLOCK)
    error = denied.json()["error"]
    assert "2 blocks (8192 bytes) more are needed" in error["message"]
    assert "7 blocks (28672 bytes), leaves 0 blocks" in error["message"]
    assert {name: error["details"][name] for name in ("limit", "need", "have")} == {"limit": 7, "need": 2, "have": 0}


async def test_the_server_records_both_tiers(house: House) -> None:
    """So that the command line can refuse what host memory cannot cover; what it takes, the engine does, too."""
    pool = await house.quotas.pool()
    assert pool is not None
    assert pool.host is not None
    assert (pool.capacity_blocks, pool.host.capacity, pool.host.coverable) == (
        POOL,
        HOST * BLOCK_BYTES,
        (HOST - 3) * BLOCK_BYTES,
    )
    assert pool.store is None
