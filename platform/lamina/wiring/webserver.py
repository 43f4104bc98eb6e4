"""The web server in the supervisor's process."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

__all__ = ["WebServer"]


_MAX_HEAD_BYTES = 64 * 1024


class _BoundedHttp(HttpToolsProtocol):
    """httptools sets no limit on a request's line and headers, so one client could fill the memory with them.

    A head that is not complete after 64 KiB is answered 400 and the connection closed.
    """

    _in_head = True
    _head_bytes = 0

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._in_head and self._head_bytes > _MAX_HEAD_BYTES:
            self.send_400_response(f"Request line and headers exceed {_MAX_HEAD_BYTES} bytes.")

    def on_headers_complete(self) -> None:
        self._in_head = False
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_head, self._head_bytes = True, 0
        super().on_message_complete()


class WebServer(uvicorn.Server):
    """uvicorn without its signal handlers: the supervisor decides when to stop."""

    def __init__(self, app: FastAPI, *, grace_s: float) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=_BoundedHttp,
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
