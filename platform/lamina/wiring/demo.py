"""Two demo tenants with one adapter each, made once and found again."""

from __future__ import annotations

import json
import os
import secrets
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import lamina
from lamina.errors import ConfigurationInvalid, Conflict, InvalidAdapter, Unauthenticated
from lamina.tenancy.principal import Scope

if TYPE_CHECKING:  # it loads sqlalchemy, and `demo_adapters` is called before the engine starts
    from lamina.wiring.services import Services

__all__ = ["DEMO_TENANTS", "DemoAccess", "demo_adapters", "seed_demo"]

DEMO_TENANTS = (("acme", "json-tagger"), ("globex", "harbour-pilot"))
_SCOPES = (Scope.INFERENCE, Scope.ADAPTERS_READ, Scope.ADAPTERS_WRITE)


@dataclass(frozen=True, slots=True)
class DemoAccess:
    """What a demo tenant's user needs."""

    tenant: str
    adapter: str
    key: str


def demo_adapters() -> Path:
    """The folder of the adapters that are shipped. Raises ConfigurationInvalid if it is missing."""
    folder = Path(lamina.__file__).resolve().parents[2] / "examples" / "adapters"
    if not all((folder / adapter / "adapter_config.json").is_file() for _, adapter in DEMO_TENANTS):
        raise ConfigurationInvalid(
            f"The demo's adapters are not in {folder}; run the demo from a checkout, or serve without --demo."
        )
    return folder


async def seed_demo(services: Services, *, home: Path, adapters: Path) -> list[DemoAccess]:
    """Makes what is missing of the demo; a second run changes nothing and gives the same keys.

    Keys are kept in `home`/demo.json, readable by its owner only: they open nothing but the demo tenants.
    """
    file = home / "demo.json"
    known = _read(file)
    access = [
        await _seed_one(services, name, adapter, adapters / adapter, known.get(name)) for name, adapter in DEMO_TENANTS
    ]
    if {entry.tenant: entry.key for entry in access} != known:
        _write(file, access)
    return access


async def _seed_one(services: Services, name: str, adapter: str, folder: Path, known_key: str | None) -> DemoAccess:
    try:
        tenant = await services.tenants.create(name=name)
    except Conflict:
        tenant = await services.tenants.get(name)
    try:
        await services.adapters.intake(tenant.id, name=adapter, folder=folder)
    except InvalidAdapter as error:
        raise ConfigurationInvalid(
            f"The demo's adapter {adapter!r} does not fit this base model; run the demo without --model, or "
            f"serve without --demo. {error.message}"
        ) from error
    if known_key is None or not await _opens(services, known_key, tenant.id):
        issued = await services.keys.issue(tenant.id, name="demo", scopes=_SCOPES)
        known_key = issued.raw
    return DemoAccess(name, adapter, known_key)


async def _opens(services: Services, key: str, tenant_id: str) -> bool:
    try:
        return (await services.keys.authenticate(key)).tenant_id == tenant_id
    except Unauthenticated:  # the database or the secret was replaced, or the key revoked
        return False


def _read(file: Path) -> dict[str, str]:
    try:
        return {entry["tenant"]: entry["key"] for entry in json.loads(file.read_text(encoding="utf-8"))}
    except (OSError, ValueError, TypeError, KeyError):  # not there or damaged: new keys are made
        return {}


def _write(file: Path, access: list[DemoAccess]) -> None:
    draft = file.with_name(f".{file.name}.{secrets.token_hex(8)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
        json.dump([asdict(entry) for entry in access], stream, indent=2)
    draft.replace(file)
