"""What a gateway does now and then: removes what a crash left behind, unloads what nobody owns any more."""

from __future__ import annotations

import asyncio

import structlog

from lamina.errors import LaminaError
from lamina.gateway import staging
from lamina.gateway.deps import GatewayDeps

__all__ = ["keep_house", "sweep", "unload_unowned"]

log = structlog.get_logger(__name__)


async def keep_house(deps: GatewayDeps) -> None:
    """A round every `housekeeping_s` seconds, until cancelled. A failed one is logged, and the next one tries again."""
    while True:
        await asyncio.sleep(deps.config.housekeeping_s)
        try:
            await sweep(deps)
            await unload_unowned(deps)
        except LaminaError as exc:
            log.warning("housekeeping was cut short", code=exc.code, reason=exc.message)
        except Exception:
            log.exception("housekeeping failed")


async def sweep(deps: GatewayDeps) -> None:
    """Removes expired uploads and what killed gateways left of theirs."""
    await asyncio.to_thread(staging.sweep, deps.uploads)
    await asyncio.to_thread(deps.pending.sweep)


async def unload_unowned(deps: GatewayDeps) -> None:
    """Unloads adapters that were deleted without this gateway: by the command line, or by another gateway.

    Those that the engine knows, loaded or by blocks that they computed, are asked for first: one that is taken in
    meanwhile has its row before a request can load it.
    """
    if not deps.engine.ready:
        return
    stats = await deps.engine.stats()
    known = [adapter.digest for adapter in stats.adapters if adapter.loaded or adapter.blocks]
    for digest in await deps.adapters.unowned(known):
        log.info("unloading an adapter that was deleted", digest=digest)
        await deps.engine.unload_adapter(digest)
