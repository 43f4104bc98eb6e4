"""The one table from exception class to HTTP status, and OpenAI's error body."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

import structlog
from fastapi import Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from lamina import errors as e

__all__ = ["STATUS", "BodyTooLarge", "Problem", "describe", "respond", "validation_problem"]

log = structlog.get_logger(__name__)

# Looked up along the class's method resolution order: the most specific entry wins.
STATUS: dict[type[e.LaminaError], tuple[int, str]] = {
    e.InvalidRequest: (400, "invalid_request_error"),
    e.Unauthenticated: (401, "authentication_error"),
    e.PermissionDenied: (403, "permission_error"),
    e.NotFound: (404, "invalid_request_error"),
    e.Conflict: (409, "invalid_request_error"),
    e.TooLarge: (413, "invalid_request_error"),
    e.InvalidAdapter: (422, "invalid_request_error"),
    e.LimitExceeded: (429, "rate_limit_error"),
    e.EngineOverloaded: (503, "overloaded_error"),
    e.EngineUnavailable: (503, "server_error"),
    e.DatabaseUnavailable: (503, "server_error"),
    e.LaminaError: (500, "server_error"),
}

# Facts that a client may act upon, beside the message. Absent attributes are left out.
DETAILS = ("limit", "need", "have", "reason", "prompt", "completion", "limit_bytes", "violations", "scope", "decision")

HTTP_CODES = {
    400: "invalid_request",
    404: "unknown_url",
    405: "method_not_allowed",
    413: "too_large",
    415: "unsupported_media_type",
}
DEFAULT_RETRY_S = 1.0


@dataclass(frozen=True, slots=True)
class Problem:
    """An error as the client sees it."""

    status: int
    error: dict[str, Any]
    headers: dict[str, str]

    @property
    def body(self) -> dict[str, Any]:
        return {"error": self.error}


class BodyTooLarge(HTTPException):
    """Raised while a body is received. An HTTPException, because FastAPI makes a 400 of all others there."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        super().__init__(413, f"The request body exceeds the limit of {limit_bytes} bytes.")


def describe(exc: BaseException, request_id: str) -> Problem:
    """What to tell the client about `exc`. Unknown errors and 500s are logged here and hidden from it."""
    if isinstance(exc, RequestValidationError):
        exc = validation_problem(exc)
    if isinstance(exc, HTTPException):
        return _http_problem(exc)
    if isinstance(exc, e.LaminaError):
        return _lamina_problem(exc, request_id)
    log.error("unhandled error", request_id=request_id, exc_info=exc)
    return Problem(500, _error(_hidden(request_id), "server_error", "internal_error"), {})


def respond(exc: BaseException, request: Request) -> Response:
    """The response for `exc`, before the first byte."""
    problem = describe(exc, request.state.request_id)
    body = json.dumps(problem.body)  # ASCII: a client's own text may come back in it, half characters too
    return Response(body, problem.status, problem.headers, media_type="application/json")


def validation_problem(exc: RequestValidationError) -> e.InvalidRequest:
    """FastAPI's list of violations as one error that names the first culprit and counts the others."""
    found = exc.errors()
    first = found[0]
    if first["type"] == "json_invalid":
        reason, position = first.get("ctx", {}).get("error", "syntax error"), first["loc"][-1]
        return e.InvalidRequest(f"The body is not valid JSON: {reason} at character {position}.")
    param = _param(first, exc.body)
    if first["type"] == "extra_forbidden":
        return _unknown_parameter(param)
    if param is None:
        return e.InvalidRequest("The body must be a JSON object, sent with the header Content-Type: application/json.")
    # The branches of a union fail one by one, all at the same place.
    here = [each for each in found if _param(each, exc.body) == param]
    reasons = " or ".join(dict.fromkeys(each["msg"].removeprefix("Value error, ") for each in here))
    others = len(found) - len(here)
    more = f" ({others} more invalid value{'s' if others > 1 else ''})" if others else ""
    return e.InvalidRequest(f"Invalid value for {param!r}: {reasons}.{more}", param=param)


def _param(violation: dict[str, Any], body: Any) -> str | None:
    """The dotted path of a violation, as far as the body has it: behind that come names of union branches."""
    source, *path = violation["loc"]
    if source != "body":
        return ".".join(map(str, path)) or None
    found: list[str] = []
    value = body
    for part in path:
        try:
            value = value[part]
        except (KeyError, IndexError, TypeError):
            if violation["type"] == "missing":
                found.append(str(part))
            break
        found.append(str(part))
    return ".".join(found) or None


class _UnknownParameter(e.InvalidRequest):
    """The request has a parameter that is not known here."""

    code = "unknown_parameter"


def _unknown_parameter(param: str | None) -> e.InvalidRequest:
    return _UnknownParameter(
        f"Unknown parameter {param!r}. It is refused, because ignoring it could change the meaning; "
        "GET /openapi.json lists what is known.",
        param=param,
    )


def _http_problem(exc: HTTPException) -> Problem:
    details = {"limit_bytes": exc.limit_bytes} if isinstance(exc, BodyTooLarge) else {}
    message = {
        404: "Unknown request URL. GET /openapi.json lists the routes.",
        405: "This URL does not answer this method. GET /openapi.json lists the routes.",
    }.get(exc.status_code, str(exc.detail))
    kind = "server_error" if exc.status_code >= 500 else "invalid_request_error"
    error = _error(message, kind, HTTP_CODES.get(exc.status_code, f"http_{exc.status_code}"), None, details)
    return Problem(exc.status_code, error, dict(exc.headers or {}))


def _lamina_problem(exc: e.LaminaError, request_id: str) -> Problem:
    status, kind = next(STATUS[cls] for cls in type(exc).__mro__ if cls in STATUS)
    message, details = exc.message, _details(exc)
    if status == 500:
        log.error("request failed", request_id=request_id, code=exc.code, exc_info=exc)
        message, details = _hidden(request_id), {}
    return Problem(status, _error(message, kind, exc.code, exc.param, details), _headers(exc, status))


def _headers(exc: e.LaminaError, status: int) -> dict[str, str]:
    if status == 401:
        return {"www-authenticate": 'Bearer realm="lamina"'}
    if status == 409:  # official clients retry 409; the answer would be the same
        return {"x-should-retry": "false"}
    if status not in (429, 503):
        return {}
    if status == 429 and exc.retry_after_s is None:
        return {"x-should-retry": "false"}
    seconds = DEFAULT_RETRY_S if exc.retry_after_s is None else max(exc.retry_after_s, 0.0)
    return {"retry-after": str(math.ceil(seconds)), "retry-after-ms": str(math.ceil(seconds * 1000))}


def _details(exc: e.LaminaError) -> dict[str, Any]:
    found = {name: getattr(exc, name) for name in DETAILS if getattr(exc, name, None) is not None}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()}


def _error(
    message: str, kind: str, code: str, param: str | None = None, details: dict[str, Any] | None = None
) -> dict[str, Any]:
    error = {"message": message, "type": kind, "param": param, "code": code}
    return error | {"details": details} if details else error


def _hidden(request_id: str) -> str:
    return f"The server failed on this request. Retry; if it happens again, quote the request id {request_id}."
