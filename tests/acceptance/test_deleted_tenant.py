"""A tenant is deleted on the command line while a server runs: its blocks are gone, the others' are not."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from fixtures.house import BLOCK, BLOCK_BYTES, House, open_house

SYSTEM = "You are the harbour's pilot; answer in one short sentence. ".ljust(5 * BLOCK, ".")


@pytest.fixture
async def house(sqlite_template: Path, tmp_path: Path) -> AsyncIterator[House]:
    """Both tenants can pin; host memory is below the pool."""
    quota = {"host_reserved_bytes": 8 * BLOCK_BYTES, "host_pin_limit_bytes": 5 * BLOCK_BYTES}
    quotas = dict.fromkeys("ab", quota)
    async with open_house(sqlite_template, tmp_path, f"host_kv_bytes={1 << 20}", quotas=quotas) as made:
        yield made


async def test_a_deleted_tenant_leaves_no_blocks(house: House, tmp_path: Path) -> None:
    """Of the device pool and of host memory, pinned ones too, and no quota; b's next request is a hit as before."""
    for tenant in "ab":
        made = await house.call(tenant, "POST", "/v1/pins", model="org/base-model", prompt=SYSTEM, ttl=600)
        assert made.status_code == 201, made.text
        for turn in range(8):
            await house.cached(tenant, f"{turn} {tenant} ".ljust(5 * BLOCK, "x") + "?")
    assert await house.cached("b", SYSTEM + "?") == 5 * BLOCK
    spaces = await tenants_below(house)
    assert len(spaces) == 2
    await delete("a", tmp_path)
    for _ in range(200):
        if len(await tenants_below(house)) == 1:
            break
        await asyncio.sleep(0.05)
    left = await tenants_below(house)
    assert left.keys() < spaces.keys()
    report = await house.client.commons()
    assert [pin.namespace for pin in report.pins] == list(left)
    assert await house.cached("b", SYSTEM + "?") == 5 * BLOCK
    assert [record.tenant_name for record in await house.quotas.list()] == ["b"]
    assert (await house.client.stats()).blocks_active == 0


async def tenants_below(house: House) -> dict[str, tuple[int, int]]:
    """Blocks of the pool and bytes of host memory by namespace, of those that have any."""
    found = {}
    for share in (await house.client.commons()).tenants:
        mine = share.active + share.cached + share.pinned, share.host_bytes
        if any(mine):
            found[share.namespace] = mine
    return found


async def delete(tenant: str, home: Path) -> None:
    """`lamina tenants delete --force` in a process of its own."""
    environment = {"PATH": os.environ["PATH"], "LAMINA_HOME": str(home)}
    process = await asyncio.create_subprocess_exec(
        Path(sys.executable).with_name("lamina"),
        "tenants",
        "delete",
        tenant,
        "--force",
        env=environment,
        stdout=asyncio.subprocess.PIPE,
    )
    said, _ = await process.communicate()
    assert process.returncode == 0
    assert said.startswith(b"Deleted tenant a")
