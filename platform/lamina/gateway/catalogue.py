"""Adapters as several routes need them."""

from __future__ import annotations

import structlog

from lamina.errors import LaminaError, NotFound
from lamina.gateway.deps import GatewayDeps
from lamina.tenancy.records import AdapterRecord, AdapterStatus

__all__ = ["every", "find", "remove"]

log = structlog.get_logger(__name__)

PAGE = 100


async def find(deps: GatewayDeps, tenant_id: str, name_or_id: str) -> AdapterRecord:
    """Raises NotFound, for a retired adapter too."""
    record = await deps.adapters.get(tenant_id, name_or_id)
    if record.status is AdapterStatus.RETIRED:
        raise NotFound(f"The adapter {name_or_id!r} was deleted.")
    return record


async def remove(deps: GatewayDeps, tenant_id: str, name_or_id: str) -> None:
    """Retires the adapter; what nobody uses any more leaves the engine too. Raises NotFound."""
    deleted = await deps.adapters.delete(tenant_id, name_or_id)
    for digest in deleted.removed_digests:
        try:
            await deps.engine.unload_adapter(digest)
        except LaminaError as exc:
            # It is deleted all the same: an engine that is down has nothing loaded, and unused ones age out.
            log.warning("engine did not unload a deleted adapter", digest=digest, code=exc.code)


async def every(deps: GatewayDeps, tenant_id: str) -> list[AdapterRecord]:
    """The latest version of each adapter, by name."""
    latest: dict[str, AdapterRecord] = {}
    after: str | None = None
    while True:
        page = await deps.adapters.list(tenant_id, after=after, limit=PAGE)
        for record in page.data:
            known = latest.get(record.name)
            if known is None or record.version > known.version:
                latest[record.name] = record
        if not page.has_more:
            return sorted(latest.values(), key=lambda record: record.name)
        after = page.last_id
