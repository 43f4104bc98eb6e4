"""`lamina models`, from the root command down, on a catalogue model that needs no network."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fixtures.tiny_gguf import tiny_catalog
from lamina.cli.main import app


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty model cache, and a catalogue of one tiny model, `tiny`."""
    monkeypatch.setenv("LAMINA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")
    tiny_catalog(tmp_path / "wheels", monkeypatch)
    return tmp_path / "cache"


def lamina(*args: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["models", *args])
    return result.exit_code, result.stdout, result.stderr


@pytest.mark.parametrize("command", ["pull", "list", "path"])
def test_help_has_an_example(command: str) -> None:
    """Every command's help shows how to call it."""
    code, out, _ = lamina(command, "--help")
    assert code == 0
    assert "Example: " in out


def test_pull_path_and_list(cache: Path) -> None:
    """A pull prints the folder alone on standard output; path and list know it from then on."""
    code, out, error = lamina("path", "tiny")
    assert (code, out) == (1, "")
    assert "lamina models pull tiny" in error
    folder = str(cache / "tiny")
    assert lamina("pull", "tiny")[:2] == (0, folder + "\n")
    assert lamina("path", "tiny")[:2] == (0, folder + "\n")
    assert "tiny  yes     " in lamina("list")[1]
    (listed,) = json.loads(lamina("list", "--json")[1])
    assert (listed["name"], listed["cached"], listed["folder"]) == ("tiny", True, folder)


def test_pull_verify_repairs(cache: Path) -> None:
    """A flipped bit goes unnoticed by a plain pull (it looks at sizes) and is repaired by --verify."""
    assert lamina("pull", "tiny")[0] == 0
    weights = cache / "tiny" / "model.safetensors"
    good = weights.read_bytes()
    weights.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    assert lamina("pull", "tiny")[0] == 0
    assert weights.read_bytes() != good
    assert lamina("pull", "--verify", "tiny")[0] == 0
    assert weights.read_bytes() == good


@pytest.mark.parametrize("command", ["pull", "path"])
def test_unknown_names_list_what_there_is(cache: Path, command: str) -> None:
    """A typo gets one line with the names that exist, and no traceback."""
    code, _, error = lamina(command, "smol")
    assert code != 0
    assert error.strip() == "lamina: The catalogue has no model 'smol'; it has: tiny."
