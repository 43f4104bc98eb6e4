"""Who is calling. The middleware authenticates every request that is not public, before its body is read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import Depends, Request

from lamina.errors import Unauthenticated
from lamina.tenancy.principal import Principal, Scope

__all__ = ["OPERATOR_PATHS", "PUBLIC_PATHS", "AdapterReader", "AdapterWriter", "AnyKey", "Caller", "bearer_token"]

# Open by name; every other path needs a key, so that a new route can't be left open by mistake.
PUBLIC_PATHS = frozenset({"/health", "/metrics", "/openapi.json"})
OPERATOR_PATHS = "/operator/"  # below it no tenant's key helps: it takes a ticket of `tenancy.operator`

MAX_KEY_CHARS = 512


def bearer_token(headers: Mapping[str, str]) -> str:
    """The raw key of `Authorization: Bearer <key>`. Raises Unauthenticated."""
    header = headers.get("authorization", "")
    scheme, _, raw = header.partition(" ")
    raw = raw.strip()
    if not header:
        raise Unauthenticated("No API key. Send the header Authorization: Bearer <key>.")
    if scheme.lower() != "bearer" or not raw or len(raw) > MAX_KEY_CHARS:
        raise Unauthenticated("The Authorization header is malformed. Send Authorization: Bearer <key>.")
    return raw


async def _any_key(request: Request) -> Principal:
    principal: Principal = request.state.principal
    return principal


def _scoped(scope: Scope) -> Any:
    async def authorised(request: Request) -> Principal:
        principal = await _any_key(request)
        principal.require(scope)
        return principal

    return Depends(authorised)


AnyKey = Annotated[Principal, Depends(_any_key)]
Caller = Annotated[Principal, _scoped(Scope.INFERENCE)]
AdapterReader = Annotated[Principal, _scoped(Scope.ADAPTERS_READ)]
AdapterWriter = Annotated[Principal, _scoped(Scope.ADAPTERS_WRITE)]
