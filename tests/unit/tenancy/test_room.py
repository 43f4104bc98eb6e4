"""Rules of the whole room."""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys

import pytest

import lamina.tenancy
from lamina.errors import PermissionDenied
from lamina.tenancy.principal import ALL_SCOPES, Principal, Scope

MODULES = [module.name for module in pkgutil.iter_modules(lamina.tenancy.__path__)]


@pytest.mark.parametrize("name", MODULES)
def test_exports_exist(name: str) -> None:
    """Everything in __all__ is there, sorted."""
    module = importlib.import_module(f"lamina.tenancy.{name}")
    assert module.__all__
    assert all(hasattr(module, exported) for exported in module.__all__)


def test_the_room_loads_neither_torch_nor_a_web_framework() -> None:
    """The gateway's process imports this room and must stay small."""
    imports = ";".join(f"import lamina.tenancy.{name}" for name in MODULES)
    heavy = ("torch", "fastapi", "pydantic", "triton")
    code = f"import sys;{imports};print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_require() -> None:
    """A missing scope is named in the error; one that is there passes."""
    principal = Principal(
        tenant_id="t",
        tenant_name="t",
        key_id="k",
        scopes=frozenset({"inference"}),
        weight=1.0,
        namespace="00",
    )
    principal.require(Scope.INFERENCE)
    with pytest.raises(PermissionDenied) as caught:
        principal.require(Scope.ADAPTERS_WRITE)
    assert caught.value.scope == "adapters:write"


def test_scopes_are_a_contract() -> None:
    """Keys in databases hold these texts: never rename one."""
    assert set(ALL_SCOPES) == {"inference", "adapters:read", "adapters:write", "usage:read", "keys:admin"}
