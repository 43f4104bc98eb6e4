"""The web server in the supervisor's process."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI

__all__ = ["WebServer"]


class WebServer(uvicorn.Server):
    """uvicorn without its signal handlers: the supervisor decides when to stop."""

    def __init__(self, app: FastAPI, *, grace_s: float) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,  # `wiring.logs` has set it up
                access_log=False,  # the gateway's own middleware logs each request
                server_header=False,
                timeout_keep_alive=75,  # longer than clients keep theirs, or a request could meet a closing door
                timeout_graceful_shutdown=math.ceil(grace_s),
            )
        )

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def stop(self) -> None:
        """Ends `serve`: no new connections, running requests get the grace time and are then cancelled."""
        self.should_exit = True
