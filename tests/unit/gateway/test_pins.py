"""/v1/pins over the engine's twin, whose pool, quotas and pins are real."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from fixtures.gateway import BASE, Kit, build, serve, until
from lamina.engine.testing import InMemoryEngine
from lamina.errors import EngineOverloaded
from lamina.gateway.policy import PolicyKeeper
from lamina.types import TierQuota, TierSize

BLOCK = 16
TEXT = "a" * (3 * BLOCK)  # three blocks, one token a byte


@pytest.fixture
async def kept(kit: Kit) -> PolicyKeeper:
    """Alice may pin four blocks; the engine knows it."""
    kit.quotas.set("alice", reserved=10, pins=4)
    keeper = PolicyKeeper(kit.deps)
    await keeper.round()
    return keeper


async def call(kit: Kit, method: str, path: str, *, key: str | None = None, status: int = 200, **body: Any) -> Any:
    async with kit.client(key) as client:
        response = await client.request(method, path, json=body or None)
    assert response.status_code == status, response.text
    return response.json()


async def pin(kit: Kit, *, key: str | None = None, status: int = 201, **body: Any) -> Any:
    return await call(kit, "POST", "/v1/pins", key=key, status=status, **({"model": BASE, "prompt": TEXT} | body))


async def complete(kit: Kit, prompt: str) -> Any:
    return await call(kit, "POST", "/v1/completions", model=BASE, prompt=prompt, max_tokens=1)


@pytest.mark.usefixtures("kept")
async def test_a_pin_is_computed_and_hit(kit: Kit) -> None:
    """201 with what it holds; the next request with that beginning is a hit, and says so in its usage."""
    made = await pin(kit, ttl=60)
    assert made["id"].startswith("pin_")
    assert {name: made[name] for name in ("status", "reason", "blocks", "tokens", "bytes", "floor")} == {
        "status": "granted",
        "reason": None,
        "blocks": 3,
        "tokens": 48,
        "bytes": 3 * 1024,
        "floor": "gpu",
    }
    assert made["resident_blocks"] == 3
    assert made["expires_at"] == made["created_at"] + 60
    answer = await complete(kit, TEXT + "more")
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 48
    shown = await call(kit, "GET", f"/v1/pins/{made['id']}")
    assert shown["hits"] == 1
    assert (await call(kit, "GET", "/v1/pins"))["data"] == [shown]


@pytest.mark.usefixtures("kept")
async def test_messages_are_pinned_as_later_conversations_begin(kit: Kit) -> None:
    """Without the assistant's opening: a conversation that goes on behind them finds their blocks."""
    system = {"role": "system", "content": "b" * 40}
    made = await pin(kit, prompt=None, messages=[system])
    assert made["blocks"] == 3  # "<system>" + 40 + newline
    messages = [system, {"role": "user", "content": "hi"}]
    answer = await call(kit, "POST", "/v1/chat/completions", model=BASE, messages=messages, max_tokens=1)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 48


@pytest.mark.usefixtures("kept")
async def test_clipped_then_denied_with_numbers(kit: Kit) -> None:
    """The head of the prefix as far as the limit goes; when nothing is left, 409 with the numbers."""
    made = await pin(kit, prompt="c" * (6 * BLOCK))
    assert (made["status"], made["reason"], made["blocks"], made["clipped_blocks"]) == ("clipped", "pin_limit", 4, 2)
    error = (await pin(kit, status=409))["error"]
    assert error["code"] == "pin_denied"
    assert {name: error["details"][name] for name in ("reason", "limit", "need", "have")} == {
        "reason": "pin_limit",
        "limit": 4,
        "need": 3,
        "have": 0,
    }
    assert error["details"]["decision"].startswith("kv-")
    await call(kit, "DELETE", f"/v1/pins/{made['id']}")
    assert (await pin(kit))["status"] == "granted"


@pytest.mark.usefixtures("kept")
async def test_another_tenant_sees_nothing(kit: Kit) -> None:
    """And without a quota it cannot pin anything."""
    made, bob = await pin(kit), kit.keys.issue("bob")
    assert (await call(kit, "GET", "/v1/pins", key=bob))["data"] == []
    for method, body in (("GET", {}), ("PATCH", {"ttl": 5}), ("DELETE", {})):
        await call(kit, method, f"/v1/pins/{made['id']}", key=bob, status=404, **body)
    assert (await pin(kit, key=bob, status=409))["error"]["details"]["limit"] == 0
    assert [each["id"] for each in (await call(kit, "GET", "/v1/pins"))["data"]] == [made["id"]]


