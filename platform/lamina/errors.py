"""Lamina's errors.

    LaminaError                      code
    ├── InvalidRequest               invalid_request        (param)
    │   ├── ContextLengthExceeded    context_length_exceeded (limit, prompt, completion)
    │   ├── ExceedsQuota             exceeds_quota          (limit, need, have, decision)
    │   └── UnsupportedParameter     unsupported_parameter
    ├── Unauthenticated              invalid_api_key
    ├── PermissionDenied             insufficient_scope     (scope)
    ├── NotFound                     not_found
    │   └── ModelNotFound            model_not_found
    ├── Conflict                     conflict
    │   ├── QuotaNotCoverable        quota_not_coverable    (tier, limit, need, have)
    │   └── PinDenied                pin_denied             (reason, limit, need, have, decision)
    ├── TooLarge                     too_large              (limit_bytes)
    ├── InvalidAdapter               invalid_adapter        (violations)
    ├── LimitExceeded                rate_limit_exceeded    (limit, need, have, retry_after_s)
    │   └── WaitExceeded             wait_exceeded          (limit, need, have, decision, retry_after_s)
    ├── EngineOverloaded             engine_overloaded      (limit, retry_after_s)
    ├── EngineUnavailable            engine_unavailable     (retry_after_s)
    ├── EngineInternal               engine_error
    ├── DatabaseUnavailable          database_unavailable   (retry_after_s)
    ├── UnsupportedModel             unsupported_model      (supported)
    ├── ModelFetchFailed             model_fetch_failed
    └── ConfigurationInvalid         configuration_invalid

Each carries a message for people that says what to do, a stable `code` for programs, and typed context. The
gateway owns the one table from exception to HTTP status.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

__all__ = [
    "ConfigurationInvalid",
    "Conflict",
    "ContextLengthExceeded",
    "DatabaseUnavailable",
    "EngineInternal",
    "EngineOverloaded",
    "EngineUnavailable",
    "ExceedsQuota",
    "InvalidAdapter",
    "InvalidRequest",
    "LaminaError",
    "LimitExceeded",
    "ModelFetchFailed",
    "ModelNotFound",
    "NotFound",
    "PermissionDenied",
    "PinDenied",
    "QuotaNotCoverable",
    "TooLarge",
    "Unauthenticated",
    "UnsupportedModel",
    "UnsupportedParameter",
    "WaitExceeded",
]


class LaminaError(Exception):
    """Something went wrong inside Lamina."""

    code: ClassVar[str] = "internal_error"

    def __init__(
        self, message: str | None = None, *, param: str | None = None, retry_after_s: float | None = None
    ) -> None:
        self.message = message or (type(self).__doc__ or "").strip().splitlines()[0]
        self.param = param
        self.retry_after_s = retry_after_s
        super().__init__(self.message)


class InvalidRequest(LaminaError):
    """The request is not valid."""

    code = "invalid_request"


class ContextLengthExceeded(InvalidRequest):
    """Prompt and completion do not fit the model's context window."""

    code = "context_length_exceeded"

    def __init__(self, *, limit: int, prompt: int, completion: int = 0, param: str = "messages") -> None:
        self.limit, self.prompt, self.completion = limit, prompt, completion
        wanted = f"{prompt} tokens of prompt" + (f" + {completion} of completion" if completion else "")
        super().__init__(
            f"This model's context window is {limit} tokens, but the request needs {wanted}. "
            "Shorten the prompt or lower max_tokens.",
            param=param,
        )


class ExceedsQuota(InvalidRequest):
    """The request needs more KV blocks than its tenant can ever have."""

    code = "exceeds_quota"

    def __init__(self, message: str, *, limit: int, need: int, have: int, decision: str) -> None:
        self.limit, self.need, self.have, self.decision = limit, need, have, decision
        super().__init__(message, param="max_tokens")


class UnsupportedParameter(InvalidRequest):
    """This parameter is not supported here and would change the meaning of the answer if ignored."""

    code = "unsupported_parameter"


