"""The house keeps its rules: one package per folder, a page per room, light public imports."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import lamina

ROOT = Path(__file__).parents[2]
PACKAGES = {
    "platform": "lamina",
    "kvtier": "lamina_kvtier",
    "lora": "lamina_lora",
    "kernels": "lamina_kernels",
    "admin": "lamina_admin",
}
ROOMS = ["models", "engine", "tenancy", "gateway", "wiring", "cli"]


@pytest.mark.parametrize(("folder", "package"), PACKAGES.items())
def test_a_folder_holds_one_package_and_is_none_itself(folder: str, package: str) -> None:
    """A top-level `platform/__init__.py` would shadow Python's own platform module."""
    assert not (ROOT / folder / "__init__.py").exists()
    assert {init.parent.name for init in (ROOT / folder).glob("*/__init__.py")} == {package}


def test_no_top_level_folder_is_a_package() -> None:
    assert list(ROOT.glob("*/__init__.py")) == []


def test_every_room_has_a_page() -> None:
    """A newcomer finds a README in each package and in each room of `lamina`."""
    pages = [ROOT / folder / package / "README.md" for folder, package in PACKAGES.items() if package != "lamina"]
    pages += [ROOT / "platform" / "lamina" / room / "README.md" for room in ROOMS]
    assert [str(page.relative_to(ROOT)) for page in pages if not page.is_file()] == []


def test_public_names() -> None:
    """What `import lamina` promises."""
    assert sorted(lamina.__all__) == ["LLM", "SamplingParams", "__version__"]
    with pytest.raises(AttributeError, match="no attribute 'missing'"):
        _ = lamina.missing


@pytest.mark.parametrize("module", ["lamina", "lamina.types", "lamina.gateway.app", "lamina.tenancy.keys"])
def test_the_front_of_the_house_loads_no_torch(module: str) -> None:
    """Neither the package itself nor the gateway and tenancy bring torch into a process."""
    probe = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", probe], check=False).returncode == 0
