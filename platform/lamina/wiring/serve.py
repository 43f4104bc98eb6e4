"""`lamina serve`: engine process, gateway, and the order in which they start and stop.

take the port -> find the model -> start the engine process
  -> meanwhile: import the gateway, migrate, seed the demo, accept connections (503 until the engine is ready)
stop: no new connections -> running requests finish or are cancelled -> the engine saves blocks to the store, if there
  is one that stays -> end the engine -> remove the socket
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvloop

from lamina.config import EngineConfig
from lamina.engine.client import ZmqEngineClient
from lamina.errors import EngineUnavailable
from lamina.wiring.address import announced
from lamina.wiring.demo import DemoAccess, demo_adapters, seed_demo
from lamina.wiring.launch import Launch
from lamina.wiring.listener import base_url, listen
from lamina.wiring.process import ENGINE_COMMAND, EngineProcess
from lamina.wiring.runtime import runtime_directory
from lamina.wiring.settings import Settings
from lamina.wiring.store import embedded_store
from lamina.wiring.supervisor import EngineSupervisor

if TYPE_CHECKING:
    from fastapi import FastAPI

    from lamina.tenancy.records import Reconciliation

__all__ = ["serve"]

EXIT_FORCED = 130

_log = logging.getLogger(__name__)

_ENGINE_END_S = 5.0  # for an engine that is told to stop, beside what it has for saving blocks
_FAREWELL_S = 2.0  # for the last bytes of requests that the grace time did not suffice for

# This process tokenizes and copies bytes; cores are the engine's. Read when the libraries are loaded.
_FEW_THREADS = {"TOKENIZERS_PARALLELISM": "false", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}


def serve(
    settings: Settings,
    *,
    demo: bool,
    find_model: Callable[[], Path],
    say: Callable[[str], None],
    engine_command: Sequence[str] = ENGINE_COMMAND,
) -> None:
    """Blocks until SIGINT or SIGTERM, then stops everything; a second signal stops it at once.

    `find_model` returns the local folder of the model and may take long; `say` shows a text to the user.
    Raises LaminaError if it cannot start, or the engine cannot.
    """
    started = time.monotonic()
    adapters = demo_adapters() if demo else None
    with (
        _terminable(),
        listen(settings.host, settings.port) as listener,
        announced(settings.home, base_url(listener)),
    ):
        engine = settings.engine(find_model())
        with embedded_store(engine) as engine, runtime_directory() as runtime:
            client = ZmqEngineClient(f"ipc://{runtime / 'engine'}")
            spawn = partial(_spawn, engine_command, dict(os.environ), client.address, engine, settings.log_level)
            supervisor = EngineSupervisor(client, spawn, stop_grace_s=_engine_grace_s(engine))
            house = _House(
                settings=settings,
                engine=engine,
                client=client,
                supervisor=supervisor,
                listener=listener,
                runtime=runtime,
                demo=adapters,
                say=say,
                started=started,
            )
            try:
                _leave_cores_to_the_engine()
                with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                    runner.run(house.run())
            finally:
                supervisor.kill()


def _leave_cores_to_the_engine() -> None:
    for name, value in _FEW_THREADS.items():
        os.environ.setdefault(name, value)


@dataclass(slots=True, kw_only=True)
class _House:
    settings: Settings
    engine: EngineConfig
    client: ZmqEngineClient
    supervisor: EngineSupervisor
    listener: socket.socket
    runtime: Path
    demo: Path | None  # the demo's adapters, if it is wanted
    say: Callable[[str], None]
    started: float

    async def run(self) -> None:
        """Until a signal, or until something that must run does not."""
        stop = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal, stop)
        async with self._supervised() as watching:
            operating = asyncio.create_task(self._operate())
            try:
                await _first_of(watching, operating, asyncio.create_task(stop.wait()))
            finally:
                operating.cancel()
                await asyncio.gather(operating, return_exceptions=True)

    @asynccontextmanager
    async def _supervised(self) -> AsyncIterator[asyncio.Task[None]]:
        await self.client.start()
        watching = asyncio.create_task(self.supervisor.run())
        try:
            yield watching
        finally:
            await self.supervisor.stop()
            await asyncio.gather(watching, return_exceptions=True)
            await self.client.close()

    async def _operate(self) -> None:
        """Serves HTTP until cancelled, then ends gracefully."""
        # Imported here because it takes a second or two, in which the engine loads the model already.
        from lamina.wiring.gateway import build_gateway
        from lamina.wiring.services import open_services

        tenancy = self.settings.tenancy()
        async with open_services(tenancy, self.engine) as services:
            _report(await services.adapters.reconcile())  # a crash may have left files that no row owns
            access = await seed_demo(services, home=tenancy.home, adapters=self.demo) if self.demo else []
            app = await build_gateway(
                self.client, services, gateway=self.settings.gateway(), tenancy=tenancy, engine=self.engine
            )
            await self._serve_http(app, access)

    async def _serve_http(self, app: FastAPI, access: Sequence[DemoAccess]) -> None:
        from lamina.wiring.webserver import WebServer

        server = WebServer(app, grace_s=self.settings.shutdown_grace_s + _FAREWELL_S)
        serving = asyncio.create_task(server.serve(sockets=[self.listener]))
        try:
            await _first_of(serving, asyncio.create_task(self._greet(access)))
            await _first_of(serving)
            raise EngineUnavailable("The web server ended by itself; the log says why.")
        finally:
            server.stop()
            await asyncio.wait({serving}, timeout=self.settings.shutdown_grace_s)
            self.client.end_requests("The server is shutting down; retry shortly.")  # said, not just cut
            await serving

    async def _greet(self, access: Sequence[DemoAccess]) -> None:
        from lamina.wiring.greeting import greeting

        info = await self.client.wait_ready()
        seconds = time.monotonic() - self.started
        self.say(greeting(base_url(self.listener), info, access, seconds=seconds))

    def _on_signal(self, stop: asyncio.Event) -> None:
        if stop.is_set():
            self.supervisor.kill()
            shutil.rmtree(self.runtime, ignore_errors=True)
            os._exit(EXIT_FORCED)  # whatever did not stop in time will not now
        self.say(
            f"Stopping: running requests get {self.settings.shutdown_grace_s:g} s to finish; "
            "Ctrl-C again ends them now."
        )
        stop.set()


def _engine_grace_s(engine: EngineConfig) -> float:
    return _ENGINE_END_S + (engine.kv_store_drain_s if engine.kv_store_url else 0.0)


def _spawn(
    command: Sequence[str],
    environment: Mapping[str, str],
    address: str,
    engine: EngineConfig,
    log_level: str,
    identity: bytes,
) -> EngineProcess:
    launch = Launch(address=address, identity=identity, parent=os.getpid(), config=engine, log_level=log_level)
    return EngineProcess(launch, command, environment)


async def _first_of(*tasks: asyncio.Task[Any]) -> None:
    """Waits for one of them, and raises what it raised."""
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()


@contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM unwinds the stack until the event loop takes over, as SIGINT does by itself."""

    def terminated(*_: object) -> None:
        raise SystemExit(128 + signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, terminated)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _report(found: Reconciliation) -> None:
    if found.removed_digests:
        _log.warning("removed %d adapter folders that no tenant owns", len(found.removed_digests))
    for record in found.missing:
        _log.error("the files of adapter %s (%s, version %d) are missing", record.id, record.name, record.version)
