"""One table from exception to status, one body for every failure."""

from __future__ import annotations

from typing import Any

import pytest
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from lamina import errors as e
from lamina.gateway.errors import STATUS, describe, validation_problem

RAISED: dict[int, list[e.LaminaError]] = {
    400: [
        e.InvalidRequest(),
        e.ContextLengthExceeded(limit=8, prompt=9),
        e.UnsupportedParameter(param="tools"),
        e.ExceedsQuota("too many blocks", limit=8, need=9, have=8, decision="kv_1"),
    ],
    401: [e.Unauthenticated()],
    403: [e.PermissionDenied(scope="inference")],
    404: [e.NotFound(), e.ModelNotFound("gpt-9")],
    409: [
        e.Conflict(),
        e.QuotaNotCoverable("too much is promised", limit=100, need=60, have=50),
        e.PinDenied("no", reason="no_reservation", limit=0, need=4, have=0, decision="kv_2"),
    ],
    413: [e.TooLarge(limit_bytes=5)],
    422: [e.InvalidAdapter(["rank is 0", "NaN in weights"])],
    429: [
        e.LimitExceeded("slow down", limit=3, need=1, have=0, retry_after_s=0.25),
        e.WaitExceeded("too long", limit=3, need=1, have=0, decision="kv-1", retry_after_s=2.0),
    ],
    500: [
        e.LaminaError(),
        e.EngineInternal(),
        e.UnsupportedModel(),
        e.ModelFetchFailed(),
        e.ConfigurationInvalid(),
    ],
    503: [e.EngineOverloaded(), e.EngineUnavailable(), e.DatabaseUnavailable()],
}


def test_every_error_of_lamina_is_covered() -> None:
    """A new error class must be given a status on purpose."""
    tested = {type(error) for errors in RAISED.values() for error in errors}
    assert {getattr(e, name) for name in e.__all__} == tested
    assert STATUS.keys() <= tested


@pytest.mark.parametrize(
    ("status", "error"), [(status, error) for status, errors in RAISED.items() for error in errors], ids=str
)
def test_status_and_body(status: int, error: e.LaminaError) -> None:
    """The body has OpenAI's four fields, and the code is a string."""
    problem = describe(error, "req_1")
    assert problem.status == status
    assert {"message", "type", "param", "code"} <= problem.error.keys()
    assert problem.error["code"] == error.code
    assert isinstance(problem.error["message"], str)


def test_details_are_for_programs() -> None:
    """Numbers and lists that a client may act on are not only in the message."""
    limit = describe(RAISED[429][0], "req_1").error["details"]
    assert limit == {"limit": 3, "need": 1, "have": 0}
    adapter = describe(RAISED[422][0], "req_1").error["details"]
    assert adapter == {"violations": ["rank is 0", "NaN in weights"]}
    context = describe(RAISED[400][1], "req_1").error["details"]
    assert context == {"limit": 8, "prompt": 9, "completion": 0}


@pytest.mark.parametrize(
    "error", [e.EngineInternal("CUDA error at 0xdeadbeef"), ValueError("password=hunter2")], ids=["lamina", "other"]
)
def test_internals_are_hidden_from_clients_and_logged(error: Exception, capsys: pytest.CaptureFixture[str]) -> None:
    """The client gets the request id to quote; the log has both."""
    problem = describe(error, "req_42")
    assert problem.status == 500
    assert str(error) not in str(problem.body)
    assert "req_42" in problem.error["message"]
    logged = capsys.readouterr().out
    assert str(error) in logged
    assert "req_42" in logged


@pytest.mark.parametrize(
    ("error", "headers"),
    [
        (
            e.LimitExceeded("", limit=1, need=1, have=0, retry_after_s=0.25),
            {"retry-after": "1", "retry-after-ms": "250"},
        ),
        (e.LimitExceeded("", limit=1, need=1, have=0), {"x-should-retry": "false"}),
        (e.EngineOverloaded(retry_after_s=2.5), {"retry-after": "3", "retry-after-ms": "2500"}),
        (e.EngineUnavailable(), {"retry-after": "1", "retry-after-ms": "1000"}),
        (e.Conflict(), {"x-should-retry": "false"}),
        (e.Unauthenticated(), {"www-authenticate": 'Bearer realm="lamina"'}),
        (e.InvalidRequest(), {}),
    ],
    ids=str,
)
def test_headers_say_when_to_retry(error: e.LaminaError, headers: dict[str, str]) -> None:
    """Official clients honour these; 429 without a time is an exhausted quota."""
    assert describe(error, "req_1").headers == headers


def violation(kind: str, *loc: str | int, msg: str = "nope") -> dict[str, Any]:
    return {"type": kind, "loc": loc, "msg": msg, "input": None}


@pytest.mark.parametrize(
    ("violations", "body", "param", "text"),
    [
        ([violation("missing", "body", "model")], {}, "model", "nope"),
        ([violation("int_type", "body", "n")], {"n": "x"}, "n", "nope"),
        ([violation("int_type", "body", "stop", "list[str]", 0)], {"stop": [1]}, "stop", "nope"),
        ([violation("x", "body", "stop", 1, "a")], {"stop": [{}, {"a": 1}]}, "stop.1.a", "nope"),
        ([violation("missing", "body", "messages", 0, "role")], {"messages": [{}]}, "messages.0.role", "nope"),
        ([violation("x", "body", "n"), violation("x", "body", "seed")], {"n": 1, "seed": 2}, "n", "1 more"),
        ([violation("x", "body", "n", each, msg=each) for each in "ab"], {"n": 1}, "n", "a or b"),
        ([violation("x", "query", "limit")], None, "limit", "nope"),
        ([violation("x", "body")], "text", None, "JSON object"),
    ],
)  # fmt: skip
def test_validation_names_the_culprit(
    violations: list[dict[str, Any]], body: Any, param: str | None, text: str
) -> None:
    """Names of union branches are left out, several reasons at one place become one."""
    problem = validation_problem(RequestValidationError(violations, body=body))
    assert problem.param == param
    assert text in problem.message


def test_invalid_json_says_where() -> None:
    error = violation("json_invalid", "body", 17) | {"ctx": {"error": "Expecting value"}}
    problem = describe(RequestValidationError([error], body=""), "req_1")
    assert problem.status == 400
    assert "not valid JSON: Expecting value at character 17" in problem.error["message"]


@pytest.mark.parametrize("status", [404, 405, 418])
def test_http_exceptions_have_the_same_shape(status: int) -> None:
    problem = describe(HTTPException(status), "req_1")
    assert problem.status == status
    assert isinstance(problem.error["code"], str)
