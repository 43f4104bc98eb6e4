"""Names and model references."""

from __future__ import annotations

import math

import pytest

from lamina.errors import InvalidRequest
from lamina.tenancy.names import (
    MAX_NAME_CHARS,
    ModelReference,
    check_adapter_name,
    check_tenant_name,
    check_weight,
    is_plausible,
    parse_reference,
)


@pytest.mark.parametrize("name", ["a", "support-v2", "Acme_1.0", "9lives", "x" * MAX_NAME_CHARS])
def test_good_names(name: str) -> None:
    """Letters, digits, dots, underscores and dashes, up to 64 characters; each can be referred to."""
    assert check_adapter_name(name, base_model="base") == name
    assert parse_reference(name) == ModelReference(name, None)


@pytest.mark.parametrize(
    "name",
    ["", "-a", ".hidden", "..", "../x", "a/b", "a b", "a\n", "é", "a\0", "x" * 65, "a@1", "adp_x", "base"],
    ids=repr,
)
def test_bad_adapter_names(name: str) -> None:
    """Paths, versions, ids and the base model's name are refused; the message names the parameter."""
    with pytest.raises(InvalidRequest) as caught:
        check_adapter_name(name, base_model="base")
    assert caught.value.param == "name"


def test_the_length_limit_is_stated() -> None:
    """The number is in the message."""
    with pytest.raises(InvalidRequest, match=r"64.*100"):
        check_adapter_name("x" * 100, base_model="base")


def test_a_tenant_name_never_looks_like_an_id() -> None:
    """Both are accepted in look-ups, so they must not overlap."""
    with pytest.raises(InvalidRequest, match="ten_"):
        check_tenant_name("ten_other")


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("a", ModelReference("a", None)),
        ("a@latest", ModelReference("a", None)),
        ("a@1", ModelReference("a", 1)),
        ("a@999999999", ModelReference("a", 999999999)),
        ("a@0", None),
        ("a@01", None),
        ("a@-1", None),
        ("a@1@2", None),
        ("a@", None),
        ("@1", None),
        ("a@Latest", None),
        ("a@9999999999", None),
        ("a@\u0661", None),
        ("a@1\n", None),
        ("", None),
        ("x" * 100_000, None),
    ],
    ids=lambda value: repr(value)[:24],
)
def test_references(model: str, expected: ModelReference | None) -> None:
    """A name, a version in canonical digits, or @latest; everything else refers to nothing."""
    assert parse_reference(model) == expected


@pytest.mark.parametrize("weight", [0, -1, math.nan, math.inf, 1000.5])
def test_bad_weights(weight: float) -> None:
    """A weight is positive, finite and at most 1000."""
    with pytest.raises(InvalidRequest, match="1000"):
        check_weight(weight)


@pytest.mark.parametrize("text", ["", "a\0b", "\ud800", "a b", "x" * 97])
def test_implausible_text_never_reaches_the_database(text: str) -> None:
    """NUL and lone surrogates would raise inside the drivers."""
    assert not is_plausible(text)
