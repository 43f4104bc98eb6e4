"""Tenants, keys, adapters, quotas and pins over one database and one base model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from lamina.config import EngineConfig, TenancyConfig
from lamina.models.config import ModelConfig
from lamina.tenancy import migrate
from lamina.tenancy.adapters import AdapterService
from lamina.tenancy.database import Database
from lamina.tenancy.keys import KeyService
from lamina.tenancy.lora_intake import LoraIntake
from lamina.tenancy.operator import OperatorDoor
from lamina.tenancy.pins import PinService
from lamina.tenancy.quotas import QuotaService
from lamina.tenancy.secret import load_or_create_secret
from lamina.tenancy.tenants import TenantService
from lamina_lora.store import AdapterStore

__all__ = ["Services", "open_services"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """Closed by whoever opened them."""

    tenants: TenantService
    keys: KeyService
    adapters: AdapterService
    quotas: QuotaService
    pins: PinService
    operator: OperatorDoor


@asynccontextmanager
async def open_services(config: TenancyConfig, engine: EngineConfig) -> AsyncIterator[Services]:
    """Migrates the database first. Raises ConfigurationInvalid, DatabaseUnavailable, UnsupportedModel."""
    config.home.mkdir(parents=True, exist_ok=True, mode=0o700)
    secret = load_or_create_secret(config.secret_file)
    await migrate.upgrade(config.database_url)
    database = Database.open(config.database_url)
    try:
        keys = KeyService(database=database, secret=secret, environment=config.environment)
        adapters = AdapterService(
            database=database,
            intake=await asyncio.to_thread(_intake, engine),
            base_model=engine.name,
            max_adapters_per_tenant=config.max_adapters_per_tenant,
        )
        try:
            yield Services(
                tenants=TenantService(database=database),
                keys=keys,
                adapters=adapters,
                quotas=QuotaService(database=database, secret=secret),
                pins=PinService(database=database, secret=secret, max_pins=config.max_pins_per_tenant),
                operator=OperatorDoor(secret),
            )
        finally:
            await keys.close()
    finally:
        await database.close()


def _intake(engine: EngineConfig) -> LoraIntake:
    geometry = ModelConfig.from_folder(engine.model).geometry()
    return LoraIntake(store=AdapterStore(engine.adapters), geometry=geometry, max_rank=engine.max_lora_rank)
