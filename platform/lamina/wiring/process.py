"""One engine process, seen from its parent."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress

from lamina.wiring.launch import Launch

__all__ = ["ENGINE_COMMAND", "EngineProcess", "describe_exit"]

# OpenMP threads that wait by spinning take the core from the gateway, and from the thread that they wait for.
# Measured on 2 cores with one other busy process, one decode step: 115 ms passive, 1150 ms spinning (the default).
_DEFAULTS = {"OMP_WAIT_POLICY": "PASSIVE"}

ENGINE_COMMAND = (sys.executable, "-m", "lamina.wiring.engine")


class EngineProcess:
    """Started by the constructor, which needs no event loop: the model loads while the gateway imports.

    Start it from the main thread: on Linux the parent-death signal follows the thread that forked.
    """

    def __init__(
        self,
        launch: Launch,
        command: Sequence[str] = ENGINE_COMMAND,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`environment`: by default this process's own, as it is now."""
        self._child = subprocess.Popen(  # noqa: S603 - a fixed command
            command,
            stdin=subprocess.PIPE,
            env=_for_engine(os.environ if environment is None else environment),
            process_group=0,  # Ctrl-C in the terminal is the supervisor's to interpret
        )
        self._exit: asyncio.Future[int] | None = None
        assert self._child.stdin is not None
        with suppress(BrokenPipeError):  # it died at once; `wait` will tell
            self._child.stdin.write(launch.to_json())
            self._child.stdin.close()

    @property
    def pid(self) -> int:
        return self._child.pid

    async def wait(self) -> int:
        """The exit status, negative for a signal; noticed at once. Many tasks of one loop may wait."""
        if self._exit is None:
            loop = asyncio.get_running_loop()
            self._exit = loop.create_future()
            threading.Thread(target=self._reap, args=(loop, self._exit), name="reaper", daemon=True).start()
        return await asyncio.shield(self._exit)

    def terminate(self) -> None:
        """Asks it to end what runs and exit 0."""
        self._child.terminate()

    def kill(self) -> None:
        self._child.kill()

    async def stop(self, grace_s: float) -> int:
        """Terminates, and kills after `grace_s` seconds."""
        self.terminate()
        try:
            return await asyncio.wait_for(self.wait(), grace_s)
        except TimeoutError:
            self.kill()
            return await self.wait()

    def _reap(self, loop: asyncio.AbstractEventLoop, exited: asyncio.Future[int]) -> None:
        status = self._child.wait()
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(exited.set_result, status)


def describe_exit(status: int) -> str:
    """For people: `exit status 70`, `killed by signal 9`."""
    return f"killed by signal {-status}" if status < 0 else f"exit status {status}"


def _for_engine(environment: Mapping[str, str]) -> dict[str, str]:
    # The engine gets all it needs in its launch order. Database URLs and the like are none of its business.
    return _DEFAULTS | {name: value for name, value in environment.items() if not name.startswith("LAMINA_")}
