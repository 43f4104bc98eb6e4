"""Keeps the engine's quotas and pins as the database has them.

The database is what is wanted; an engine forgets everything when it restarts, and the command line tells no server what
it changed. So this looks every few seconds, and at once when an engine has started:

    policies differ from what was set     set them all; an engine that cannot cover them keeps the ones it has, and is
                                          asked again each time: a store may grow, or come back
    a pin is not in the engine            restore it (unless it just was not covered)
    a pin is in the engine only           end it, once it is old enough that its row cannot be on its way
    hits                                  written back, so that what was refreshed survives a restart
    a tenant is gone                      erase what it left in the engine and below
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress

import structlog

from lamina.errors import InvalidRequest, LaminaError, NotFound, QuotaNotCoverable
from lamina.gateway.deps import GatewayDeps
from lamina.types import CommonsReport, PinState, QuotaPolicy

__all__ = ["PolicyKeeper"]

log = structlog.get_logger(__name__)

_TICK_S = 0.1  # how soon a new engine is noticed
_ORPHAN_AGE_S = 30.0
_SWEEP_S = 60.0  # between removals of expired rows


class PolicyKeeper:
    """One per gateway."""

    def __init__(self, deps: GatewayDeps) -> None:
        self._deps = deps
        self._generation = 0  # of the engine that was told last
        self._policies: tuple[QuotaPolicy, ...] | None = None  # what it took over; None: nothing, or not the latest
        self._refusal = ""  # why not, as it was logged
        self._uncovered: set[str] = set()  # pins that this engine did not take under these policies
        self._noted: dict[str, int] = {}  # hits by pin, as the database has them
        self._swept_at = 0.0
        self._sizes: tuple[object, ...] = ()  # of the tiers, as the database has them
        self._seen: frozenset[str] = frozenset()  # namespaces that had blocks in an engine, unless erased since

    async def run(self) -> None:
        """Until cancelled. A failed round is logged, and the next one tries again."""
        while True:
            try:
                await self.round()
            except LaminaError as exc:
                log.warning("quotas and pins were not brought up to date", code=exc.code, reason=exc.message)
            except Exception:
                log.exception("keeping quotas and pins failed")
            await self._pause()

    async def round(self) -> None:
        """Makes the engine agree with the database, once. Does nothing while there is no engine."""
        engine = self._deps.engine
        if not engine.ready:
            return
        await self._set_quotas(engine.generation)
        started = time.time()
        report = await engine.commons()
        await self._describe_pool(report)
        await self._erase_deleted(report)
        if not report.loaded:
            return
        await self._note(report.pins)
        alive = await self._deps.pins.alive(engine.info.model_digest)
        await self._end_orphans([pin for pin in report.pins if pin.pin_id not in alive], started)
        await self._restore(alive - {pin.pin_id for pin in report.pins} - self._uncovered)

    async def _pause(self) -> None:
        until = time.monotonic() + self._deps.config.policy_poll_s
        while time.monotonic() < until:
            await asyncio.sleep(_TICK_S)
            if self._deps.engine.ready and self._deps.engine.generation != self._generation:
                return

    async def _set_quotas(self, generation: int) -> None:
        policies = await self._deps.quotas.policies()
        if (generation, policies) == (self._generation, self._policies):
            return
        engine = self._deps.engine
        if generation != self._generation:
            self._sizes = ()
            await self._describe_pool(await engine.commons())
            self._refusal = ""
            self._uncovered.clear()
        self._generation, self._policies = generation, None
        try:
            await engine.set_quotas(policies)
        except (QuotaNotCoverable, InvalidRequest) as exc:
            if exc.message != self._refusal:
                log.error("the engine cannot keep the quotas; it goes on with those that it has", reason=exc.message)
                self._refusal = exc.message
            return
        self._policies, self._refusal = policies, ""
        self._uncovered.clear()

    async def _describe_pool(self, report: CommonsReport) -> None:
        """An engine's own memory is what it is, but how large a store is may be known only later."""
        info = self._deps.engine.info
        sizes = (report.capacity, report.coverable, info.block_bytes, info.block_size, report.host, report.store)
        if sizes != self._sizes:
            await self._deps.quotas.note_pool(
                capacity_blocks=report.capacity,
                coverable_blocks=report.coverable,
                block_bytes=info.block_bytes,
                block_tokens=info.block_size,
                host=report.host,
                store=report.store,
            )
            self._sizes = sizes

    async def _erase_deleted(self, report: CommonsReport) -> None:
        """Also of those that have blocks in the store only, if they ever had some here.

        The report is the older one: who has blocks in it had its row before, so without one it was deleted.
        """
        self._seen |= _present(report)
        for namespace in sorted(await self._deps.quotas.deleted(self._seen)):
            log.info("erasing the blocks of a deleted tenant", namespace=namespace)
            await self._deps.engine.erase_namespace(namespace)
            self._seen -= {namespace}

    async def _note(self, pins: tuple[PinState, ...]) -> None:
        used = [pin for pin in pins if pin.hits > self._noted.get(pin.pin_id, 0)]
        due = time.monotonic() - self._swept_at > _SWEEP_S
        if used or due:
            await self._deps.pins.note(used)
            self._noted = {pin.pin_id: pin.hits for pin in pins}
            self._swept_at = time.monotonic()

    async def _end_orphans(self, pins: list[PinState], now: float) -> None:
        for pin in pins:
            if pin.created_at < now - _ORPHAN_AGE_S:
                with suppress(NotFound):
                    await self._deps.engine.unpin(pin.namespace, pin.pin_id)

    async def _restore(self, missing: frozenset[str]) -> None:
        if not missing:
            return
        restored = await self._deps.engine.restore_pins(await self._deps.pins.records(missing))
        log.info("pins restored", wanted=len(missing), restored=len(restored))
        self._uncovered |= missing - {pin.pin_id for pin in restored}


def _present(report: CommonsReport) -> frozenset[str]:
    """Namespaces with blocks or pins in the engine. What is only in the store may be of others that share it."""
    blocks = {t.namespace for t in report.tenants if t.active + t.cached + t.pinned + t.pending + t.host_bytes}
    return frozenset(blocks | {pin.namespace for pin in report.pins})
