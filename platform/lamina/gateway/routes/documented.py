"""Responses and forms for the OpenAPI schema."""

from __future__ import annotations

from typing import Any

from lamina.gateway.schemas.resources import ErrorBody

__all__ = ["ERRORS", "GENERATION", "PIN_ERRORS", "UPLOAD_ERRORS", "multipart_body"]


def _errors(**statuses: str) -> dict[int | str, dict[str, Any]]:
    return {int(name[1:]): {"model": ErrorBody, "description": text} for name, text in statuses.items()}


ERRORS = _errors(
    s400="The request is not valid; `param` names the culprit.",
    s401="The API key is missing, unknown, expired or revoked.",
    s403="The API key lacks a scope.",
    s404="No such resource, or not yours.",
)
GENERATION: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The whole answer; with `stream`, its chunks as server-sent events.",
        "content": {"text/event-stream": {"schema": {"type": "string"}}},
    }
}
GENERATION |= ERRORS | _errors(
    s413="The body is too large.",
    s429="A limit of this tenant is exhausted; see Retry-After.",
    s503="The engine is saturated or restarting; see Retry-After.",
)
PIN_ERRORS = ERRORS | _errors(
    s409="Nothing of the prefix can be pinned; `details` has the numbers.",
    s429="A limit of this tenant is exhausted.",
    s503="The engine is restarting, or its quotas are being loaded; see Retry-After.",
)
UPLOAD_ERRORS = ERRORS | _errors(
    s409="The resource exists already or is in use.",
    s413="The upload is too large.",
    s422="The adapter was refused; `details.violations` lists everything that is wrong with it.",
)


def multipart_body(*, required: list[str], **properties: dict[str, Any]) -> dict[str, Any]:
    """The schema of a form that the route reads from the stream itself."""
    schema = {"type": "object", "required": required, "properties": properties}
    return {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": schema}}}}