@pytest.mark.usefixtures("kept")
async def test_ttl(kit: Kit) -> None:
    """The default is an hour; a change counts from now; beyond the hard maximum is refused."""
    made = await pin(kit)
    assert made["ttl"] == 3600
    changed = await call(kit, "PATCH", f"/v1/pins/{made['id']}", ttl=7200)
    assert changed["ttl"] == 7200
    assert changed["expires_at"] >= made["created_at"] + 7200
    for refused in (86401, 0, "soon"):
        error = (await call(kit, "PATCH", f"/v1/pins/{made['id']}", status=400, ttl=refused))["error"]
        assert error["param"] == "ttl"
    assert (await call(kit, "DELETE", f"/v1/pins/{made['id']}"))["deleted"]
    await call(kit, "DELETE", f"/v1/pins/{made['id']}", status=404)


@pytest.mark.usefixtures("kept")
@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"messages": [{"role": "user", "content": "x"}]}, "prompt"),
        ({"prompt": "short"}, "prompt"),
        ({"prompt": [1, 2, 300]}, "prompt"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"cache_salt": "x"}, "cache_salt"),
        ({"floor": "redis"}, "floor"),
        ({"floor": "host"}, "floor"),
        ({"ttl": 10**6}, "ttl"),
        ({"colour": "red"}, "colour"),
        ({"prompt": "x" * 2000}, "messages"),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_mistakes(kit: Kit, body: dict[str, Any], param: str) -> None:
    assert (await pin(kit, status=400, **body))["error"]["param"] == param
    assert (await kit.engine.commons()).pins == ()


async def test_a_key_needs_the_scope(kit: Kit) -> None:
    key = kit.keys.issue("alice", scopes=frozenset({"adapters:read"}))
    await pin(kit, key=key, status=403)


async def test_before_quotas_are_loaded(kit: Kit) -> None:
    """503 and when to come again: nobody is promised what may not be covered."""
    error = (await pin(kit, status=503))["error"]
    assert error["code"] == "engine_unavailable"


@pytest.mark.usefixtures("kept")
async def test_what_cannot_be_computed_now_is_pinned_all_the_same(kit: Kit) -> None:
    """The lease waits for its blocks, and says that it has none; so does one that was not to be computed."""
    kit.engine.refusal = EngineOverloaded(retry_after_s=1.0)
    assert (await pin(kit))["resident_blocks"] == 0
    kit.engine.refusal = None
    await complete(kit, TEXT)
    assert (await call(kit, "GET", "/v1/pins"))["data"][0]["resident_blocks"] == 3
    assert (await pin(kit, prompt="z" * BLOCK, compute=False))["resident_blocks"] == 0


