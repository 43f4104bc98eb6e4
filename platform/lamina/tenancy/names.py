"""Names: what tenants, keys and adapters may be called, and what a model name refers to."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from lamina.errors import InvalidRequest

__all__ = [
    "MAX_NAME_CHARS",
    "ModelReference",
    "check_adapter_name",
    "check_key_name",
    "check_tenant_name",
    "check_weight",
    "is_plausible",
    "parse_reference",
]

MAX_NAME_CHARS = 64
MAX_WEIGHT = 1000.0

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*", re.ASCII)
_PLAUSIBLE = re.compile(r"[A-Za-z0-9._@-]{1,96}", re.ASCII)
_REFERENCE = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]{0,63})(?:@(latest|[1-9][0-9]{0,8}))?", re.ASCII)


@dataclass(frozen=True, slots=True)
class ModelReference:
    """A model name taken apart. `version` None means the latest ready one."""

    name: str
    version: int | None


def is_plausible(text: str) -> bool:
    """Whether an id, a name or a reference can look like this.

    Asked before a stranger's text reaches the database, which refuses some characters with errors of its own.
    """
    return _PLAUSIBLE.fullmatch(text) is not None


def parse_reference(model: str) -> ModelReference | None:
    """Reads "name", "name@3" and "name@latest"; None for anything else."""
    match = _REFERENCE.fullmatch(model)
    if match is None:
        return None
    version = match[2]
    return ModelReference(match[1], None if version in (None, "latest") else int(version))


def check_adapter_name(name: str, *, base_model: str) -> str:
    """Raises InvalidRequest unless an adapter may be called `name` beside the base model `base_model`."""
    if name == base_model:
        raise InvalidRequest(f"An adapter may not be called {name!r}: that is the base model's name.", param="name")
    if name.startswith("adp_"):
        raise InvalidRequest("An adapter name may not begin with 'adp_': ids do.", param="name")
    if "@" in name:
        raise InvalidRequest("An adapter name may not contain '@': it separates name and version.", param="name")
    return _check_name(name, "An adapter name")


def check_tenant_name(name: str) -> str:
    """Raises InvalidRequest; names that look like ids are refused, since both are accepted in look-ups."""
    if name.startswith("ten_"):
        raise InvalidRequest("A tenant name may not begin with 'ten_': ids do.", param="name")
    return _check_name(name, "A tenant name")


def check_key_name(name: str) -> str:
    """Raises InvalidRequest."""
    return _check_name(name, "A key name")


def check_weight(weight: float) -> float:
    """Raises InvalidRequest unless 0 < weight <= 1000."""
    if not (math.isfinite(weight) and 0 < weight <= MAX_WEIGHT):
        raise InvalidRequest(
            f"A tenant's weight must be above 0 and at most {MAX_WEIGHT:g}; got {weight}.", param="weight"
        )
    return float(weight)


def _check_name(name: str, what: str) -> str:
    if len(name) > MAX_NAME_CHARS:
        raise InvalidRequest(f"{what} has at most {MAX_NAME_CHARS} characters; this one has {len(name)}.", param="name")
    if _NAME.fullmatch(name) is None:
        raise InvalidRequest(
            f"{what} begins with a letter or digit and goes on with those, '.', '_' or '-'; got {name!r}.",
            param="name",
        )
    return name
