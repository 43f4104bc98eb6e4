"""Keeps one engine process alive, and the client informed."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from lamina.engine.client import ZmqEngineClient
from lamina.errors import EngineUnavailable
from lamina.wiring.launch import new_identity
from lamina.wiring.process import EngineProcess, describe_exit

__all__ = ["Backoff", "EngineSupervisor"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """Doubling delays between restarts; a core that lived for `healthy_s` starts the series anew. Seconds."""

    first_s: float = 0.5
    limit_s: float = 30.0
    healthy_s: float = 60.0

    def delay_s(self, failures: int) -> float:
        """`failures` >= 1: deaths in a row, each within `healthy_s`."""
        return min(self.limit_s, self.first_s * 2.0 ** min(failures - 1, 32))


class EngineSupervisor:
    """`spawn(identity)` starts a core that will report to `client` under `identity`.

    `spawn` is called once by the constructor (no event loop needed yet); `run` restarts it until `stop`.
    """

    def __init__(
        self,
        client: ZmqEngineClient,
        spawn: Callable[[bytes], EngineProcess],
        *,
        backoff: Backoff | None = None,
        stop_grace_s: float = 5.0,
    ) -> None:
        self._client = client
        self._spawn = spawn
        self._backoff = backoff or Backoff()
        self._stop_grace_s = stop_grace_s
        self._stopping = asyncio.Event()
        self._load_s = 5.0  # how long a start takes; measured at each
        self._started_at = 0.0
        self._process = self._start()

    @property
    def pid(self) -> int:
        """Of the current engine process."""
        return self._process.pid

    async def run(self) -> None:
        """Returns after `stop`. Raises EngineUnavailable if the very first core ends before it is ready: then
        something is wrong that another try would not cure."""
        failures = 0
        was_ready = False
        while True:
            why, became_ready = await self._outlive(self._process)
            if self._stopping.is_set():
                return
            was_ready = was_ready or became_ready
            if not was_ready:
                raise EngineUnavailable(f"The engine stopped while starting ({why}); see its message above.")
            healthy = became_ready and time.monotonic() - self._started_at > self._backoff.healthy_s
            failures = 1 if healthy else failures + 1
            if await self._pause(failures, why):
                return
            self._process = self._start()

    async def stop(self) -> None:
        """Ends the core gracefully, by force after `stop_grace_s`. Safe to call twice."""
        self._stopping.set()
        status = await self._process.stop(self._stop_grace_s)
        self._client.core_lost(f"stopped, {describe_exit(status)}")

    def kill(self) -> None:
        """Ends the core now."""
        self._stopping.set()
        self._process.kill()

    def _start(self) -> EngineProcess:
        identity = new_identity()
        self._client.expect(identity)
        self._started_at = time.monotonic()
        return self._spawn(identity)

    async def _outlive(self, process: EngineProcess) -> tuple[str, bool]:
        """Waits for the core's death, or causes it when the client has lost it.

        Returns why it died and whether it ever was ready.
        """
        exited = asyncio.create_task(process.wait())
        lost = asyncio.create_task(self._client.wait_lost())
        ready = asyncio.create_task(self._note_ready())
        try:
            await asyncio.wait({exited, lost}, return_when=asyncio.FIRST_COMPLETED)
            process.kill()  # a core that the client has given up must not run on beside the next one
            status = await exited
        finally:
            for task in (exited, lost, ready):
                task.cancel()
        why = f"{lost.result()}, {describe_exit(status)}" if _has_result(lost) else describe_exit(status)
        return why, _has_result(ready)

    async def _note_ready(self) -> None:
        await self._client.wait_ready()
        self._load_s = time.monotonic() - self._started_at
        _log.info("the engine core is ready after %.1f s", self._load_s)

    async def _pause(self, failures: int, why: str) -> bool:
        """True: told to stop meanwhile."""
        delay_s = self._backoff.delay_s(failures)
        self._client.core_lost(why, retry_after_s=delay_s + self._load_s)
        _log.error("the engine core died (%s); restarting in %.1f s", why, delay_s)
        with suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), delay_s)
        return self._stopping.is_set()


def _has_result(task: asyncio.Task[object]) -> bool:
    return task.done() and not task.cancelled()