@pytest.mark.usefixtures("kept")
async def test_what_cannot_be_kept_is_not_pinned(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the row cannot be written, the engine forgets the pin."""

    async def fail(*_: Any, **__: Any) -> Any:
        raise EngineOverloaded(retry_after_s=1.0)

    monkeypatch.setattr(kit.pins, "add", fail)
    await pin(kit, status=503)
    assert (await kit.engine.commons()).pins == ()


async def test_a_restarted_engine_gets_quotas_and_pins_back(kit: Kit, kept: PolicyKeeper) -> None:
    """Until then a pin is shown as waiting; afterwards with its hits, and its blocks when they are computed again."""
    made = await pin(kit)
    await complete(kit, TEXT + "more")
    await kept.round()  # writes the hit back
    kit.engine.restart()
    waiting = await call(kit, "GET", f"/v1/pins/{made['id']}")
    assert (waiting["status"], waiting["hits"]) == ("waiting", 1)
    await call(kit, "PATCH", f"/v1/pins/{made['id']}", status=503, ttl=5)
    await kept.round()
    again = await call(kit, "GET", f"/v1/pins/{made['id']}")
    assert (again["status"], again["hits"], again["blocks"], again["resident_blocks"]) == ("granted", 1, 3, 0)
    assert kit.quotas.pool["capacity_blocks"] == 64
    await complete(kit, TEXT + "more")
    assert (await call(kit, "GET", f"/v1/pins/{made['id']}"))["resident_blocks"] == 3


async def test_a_deleted_pin_does_not_come_back(kit: Kit, kept: PolicyKeeper) -> None:
    """Also if it was deleted while there was no engine."""
    made = await pin(kit)
    kit.engine.ready = False
    await call(kit, "DELETE", f"/v1/pins/{made['id']}")
    kit.engine.ready = True
    kit.engine.restart()
    await kept.round()
    assert (await kit.engine.commons()).pins == ()


async def test_policy_is_told_once_and_after_each_change(kit: Kit, kept: PolicyKeeper) -> None:
    """Lower limits clip pins; what cannot be covered leaves the engine as it was."""
    await pin(kit)
    await kept.round()
    assert kit.engine.quotas_set == 1
    kit.quotas.set("alice", reserved=10, pins=2)
    await kept.round()
    [clipped] = (await call(kit, "GET", "/v1/pins"))["data"]
    assert (clipped["status"], clipped["blocks"], clipped["clipped_blocks"]) == ("clipped", 2, 1)
    kit.quotas.set("bob", reserved=1000)
    for _ in range(2):
        await kept.round()
    assert kit.engine.quotas_set == 2
    assert (await kit.engine.commons()).loaded


async def test_a_pin_that_no_longer_fits_is_not_tried_for_ever(kit: Kit, kept: PolicyKeeper) -> None:
    """It waits until policy changes."""
    await pin(kit)
    kit.quotas.set("alice")
    for _ in range(3):
        await kept.round()
    assert (await call(kit, "GET", "/v1/pins"))["data"][0]["status"] == "waiting"
    kit.quotas.set("alice", reserved=10, pins=4)
    await kept.round()
    assert (await call(kit, "GET", "/v1/pins"))["data"][0]["status"] == "granted"


@pytest.mark.usefixtures("kept")
async def test_metrics(kit: Kit) -> None:
    """Blocks by tenant and state, and pin hits; tenants by id."""
    await pin(kit)
    await complete(kit, TEXT + "more")
    await call(kit, "POST", "/v1/completions", key=kit.keys.issue("bob"), model=BASE, prompt=TEXT, max_tokens=1)
    async with kit.client() as client:
        lines = (await client.get("/metrics")).text.splitlines()
    assert 'lamina_kv_tenant_blocks{state="pinned",tenant="ten_alice"} 3.0' in lines
    assert 'lamina_kv_tenant_blocks{state="cached",tenant="unknown"} 3.0' in lines  # bob has no quota in the twin
    assert 'lamina_kv_pin_hits_total{tenant="ten_alice"} 1.0' in lines


async def test_a_running_gateway_keeps_up_by_itself(tmp_path: Path) -> None:
    """Quotas are set as soon as the engine is there, and again when another one is."""
    kit = build(tmp_path, engine=InMemoryEngine(), policy_poll_s=0.2)
    kit.engine.ready = False
    async with serve(kit.app):
        await asyncio.sleep(0.3)
        assert kit.engine.quotas_set == 0
        kit.engine.ready = True
        await until(lambda: kit.engine.quotas_set == 1)
        kit.engine.restart()
        await until(lambda: kit.engine.quotas_set == 2)


async def test_host_memory_is_the_floor_where_it_is_a_tier(tmp_path: Path) -> None:
    """By default, and out of a limit of its own; the device's is there for those who ask for it."""
    kit = build(tmp_path, engine=InMemoryEngine(host_blocks=8))
    host = TierQuota(reserved=5 * 1024 - 1, pin_limit=4 * 1024 + 1000)
    kit.quotas.set("alice", reserved=10, pins=3, host=host)
    await PolicyKeeper(kit.deps).round()
    assert kit.quotas.pool["host"] == TierSize(8 * 1024, 7 * 1024)
    made = await pin(kit)
    assert (made["floor"], made["status"], made["blocks"], made["resident_blocks"]) == ("host", "granted", 3, 3)
    assert (await pin(kit, floor="gpu"))["blocks"] == 3
    assert (await pin(kit, prompt="b" * 2 * BLOCK))["blocks"] == 1  # a limit rounds down to whole blocks
    denied = await pin(kit, prompt="c" * 2 * BLOCK, status=409)
    assert "floor 'host': 2 blocks (2048 bytes) more are needed" in denied["error"]["message"]
    assert "4 blocks (4096 bytes), leaves 0 blocks (0 bytes)" in denied["error"]["message"]
    denied = await pin(kit, prompt="c" * 2 * BLOCK, floor="gpu", status=409)
    assert "floor 'gpu': 2 blocks (2048 bytes)" in denied["error"]["message"]


async def test_pins_of_both_floors_survive_a_new_engine(tmp_path: Path) -> None:
    """They are leased again at once; their blocks come when they are used."""
    kit = build(tmp_path, engine=InMemoryEngine(host_blocks=8))
    kit.quotas.set("alice", reserved=10, pins=3, host=TierQuota(reserved=4096, pin_limit=4096))
    keeper = PolicyKeeper(kit.deps)
    await keeper.round()
    ids = {(await pin(kit, floor=floor))["id"]: floor for floor in ("gpu", "host")}
    kit.engine.restart()
    await keeper.round()
    held = {each.pin_id: each.floor for each in (await kit.engine.commons()).pins}
    assert held == ids


@pytest.mark.usefixtures("kept")
async def test_a_floor_that_is_not_there_says_what_to_set(kit: Kit) -> None:
    refused = await pin(kit, floor="host", status=400)
    assert refused["error"]["param"] == "floor"
    assert "LAMINA_HOST_KV_BYTES" in refused["error"]["message"]
