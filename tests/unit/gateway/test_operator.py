"""/operator/kv, and the metrics of tenants' blocks: how prompts fared, and why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fixtures.gateway import BASE, SECRET, Kit, build
from lamina.gateway.kv_metrics import kv_metrics
from lamina.gateway.shares import Shares, tenants_shares
from lamina.gateway.testing import InMemoryQuotas
from lamina.tenancy.operator import OperatorDoor
from lamina.types import CommonsReport, PrefixReport, TenantBlocks, TenantPrefixes

TEXT = "x" * 64  # four blocks of bytes


@pytest.fixture
def kit(tmp_path: Path) -> Kit:
    made = build(tmp_path)
    made.quotas.set("alice")
    return made


async def complete(kit: Kit, text: str = TEXT) -> dict[str, Any]:
    async with kit.client() as client:
        return (await client.post("/v1/completions", json={"model": BASE, "prompt": text, "max_tokens": 1})).json()


async def ask(kit: Kit, path: str, body: Any = None, *, door: OperatorDoor | None = None) -> Any:
    ticket = (door or OperatorDoor(SECRET)).ticket(path)
    async with kit.client(ticket) as client:
        return await (client.get(path) if body is None else client.post(path, json=body))


def alice(kit: Kit, **fields: Any) -> dict[str, Any]:
    principal = kit.keys._principals[kit.key]
    return {"tenant_id": principal.tenant_id, "namespace": principal.namespace, "model": BASE, **fields}


def test_a_ticket_is_for_one_path_and_a_short_time() -> None:
    """Of the same secret, and whole."""
    now = 1000.0
    door = OperatorDoor(SECRET, clock=lambda: now)
    ticket = door.ticket("/operator/kv")
    assert door.admits(ticket, "/operator/kv")
    assert not door.admits(ticket, "/operator/kv/verify")
    assert not OperatorDoor(b"o" * 32, clock=lambda: now).admits(ticket, "/operator/kv")
    later = ticket.replace("1000", "1001")
    for broken in ("", "lamina_operator_", ticket[:-1], ticket + "0", later, "lamina_operator_²_x"):
        assert not door.admits(broken, "/operator/kv")
    now = 1121.0
    assert not door.admits(ticket, "/operator/kv")


async def test_tenants_keys_do_not_open_it(kit: Kit) -> None:
    """Whatever is asked, whether it exists or not."""
    async with kit.client() as client:
        for path in ("/operator/kv", "/operator/nothing"):
            response = await client.get(path)
            assert response.status_code == 401
        assert (await client.post("/operator/kv/explain", json=alice(kit, prompt=TEXT))).status_code == 401
    assert (await ask(kit, "/operator/kv", door=OperatorDoor(b"o" * 32))).status_code == 401
    assert (await ask(kit, "/operator/nothing")).status_code == 404


async def test_the_overview_names_tenants_by_id(kit: Kit) -> None:
    await complete(kit)
    await complete(kit)
    found = (await ask(kit, "/operator/kv")).json()
    assert found["pool"]["total"] == 64
    (share,) = found["tenants"]
    assert (share["tenant"], share["cached"]) == ("ten_alice", 4)
    (prefixes,) = found["prefixes"]
    assert prefixes["hits"] == [["gpu", 3]]
    assert prefixes["misses"] == [["none", "never_stored", 3]]
    assert kit.keys._principals[kit.key].namespace not in str(found)


async def test_a_prompt_is_explained_block_by_block(kit: Kit) -> None:
    """Where its blocks are, and why the others are nowhere."""
    await complete(kit)
    found = (await ask(kit, "/operator/kv/explain", alice(kit, prompt=TEXT + "y" * 40))).json()
    assert (found["tokens"], found["blocks"], found["store"]) == (104, 6, "none")
    here, missing = found["runs"]
    assert (here["first"], here["blocks"], here["tiers"], here["reason"]) == (0, 4, ["gpu"], None)
    assert (missing["first"], missing["blocks"], missing["reason"]) == (4, 2, "never_stored")
    assert found["rooms"][0] == ["gpu", 8 * 1024]


async def test_a_prompt_is_messages_or_text(kit: Kit) -> None:
    both = alice(kit, prompt=TEXT, messages=[{"role": "user", "content": "hi"}])
    assert (await ask(kit, "/operator/kv/explain", both)).status_code == 400
    asked = await ask(kit, "/operator/kv/explain", alice(kit, messages=[{"role": "user", "content": "hi"}]))
    assert asked.json()["tokens"] == len("<user>hi\n<assistant>")
    assert (await ask(kit, "/operator/kv/explain", alice(kit, prompt=TEXT) | {"model": "nope"})).status_code == 404


async def test_verifying_checks_the_books(kit: Kit) -> None:
    """A violation is an answer, not an error; tiers that there are not have nothing to check."""
    assert (await ask(kit, "/operator/kv/verify", {"tier": "gpu"})).json()["violations"] == []
    assert (await ask(kit, "/operator/kv/verify", {"tier": "host"})).json()["total"] == 0
    assert (await ask(kit, "/operator/kv/verify", {"tier": "store"})).json()["total"] == 0
    assert (await ask(kit, "/operator/kv/verify", {"tier": "attic"})).status_code == 400
    kit.engine._kv._cached += 1
    (violation, *_) = (await ask(kit, "/operator/kv/verify", {"tier": "gpu"})).json()["violations"]
    assert "cached" in violation


async def test_metrics_tell_how_prompts_fared(kit: Kit) -> None:
    await complete(kit)
    await complete(kit)
    async with kit.client() as client:
        lines = (await client.get("/metrics")).text.splitlines()
    assert 'lamina_kv_prefix_blocks_total{result="hit_gpu",tenant="ten_alice"} 3.0' in lines
    assert 'lamina_kv_prefix_blocks_total{result="hit_store",tenant="ten_alice"} 0.0' in lines
    assert 'lamina_kv_prefix_blocks_total{result="miss",tenant="ten_alice"} 3.0' in lines
    assert 'lamina_kv_missed_blocks_total{reason="never_stored",tenant="ten_alice",tier="none"} 3.0' in lines
    assert 'lamina_kv_tenant_bytes{state="cached",tenant="ten_alice",tier="gpu"} 4096.0' in lines


def test_metrics_of_all_tiers() -> None:
    """Each count with its tier."""
    share = TenantBlocks(
        namespace="t",
        active=2,
        evictions=(("lru", 5),),
        host_bytes=700,
        host_pinned_bytes=100,
        host_pending_bytes=200,
        host_evictions=(("pressure", 6),),
        store_bytes=9000,
    )
    prefixes = TenantPrefixes(
        namespace="t",
        hits=(("host", 3),),
        misses=(("store", "integrity", 2), ("host", "pressure", 1)),
        ghost_hits=(("host", 4096, 1),),
        declined=(("store", "recompute_cheaper", 8),),
        store_evictions=(("own_quota", 9),),
    )
    report = CommonsReport(loaded=True, capacity=8, coverable=8)
    samples = {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in kv_metrics(Shares(report, (share,), (prefixes,)), 1000)
        for sample in family.samples
    }
    assert samples["lamina_kv_tenant_bytes", "active", "t", "gpu"] == 2000
    assert samples["lamina_kv_tenant_bytes", "cached", "t", "host"] == 400
    assert samples["lamina_kv_tenant_bytes", "cached", "t", "store"] == 9000
    assert samples["lamina_kv_evicted_blocks_total", "lru", "t", "gpu"] == 5
    assert samples["lamina_kv_evicted_blocks_total", "pressure", "t", "host"] == 6
    assert samples["lamina_kv_evicted_blocks_total", "own_quota", "t", "store"] == 9
    assert samples["lamina_kv_prefix_blocks_total", "hit_host", "t"] == 3
    assert samples["lamina_kv_prefix_blocks_total", "miss", "t"] == 3
    assert samples["lamina_kv_missed_blocks_total", "integrity", "t", "store"] == 2
    assert samples["lamina_kv_declined_blocks_total", "recompute_cheaper", "t", "store"] == 8
    assert samples["lamina_kv_ghost_hits_total", "4096", "t", "host"] == 1


async def test_namespaces_of_nobody_are_one() -> None:
    """Labels are bounded by the tenants that exist, whatever the engine remembers."""

    class Engine:
        async def commons(self) -> CommonsReport:
            tenants = tuple(TenantBlocks(namespace=f"gone{at}", cached=1, host_bytes=10) for at in range(3))
            return CommonsReport(loaded=True, capacity=8, coverable=8, tenants=tenants)

        async def prefixes(self) -> PrefixReport:
            one = (("none", "never_stored", 2),)
            tenants = (TenantPrefixes(namespace=f"gone{at}", hits=(("gpu", 1),), misses=one) for at in range(3))
            return PrefixReport(tenants=tuple(tenants))

    shares = await tenants_shares(Engine(), InMemoryQuotas())  # type: ignore[arg-type]
    ((share,), (prefixes,)) = shares.blocks, shares.prefixes
    assert (share.namespace, share.cached, share.host_bytes, share.store_bytes) == ("unknown", 3, 30, None)
    assert (prefixes.namespace, prefixes.hits, prefixes.misses) == (
        "unknown",
        (("gpu", 3),),
        (("none", "never_stored", 6),),
    )
