"""The gateway over the real tenancy services, database, validator and adapter store; only the engine is a twin."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import numpy as np
import pytest
from safetensors.numpy import save

from fixtures.gateway import BASE
from fixtures.tenancy import SECRET, Time
from lamina.config import GatewayConfig
from lamina.engine.testing import InMemoryEngine
from lamina.gateway.app import create_app
from lamina.gateway.deps import GatewayDeps
from lamina.gateway.testing import ByteCodec
from lamina.tenancy.adapters import AdapterService
from lamina.tenancy.database import Database
from lamina.tenancy.keys import KeyService
from lamina.tenancy.lora_intake import LoraIntake
from lamina.tenancy.operator import OperatorDoor
from lamina.tenancy.pins import PinService
from lamina.tenancy.principal import ALL_SCOPES
from lamina.tenancy.quotas import QuotaService
from lamina.tenancy.tenants import TenantService
from lamina_lora.geometry import TARGETS, BaseGeometry
from lamina_lora.store import AdapterStore

GEOMETRY = BaseGeometry(num_layers=1, targets=dict.fromkeys(TARGETS, (8, 8)), vocab_size=16, hidden_size=8)
STEM = "base_model.model.model.layers.0.self_attn.q_proj"
CONFIG = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "r": 2,
    "lora_alpha": 2,
    "target_modules": ["q_proj"],
    "base_model_name_or_path": "tiny",
}


@dataclass
class House:
    """A server of two tenants."""

    app: Any
    keys: KeyService
    tenants: TenantService
    adapters: AdapterService
    store: AdapterStore
    uploads: Path
    alice: str
    alices_key: str

    def client(self, key: str | None = None) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            transport=httpx.ASGITransport(app=self.app),
            base_url="http://gateway",
            headers={"authorization": f"Bearer {key or self.alices_key}"},
        )


@pytest.fixture
async def house(sqlite_template: Path, tmp_path: Path, time: Time) -> AsyncIterator[House]:
    shutil.copy(sqlite_template, tmp_path / "lamina.db")
    database = Database.open(f"sqlite+aiosqlite:///{tmp_path / 'lamina.db'}")
    store = AdapterStore(tmp_path / "adapters")
    keys = KeyService(database=database, secret=SECRET, clock=time)
    tenants = TenantService(database=database)
    adapters = AdapterService(
        database=database, intake=LoraIntake(store=store, geometry=GEOMETRY, max_rank=8), base_model=BASE
    )
    alice = (await tenants.create(name="alice")).id
    deps = GatewayDeps(
        engine=InMemoryEngine(),
        tokenizer=ByteCodec(),
        keys=keys,
        adapters=adapters,
        quotas=QuotaService(database=database, secret=SECRET),
        pins=PinService(database=database, secret=SECRET),
        operator=OperatorDoor(SECRET),
        config=GatewayConfig(),
        base_model=BASE,
        uploads=tmp_path / "uploads",
        created=0,
    )
    key = (await keys.issue(alice, name="all", scopes=ALL_SCOPES)).raw
    yield House(create_app(deps), keys, tenants, adapters, store, deps.uploads, alice, key)
    await keys.close()
    await database.close()


def weights(rank: int = 2, *, b: float = 0.5, width: int = 8) -> bytes:
    tensors = {
        f"{STEM}.lora_A.weight": np.ones((rank, width), dtype=np.float32),
        f"{STEM}.lora_B.weight": np.full((8, rank), b, dtype=np.float32),
    }
    return bytes(save(tensors))


async def upload(house: House, data: bytes, *, key: str | None = None, **config: Any) -> httpx.Response:
    files = {
        "adapter_config": ("adapter_config.json", json.dumps(CONFIG | config).encode()),
        "adapter_model": ("adapter_model.safetensors", data),
    }
    async with house.client(key) as client:
        return await client.post("/v1/adapters", files=files, data={"name": "poet"})


async def chat(house: House, key: str | None = None, model: str = "poet") -> httpx.Response:
    async with house.client(key) as client:
        body = {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
        return await client.post("/v1/chat/completions", json=body)


async def test_upload_use_and_delete(house: House) -> None:
    """The digest is the same in the upload's answer, the generation's header and the store."""
    created = (await upload(house, weights())).json()
    assert house.store.digests() == [created["digest"]]
    assert (await chat(house)).headers["x-lamina-adapter-digest"] == created["digest"]
    again = (await upload(house, weights())).json()
    assert again["version"] == created["version"]
    async with house.client() as client:
        assert (await client.delete("/v1/adapters/poet")).status_code == 200
        assert (await client.get(f"/v1/adapters/{created['id']}")).status_code == 404
        assert (await client.get(f"/v1/files/{created['id']}")).status_code == 404
    assert (await chat(house)).status_code == 404
    assert house.store.digests() == []


async def test_another_tenant_sees_nothing(house: House) -> None:
    bob = await house.tenants.create(name="bob")
    key = (await house.keys.issue(bob.id, name="all", scopes=ALL_SCOPES)).raw
    await upload(house, weights())
    assert (await chat(house, key)).json()["error"]["code"] == "model_not_found"
    assert (await upload(house, weights(), key=key)).json()["version"] == 1


def overlapping(data: bytes) -> bytes:
    """Both tensors claim the same bytes."""
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    first, second = (name for name in header if name != "__metadata__")
    header[second]["data_offsets"] = header[first]["data_offsets"]
    spelled = json.dumps(header).encode()
    return struct.pack("<Q", len(spelled)) + spelled + data[8 + size :]


@pytest.mark.parametrize(
    ("data", "config"),
    [
        pytest.param(lambda: b"\x80\x04N.", {}, id="pickle"),
        pytest.param(lambda: weights()[:100], {}, id="truncated"),
        pytest.param(lambda: struct.pack("<Q", 1 << 60) + b"{}", {}, id="header of an exabyte"),
        pytest.param(lambda: overlapping(weights()), {}, id="overlapping"),
        pytest.param(lambda: weights(b=float("nan")), {}, id="NaN"),
        pytest.param(lambda: weights(width=9), {}, id="wrong shape"),
        pytest.param(weights, {"r": 0}, id="rank 0"),
        pytest.param(lambda: weights(16), {"r": 16}, id="rank above the limit"),
        pytest.param(weights, {"use_dora_twice": True}, id="unknown option"),
        pytest.param(lambda: weights(b=0.0), {}, id="without effect"),
        pytest.param(lambda: b"", {}, id="empty"),
    ],
)
async def test_invalid_adapters_leave_no_file_and_no_row(
    house: House, data: Callable[[], bytes], config: dict[str, Any]
) -> None:
    response = await upload(house, data(), **config)
    error = response.json()["error"]
    assert response.status_code == 422
    assert error["code"] == "invalid_adapter"
    assert error["details"]["violations"]
    assert list(house.uploads.iterdir()) == []
    assert house.store.digests() == []
    assert (await house.adapters.list(house.alice)).data == ()


async def test_expired_key(house: House, time: Time) -> None:
    issued = await house.keys.issue(
        house.alice, name="short", scopes=ALL_SCOPES, expires_at=time() + timedelta(hours=1)
    )
    assert (await chat(house, issued.raw, BASE)).status_code == 200
    time.advance(hours=2)
    response = await chat(house, issued.raw, BASE)
    assert response.status_code == 401
    assert response.json()["error"]["code"] == "invalid_api_key"
    assert "expired" in response.json()["error"]["message"]


async def test_revoked_key(house: House) -> None:
    issued = await house.keys.issue(house.alice, name="short", scopes=ALL_SCOPES)
    assert (await chat(house, issued.raw, BASE)).status_code == 200
    await house.keys.revoke(issued.record.id)
    assert (await chat(house, issued.raw, BASE)).status_code == 401


@pytest.mark.parametrize("change", [lambda raw: raw[:-1], lambda raw: raw + "a", lambda raw: raw[:-4] + "aaaa"])
async def test_mangled_keys(house: House, change: Callable[[str], str]) -> None:
    assert (await chat(house, change(house.alices_key), BASE)).status_code == 401


@pytest.mark.parametrize("name", ["poet", "poet@1", "../poet", "a" * 300, "x'--", "\x00"])
async def test_hostile_names_are_just_unknown(house: House, name: str) -> None:
    """Nothing of a stranger's text reaches SQL or the file system."""
    async with house.client() as client:
        for path in ("/v1/models", "/v1/adapters", "/v1/files"):
            response = await client.get(f"{path}/{quote(name, safe='')}")
            assert response.status_code == 404
