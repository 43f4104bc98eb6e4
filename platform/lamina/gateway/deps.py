"""What the gateway stands on. All of it is passed in: twins by tests, the real things by wiring."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Protocol

from fastapi import Depends, Request

from lamina.config import GatewayConfig
from lamina.engine.protocol import EngineClient
from lamina.gateway.codec import TextCodec
from lamina.gateway.metrics import GatewayMetrics
from lamina.gateway.pending import PendingUploads
from lamina.tenancy.operator import OperatorDoor
from lamina.tenancy.principal import Principal
from lamina.tenancy.records import AdapterRecord, DeletedAdapters, Page, PinEntry
from lamina.types import PinOrder, PinRecord, PinState, QuotaPolicy, TierSize

__all__ = ["Adapters", "Deps", "GatewayDeps", "Keys", "Pins", "Quotas"]


class Keys(Protocol):
    """What the gateway needs of `lamina.tenancy.keys`."""

    async def authenticate(self, raw: str) -> Principal:
        """Raises Unauthenticated."""
        ...


class Adapters(Protocol):
    """What the gateway needs of `lamina.tenancy.adapters`. A foreign adapter is like a missing one."""

    async def resolve(self, tenant_id: str, model_name: str) -> AdapterRecord:
        """Raises ModelNotFound."""
        ...

    async def intake(self, tenant_id: str, *, name: str, folder: Path) -> AdapterRecord:
        """Validates and publishes the PEFT folder. Raises InvalidAdapter, InvalidRequest, Conflict."""
        ...

    async def list(self, tenant_id: str, *, after: str | None = None, limit: int = 20) -> Page[AdapterRecord]: ...

    async def get(self, tenant_id: str, name_or_id: str) -> AdapterRecord:
        """Raises NotFound."""
        ...

    async def delete(self, tenant_id: str, name_or_id: str) -> DeletedAdapters:
        """Raises NotFound."""
        ...

    async def unowned(self, digests: Collection[str]) -> tuple[str, ...]:
        """Those that no tenant has any more."""
        ...


class Quotas(Protocol):
    """What the gateway needs of `lamina.tenancy.quotas`."""

    async def policies(self) -> tuple[QuotaPolicy, ...]:
        """What the engine has to know."""
        ...

    async def note_pool(
        self,
        *,
        capacity_blocks: int,
        coverable_blocks: int,
        block_bytes: int,
        block_tokens: int,
        host: TierSize | None = None,
        store: TierSize | None = None,
    ) -> None:
        """How large the engine's pool is, and the tiers below."""
        ...

    async def deleted(self, namespaces: frozenset[str]) -> frozenset[str]:
        """Those of these that no tenant has, or not any more."""
        ...

    async def tenants_of(self, namespaces: frozenset[str]) -> dict[str, str]:
        """Tenants' ids by namespace; unknown ones are left out."""
        ...


class Pins(Protocol):
    """What the gateway needs of `lamina.tenancy.pins`. A foreign or expired pin is like a missing one."""

    async def add(
        self, tenant_id: str, *, model: str, model_digest: str, order: PinOrder, pin: PinState, block_tokens: int
    ) -> PinEntry:
        """Raises LimitExceeded."""
        ...

    async def get(self, tenant_id: str, pin_id: str) -> PinEntry:
        """Raises NotFound."""
        ...

    async def list(self, tenant_id: str) -> tuple[PinEntry, ...]: ...

    async def update(self, tenant_id: str, pin: PinState) -> PinEntry:
        """Raises NotFound."""
        ...

    async def remove(self, tenant_id: str, pin_id: str) -> None:
        """Raises NotFound."""
        ...

    async def alive(self, model_digest: str) -> frozenset[str]: ...

    async def records(self, pin_ids: Collection[str]) -> tuple[PinRecord, ...]: ...

    async def note(self, pins: Sequence[PinState]) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayDeps:
    """Everything a gateway works with; constant while it runs."""

    engine: EngineClient
    tokenizer: TextCodec
    keys: Keys
    adapters: Adapters
    quotas: Quotas
    pins: Pins
    operator: OperatorDoor
    config: GatewayConfig
    base_model: str  # its public name
    uploads: Path  # staging for adapter uploads; created if missing, on the adapter store's file system
    created: int  # Unix seconds; /v1/models reports it for the base model
    metrics: GatewayMetrics = field(default_factory=GatewayMetrics)
    pending: PendingUploads = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "pending", PendingUploads(self.uploads, max_bytes=self.config.max_upload_bytes))


async def _deps(request: Request) -> GatewayDeps:
    # async, or FastAPI would run it in a worker thread
    deps: GatewayDeps = request.app.state.deps
    return deps


Deps = Annotated[GatewayDeps, Depends(_deps)]
