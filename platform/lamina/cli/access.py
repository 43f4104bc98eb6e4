"""What the commands on tenants, keys, adapters and quotas share: open the services, do one thing, close them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

# The services load sqlalchemy and alembic: only when a command runs, so that `--help` answers at once.
if TYPE_CHECKING:
    from lamina.tenancy.adapters import AdapterService
    from lamina.tenancy.catalog import AdapterCatalog
    from lamina.tenancy.database import Database
    from lamina.tenancy.keys import KeyService
    from lamina.tenancy.quotas import QuotaService
    from lamina.tenancy.tenants import TenantService
    from lamina.wiring.settings import Settings

__all__ = ["Access", "adapter_service", "run"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """The operator's way in: straight to the database and the files, no server needed."""

    settings: Settings
    secret: bytes = field(repr=False)
    database: Database
    tenants: TenantService
    keys: KeyService
    quotas: QuotaService
    catalog: AdapterCatalog  # adapters, without what it takes to add one


def run(work: Callable[[Access], Awaitable[T]]) -> T:
    """Runs one command. Raises LaminaError, which the root command turns into a line and an exit status."""

    async def opened() -> T:
        async with _open() as access:
            return await work(access)

    return asyncio.run(opened())


@asynccontextmanager
async def _open() -> AsyncIterator[Access]:
    from lamina.tenancy import migrate
    from lamina.tenancy.catalog import AdapterCatalog
    from lamina.tenancy.database import Database
    from lamina.tenancy.keys import KeyService
    from lamina.tenancy.lora_intake import LoraFiles
    from lamina.tenancy.quotas import QuotaService
    from lamina.tenancy.secret import load_or_create_secret
    from lamina.tenancy.tenants import TenantService
    from lamina.wiring.settings import load_settings
    from lamina_lora.store import AdapterStore

    settings = load_settings()
    config = settings.tenancy()
    secret = load_or_create_secret(config.secret_file)
    await migrate.upgrade(config.database_url)
    database = Database.open(config.database_url)
    files = LoraFiles(store=AdapterStore(config.adapters))
    keys = KeyService(database=database, secret=secret, environment=config.environment)
    try:
        yield Access(
            settings=settings,
            secret=secret,
            database=database,
            tenants=TenantService(database=database),
            keys=keys,
            quotas=QuotaService(database=database, secret=secret),
            catalog=AdapterCatalog(database=database, files=files, base_model=""),
        )
    finally:
        await database.close()


async def adapter_service(access: Access) -> AdapterService:
    """The service that can add adapters; fetches the base model if need be, since it judges what fits.

    Raises ModelFetchFailed, UnsupportedModel.
    """
    return await asyncio.to_thread(_adapter_service, access)


def _adapter_service(access: Access) -> AdapterService:
    from lamina.cli.progress import console_progress
    from lamina.models.config import ModelConfig
    from lamina.models.hub import resolve
    from lamina.tenancy.adapters import AdapterService
    from lamina.tenancy.lora_intake import LoraIntake
    from lamina_lora.store import AdapterStore

    settings = access.settings
    with console_progress() as progress:
        engine = settings.engine(resolve(settings.model, settings.cache, progress))
    geometry = ModelConfig.from_folder(engine.model).geometry()
    intake = LoraIntake(store=AdapterStore(engine.adapters), geometry=geometry, max_rank=engine.max_lora_rank)
    return AdapterService(
        database=access.database,
        intake=intake,
        base_model=engine.name,
        max_adapters_per_tenant=settings.tenancy().max_adapters_per_tenant,
    )
