"""What tenancy and gateway may import of the adapter package loads no torch."""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys

import pytest

import lamina_kernels
import lamina_lora

TORCH_FREE = [
    "digest",
    "errors",
    "geometry",
    "patterns",
    "peft_config",
    "safetensors_header",
    "store",
    "targets",
    "validate",
]


@pytest.mark.parametrize("name", TORCH_FREE)
def test_loads_no_torch(name: str) -> None:
    """In a fresh interpreter."""
    script = f"import sys, lamina_lora.{name}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False, timeout=60).returncode == 0


@pytest.mark.parametrize("package", [lamina_lora, lamina_kernels], ids=lambda p: p.__name__)
def test_modules_say_what_they_export(package: object) -> None:
    """Every module has an `__all__` whose names exist."""
    for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):  # type: ignore[attr-defined]
        if not module.ispkg:
            loaded = importlib.import_module(module.name)
            assert all(hasattr(loaded, name) for name in loaded.__all__), module.name