class Unauthenticated(LaminaError):
    """The API key is missing, malformed, unknown, expired or revoked."""

    code = "invalid_api_key"


class PermissionDenied(LaminaError):
    """The API key lacks the scope that this call needs."""

    code = "insufficient_scope"

    def __init__(self, message: str | None = None, *, scope: str | None = None) -> None:
        self.scope = scope
        super().__init__(message or f"This API key lacks the scope {scope!r}; use a key that has it.")


class NotFound(LaminaError):
    """No such resource."""

    code = "not_found"


class ModelNotFound(NotFound):
    """The model does not exist or you do not have access to it."""

    code = "model_not_found"

    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__(
            f"The model {name!r} does not exist or you do not have access to it. "
            "GET /v1/models lists what this key may use.",
            param="model",
        )


class Conflict(LaminaError):
    """The resource exists already or is in use."""

    code = "conflict"


class QuotaNotCoverable(Conflict):
    """The quotas of all tenants together would promise more than there is of a tier: gpu, host or store.

    The numbers are blocks for `gpu`, bytes for the others.
    """

    code = "quota_not_coverable"

    def __init__(
        self, message: str, *, limit: int, need: int, have: int, tier: str = "gpu", param: str = "reserved_blocks"
    ) -> None:
        self.limit, self.need, self.have, self.tier = limit, need, have, tier
        super().__init__(message, param=param)


class PinDenied(Conflict):
    """Nothing of the prefix can be pinned."""

    code = "pin_denied"

    def __init__(
        self,
        message: str,
        *,
        reason: str,
        limit: int,
        need: int,
        have: int,
        decision: str,
        retry_after_s: float | None = None,
    ) -> None:
        self.reason, self.limit, self.need, self.have, self.decision = reason, limit, need, have, decision
        super().__init__(message, retry_after_s=retry_after_s)


class TooLarge(LaminaError):
    """The upload is larger than allowed."""

    code = "too_large"

    def __init__(self, message: str | None = None, *, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        super().__init__(message or f"The upload exceeds the limit of {limit_bytes} bytes.")


class InvalidAdapter(LaminaError):
    """The adapter was refused; every violation is listed."""

    code = "invalid_adapter"

    def __init__(self, violations: Sequence[str], *, param: str | None = None) -> None:
        self.violations = tuple(violations)
        count = len(self.violations)
        super().__init__(
            f"The adapter was refused ({count} violation{'s' if count != 1 else ''}): " + "; ".join(self.violations),
            param=param,
        )


class LimitExceeded(LaminaError):
    """A limit of this tenant is exhausted."""

    code = "rate_limit_exceeded"

    def __init__(
        self, message: str, *, limit: float, need: float, have: float, retry_after_s: float | None = None
    ) -> None:
        self.limit, self.need, self.have = limit, need, have
        super().__init__(message, retry_after_s=retry_after_s)


class WaitExceeded(LimitExceeded):
    """The request waited for its turn for as long as it may; retry later."""

    code = "wait_exceeded"

    def __init__(
        self, message: str, *, limit: float, need: float, have: float, decision: str, retry_after_s: float
    ) -> None:
        self.decision = decision
        super().__init__(message, limit=limit, need=need, have=have, retry_after_s=retry_after_s)


class EngineOverloaded(LaminaError):
    """The engine's queue is full; retry later."""

    code = "engine_overloaded"


class EngineUnavailable(LaminaError):
    """The engine is starting or restarting; retry shortly."""

    code = "engine_unavailable"


class EngineInternal(LaminaError):
    """The engine failed on this request."""

    code = "engine_error"


class DatabaseUnavailable(LaminaError):
    """The database cannot be reached or is locked; retry shortly."""

    code = "database_unavailable"


class UnsupportedModel(LaminaError):
    """This model's architecture or a feature of it is not supported."""

    code = "unsupported_model"


class ModelFetchFailed(LaminaError):
    """The model could not be fetched or did not match its checksum."""

    code = "model_fetch_failed"


class ConfigurationInvalid(LaminaError):
    """The configuration is not valid."""

    code = "configuration_invalid"
