"""The gateway erases what tenants and adapters leave that others deleted: the command line, another gateway."""

from __future__ import annotations

from pathlib import Path

from fixtures.gateway import BASE, Kit
from lamina.gateway.housekeeping import unload_unowned
from lamina.gateway.policy import PolicyKeeper
from lamina.types import QuotaPolicy

TEXT = "a" * 48  # three blocks, one token a byte


async def complete(kit: Kit, model: str = BASE, key: str | None = None) -> int:
    """Cached tokens."""
    async with kit.client(key) as client:
        answer = await client.post("/v1/completions", json={"model": model, "prompt": TEXT + "?", "max_tokens": 1})
    assert answer.status_code == 200, answer.text
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


async def held(kit: Kit) -> dict[str, int]:
    """Blocks by namespace, of those that have any."""
    report = await kit.engine.commons()
    return {share.namespace: share.cached + share.pinned for share in report.tenants if share.cached + share.pinned}


async def test_a_deleted_tenants_blocks_are_erased(kit: Kit) -> None:
    """With its pins and its quota, in one round; the others' stay."""
    bob = kit.keys.issue("bob")
    kit.quotas.set("bob", reserved=5, pins=5)
    keeper = PolicyKeeper(kit.deps)
    await complete(kit)
    await complete(kit, key=bob)
    await keeper.round()
    async with kit.client(bob) as client:
        assert (await client.post("/v1/pins", json={"model": BASE, "prompt": TEXT})).status_code == 201
    before = await held(kit)
    assert sorted(before.values()) == [3, 3]
    await keeper.round()
    assert await held(kit) == before
    kit.quotas.delete("bob")
    await keeper.round()
    (left,) = (await held(kit)).items()
    assert left in before.items()
    assert (await kit.engine.commons()).pins == ()
    await kit.engine.set_quotas([QuotaPolicy(namespace="n")])
    async with kit.client() as client:
        answer = await client.post("/v1/completions", json={"model": BASE, "prompt": TEXT + "?", "max_tokens": 1})
    assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 48


async def test_a_failed_round_tries_again(kit: Kit) -> None:
    """An engine that comes back later is told then, even if it reports nothing of the tenant any more."""
    keeper = PolicyKeeper(kit.deps)
    await complete(kit)
    await keeper.round()
    kit.quotas.delete("alice")
    kit.engine.ready = False
    await keeper.round()
    kit.engine.ready = True
    assert len(await held(kit)) == 1
    await keeper.round()
    assert await held(kit) == {}


async def test_a_deleted_adapters_blocks_are_erased(kit: Kit, tmp_path: Path) -> None:
    """Though it is not loaded any more: its blocks make it known."""
    await kit.add_adapter(tmp_path, "poet")
    await complete(kit)
    assert await complete(kit, "poet") == 0
    assert await complete(kit, "poet") == 48
    (adapter,) = (await kit.engine.stats()).adapters
    assert (adapter.loaded, adapter.blocks) == (False, 3)
    await unload_unowned(kit.deps)
    assert kit.engine.unloaded == []
    await kit.adapters.delete("ten_alice", "poet")
    await unload_unowned(kit.deps)
    assert kit.engine.unloaded == [adapter.digest]
    assert (await kit.engine.stats()).adapters == ()
    assert list((await held(kit)).values()) == [3]
