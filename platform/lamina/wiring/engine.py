"""The engine process: `python -m lamina.wiring.engine`, started by the supervisor only."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
from collections.abc import Callable

from lamina.config import EngineConfig
from lamina.engine.link import Link, Pulse
from lamina.engine.server import Core, EngineServer
from lamina.errors import LaminaError
from lamina.wiring.launch import Launch

__all__ = ["EXIT_FATAL", "EXIT_REFUSED", "run_engine"]

EXIT_FATAL = 70  # the core failed in a way that ends the process (sysexits.h: EX_SOFTWARE)
EXIT_REFUSED = 78  # it could not start, and would not the next time either (EX_CONFIG)

_PR_SET_PDEATHSIG = 1

_log = logging.getLogger("lamina.engine")


def run_engine(build: Callable[[EngineConfig], Core], launch: Launch) -> int:
    """Builds a core and serves it until told to stop; the process's exit status. Main thread only.

    Nothing here outlives the supervisor: the core holds no state that another process would miss, so the
    kernel kills it together with its parent.
    """
    _die_with_parent(launch.parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the supervisor's to interpret
    pulse = Pulse(
        launch.address,
        launch.identity,
        interval_s=launch.heartbeat_s,
        parent=launch.parent,
        on_orphaned=_die,
    )
    pulse.start()
    try:
        core = build(launch.config)
    except LaminaError as error:
        _log.error("the engine cannot start: %s", error.message)
        return EXIT_REFUSED
    return _serve(core, Link(launch.address, launch.identity), pulse)


def main() -> int:
    """Reads the launch order from standard input."""
    launch = Launch.from_json(sys.stdin.buffer.read())
    _set_up_logging(launch.log_level)
    if launch.config.threads is not None:  # OpenMP reads it when torch is loaded
        os.environ["OMP_NUM_THREADS"] = str(launch.config.threads)
    from lamina.wiring.core import build_core  # loads torch

    return run_engine(build_core, launch)


def _serve(core: Core, link: Link, pulse: Pulse) -> int:
    server = EngineServer(core, link, pulse)
    signal.signal(signal.SIGTERM, lambda *_: server.stop())
    link.wake_on_signals()
    try:
        server.run()
        pulse.turned(busy=False)  # how long it may take to close is said by whoever stops this process
        core.close()
    except Exception:  # noqa: BLE001 - the last stop before the process ends
        _log.critical("the engine core failed; the process ends", exc_info=True)
        return EXIT_FATAL
    finally:
        link.close()
        pulse.end()
    return 0


def _die_with_parent(parent: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the call above
        _die()


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _set_up_logging(level: str) -> None:
    logging.basicConfig(level=level, format="%(asctime)s engine %(levelname)s %(name)s: %(message)s")


if __name__ == "__main__":
    sys.exit(main())
