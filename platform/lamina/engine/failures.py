"""Lamina's errors as plain values, so that they can cross the process border, and back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from lamina import errors
from lamina.errors import EngineInternal, LaminaError
from lamina.types import EngineFailure

__all__ = ["Context", "context_of", "error_of", "failure_of"]

Context = dict[str, str | int | float | bool | list[str] | None]

_COMMON = frozenset({"message", "param", "retry_after_s"})


def failure_of(error: BaseException) -> EngineFailure:
    """The wire form of `error`; anything that is not a LaminaError becomes `engine_error` without details."""
    if not isinstance(error, LaminaError):
        return EngineFailure(EngineInternal.code, "The engine failed on this request; its log says why.")
    return EngineFailure(error.code, error.message, error.param, error.retry_after_s, context_of(error))


def context_of(error: BaseException) -> Context:
    """The typed attributes (limit, need, violations, ...) of `error` beyond those of every LaminaError."""
    if not isinstance(error, LaminaError):
        return {}
    return {name: _plain(value) for name, value in vars(error).items() if name not in _COMMON}


def error_of(failure: EngineFailure, context: Mapping[str, object] | None = None) -> LaminaError:
    """The exception that `failure` (and `context`, if it came beside it) was made from.

    A code that this version does not know gives EngineInternal with the original message.
    """
    kind = _BY_CODE.get(failure.code, EngineInternal)
    error = kind.__new__(kind)  # constructors differ, and the message is already made
    LaminaError.__init__(error, failure.message, param=failure.param, retry_after_s=failure.retry_after_s)
    for name, value in {**failure.context, **(context or {})}.items():
        if name not in _COMMON and not name.startswith("_"):
            setattr(error, name, tuple(value) if isinstance(value, list) else value)
    return error


def _plain(value: object) -> str | int | float | bool | list[str] | None:
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    if isinstance(value, Sequence):
        return [str(item) for item in value]
    return str(value)


def _kinds(root: type[LaminaError]) -> Iterator[type[LaminaError]]:
    yield root
    for kind in root.__subclasses__():
        if kind.__module__ == errors.__name__:
            yield from _kinds(kind)


_BY_CODE = {kind.code: kind for kind in _kinds(LaminaError)}
