"""Who is calling, and what the call may do."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from lamina.errors import PermissionDenied

__all__ = ["ALL_SCOPES", "Principal", "Scope"]


class Scope(StrEnum):
    """What an API key may be used for."""

    INFERENCE = "inference"
    ADAPTERS_READ = "adapters:read"
    ADAPTERS_WRITE = "adapters:write"
    USAGE_READ = "usage:read"
    KEYS_ADMIN = "keys:admin"


ALL_SCOPES: frozenset[str] = frozenset(scope.value for scope in Scope)


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """A verified API key. Holds no secret, so it may be logged and passed on."""

    tenant_id: str
    tenant_name: str
    key_id: str
    scopes: frozenset[str]
    weight: float  # the tenant's share of the engine
    namespace: str  # hex; separates this tenant's KV blocks from everyone else's

    def require(self, scope: Scope) -> None:
        """Raises PermissionDenied if the key lacks `scope`."""
        if scope.value not in self.scopes:
            raise PermissionDenied(scope=scope.value)
