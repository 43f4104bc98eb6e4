"""Around every request: an id, a clock, a key, a cap on the body, counters, an error body for whatever fails.

Plain ASGI, because Starlette's BaseHTTPMiddleware hides a client's disconnect from the routes.
"""

from __future__ import annotations

import re
import time
import uuid
from typing import Any

import structlog
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lamina.errors import Unauthenticated
from lamina.gateway.auth import OPERATOR_PATHS, PUBLIC_PATHS, bearer_token
from lamina.gateway.deps import GatewayDeps
from lamina.gateway.disconnect import ClientGone
from lamina.gateway.errors import BodyTooLarge, respond

__all__ = ["Door"]

log = structlog.get_logger(__name__)

# These stream their body to disk under a cap of their own.
UPLOAD_PATHS = re.compile(r"/v1/(adapters|files|uploads/[^/]+/parts)")
CLIENT_CLOSED = 499  # nginx's word for it; only in metrics and logs
_HARMLESS = re.compile(r"[^A-Za-z0-9._:/+=-]")
MAX_CLIENT_ID_CHARS = 128


class Door:
    """Sets `request.state`: request_id, arrived (`time.perf_counter()`), principal (not on public paths)."""

    def __init__(self, app: ASGIApp, deps: GatewayDeps) -> None:
        self._app = app
        self._deps = deps

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        visit = _Visit(scope, send)
        with structlog.contextvars.bound_contextvars(request_id=visit.request_id, **visit.client_id):
            with self._deps.metrics.in_flight.track_inprogress():
                await self._serve(visit, scope, receive)
            self._deps.metrics.requests.labels(visit.route, str(visit.status)).inc()
            visit.log()

    async def _serve(self, visit: _Visit, scope: Scope, receive: Receive) -> None:
        try:
            if scope["path"] not in PUBLIC_PATHS:
                await self._admit(scope)
            await self._app(scope, self._capped(scope, receive), visit.send)
        except (ClientGone, ClientDisconnect):
            visit.status = CLIENT_CLOSED
        except Exception as exc:
            if visit.status:
                raise  # too late for an answer; the server closes the connection
            await respond(exc, Request(scope))(scope, receive, visit.send)

    async def _admit(self, scope: Scope) -> None:
        token, path = bearer_token(Headers(scope=scope)), scope["path"]
        if path.startswith(OPERATOR_PATHS):
            if not self._deps.operator.admits(token, path):
                raise Unauthenticated("This is for the operator's own command line: lamina kv.")
            return
        principal = await self._deps.keys.authenticate(token)
        scope["state"]["principal"] = principal
        structlog.contextvars.bind_contextvars(tenant=principal.tenant_id, key=principal.key_id)

    def _capped(self, scope: Scope, receive: Receive) -> Receive:
        if UPLOAD_PATHS.fullmatch(scope["path"]):
            return receive
        limit = self._deps.config.max_body_bytes
        declared = Headers(scope=scope).get("content-length", "")
        if declared.isdigit() and int(declared) > limit:
            raise BodyTooLarge(limit)
        return _counting(receive, limit)


def _counting(receive: Receive, limit: int) -> Receive:
    received = 0

    async def counted() -> Message:
        nonlocal received
        message = await receive()
        received += len(message.get("body", b""))
        if received > limit:
            raise BodyTooLarge(limit)
        return message

    return counted


class _Visit:
    """One request on its way through: what was sent so far, and the headers that every response carries."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self.status = 0  # until the response starts
        self.request_id = f"req_{uuid.uuid4().hex}"
        self._scope = scope
        self._send = send
        self._arrived = time.perf_counter()
        self._client_id = _harmless(Headers(scope=scope).get("x-client-request-id", ""))
        state = scope.setdefault("state", {})
        state["request_id"], state["arrived"] = self.request_id, self._arrived

    @property
    def client_id(self) -> dict[str, Any]:
        return {"client_request_id": self._client_id} if self._client_id else {}

    @property
    def route(self) -> str:
        """The template, for example "/v1/models/{model}", never a client's own text."""
        return getattr(self._scope.get("route"), "path", "unmatched")

    def log(self) -> None:
        """One line per request; probes and scrapes only when debugging."""
        note = log.debug if self._scope["path"] in PUBLIC_PATHS else log.info
        note(
            "request",
            method=self._scope["method"],
            path=self._scope["path"],
            status=self.status,
            ms=self._elapsed_ms(),
        )

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = MutableHeaders(scope=message)
            headers["x-request-id"] = self.request_id
            headers["openai-processing-ms"] = str(self._elapsed_ms())
            if self._client_id:
                headers["x-client-request-id"] = self._client_id
        await self._send(message)

    def _elapsed_ms(self) -> int:
        return round((time.perf_counter() - self._arrived) * 1000)


def _harmless(text: str) -> str:
    return _HARMLESS.sub("", text)[:MAX_CLIENT_ID_CHARS]
