"""Errors cross the process border without losing type or context."""

from __future__ import annotations

import inspect

import pytest

from lamina import errors
from lamina.engine.failures import context_of, error_of, failure_of
from lamina.errors import (
    ContextLengthExceeded,
    EngineInternal,
    InvalidAdapter,
    LaminaError,
    LimitExceeded,
    ModelNotFound,
)
from lamina.types import EngineFailure

KINDS = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, LaminaError)]


def round_trip(error: LaminaError) -> LaminaError:
    return error_of(failure_of(error), context_of(error))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_code_finds_its_class(kind: type[LaminaError]) -> None:
    """Each error of `lamina.errors` comes back as itself, whatever its constructor takes."""
    error = error_of(EngineFailure(kind.code, "why", "stop", 2.5))
    assert type(error) is kind
    assert (error.message, error.param, error.retry_after_s, str(error)) == ("why", "stop", 2.5, "why")


@pytest.mark.parametrize(
    "error",
    [
        ContextLengthExceeded(limit=8192, prompt=9000, completion=10),
        InvalidAdapter(["rank 0", "NaN in layer 3"]),
        LimitExceeded("too much", limit=1.5, need=2, have=0, retry_after_s=3),
        ModelNotFound("x"),
    ],
    ids=lambda error: error.code,
)
def test_context_survives(error: LaminaError) -> None:
    """Typed attributes come back with type and value."""
    assert vars(round_trip(error)) == vars(error)
    assert vars(error_of(failure_of(error))) == vars(error)


def test_a_foreign_exception_reveals_nothing() -> None:
    """What is not ours becomes engine_error without its text."""
    error = round_trip(RuntimeError("secret"))  # type: ignore[arg-type]
    assert type(error) is EngineInternal
    assert "secret" not in error.message


def test_an_unknown_code_keeps_its_message() -> None:
    """A newer core's code is still an error that can be shown."""
    error = error_of(EngineFailure("from_the_future", "why"), {"message": "x", "__class__": "y", "limit": 3})
    assert type(error) is EngineInternal
    assert error.message == "why"
