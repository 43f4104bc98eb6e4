"""The root command."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import lamina
from lamina.cli.main import _COMMANDS, app
from lamina.cli.serve import app as serve_app
from lamina.config import GatewayConfig
from lamina.wiring.settings import Settings

RUNNER = CliRunner()


def test_help_lists_every_command_without_loading_any() -> None:
    """`lamina --help` is quick: no subcommand's module, no torch, no web framework."""
    program = (
        "import sys; from typer.testing import CliRunner; from lamina.cli.main import app\n"
        "print(CliRunner().invoke(app, ['--help']).stdout)\n"
        "print(sorted(m for m in sys.modules if m.split('.')[0] in "
        "('torch', 'fastapi', 'sqlalchemy', 'pydantic') or m.startswith('lamina.cli.') and m != 'lamina.cli.main'))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    for command in (*_COMMANDS, "version"):
        assert re.search(rf"\b{command}\b", done.stdout)
    assert done.stdout.rstrip().endswith("[]"), done.stdout


@pytest.mark.parametrize("command", _COMMANDS)
def test_every_command_has_help(command: str) -> None:
    """Each loads, and names itself by the full path."""
    result = RUNNER.invoke(app, [command, "--help"], prog_name="lamina")
    assert result.exit_code == 0, result.output
    assert f"lamina {command}" in result.output


def test_version() -> None:
    """`lamina version` prints the version and nothing else."""
    assert RUNNER.invoke(app, ["version"]).stdout == lamina.__version__ + "\n"


def test_a_misspelt_command_is_corrected() -> None:
    """With the nearest name, and status 2."""
    result = RUNNER.invoke(app, ["serv"])
    assert result.exit_code == 2
    assert "serve" in result.output


def test_wrong_settings_are_one_line() -> None:
    """Status 2, no traceback, the option's name."""
    result = RUNNER.invoke(app, ["serve", "--kv-bytes", "much"])
    assert result.exit_code == 2
    assert result.stderr.startswith("lamina: Wrong settings: --kv-bytes:")
    assert result.stderr.count("\n") == 1


def test_an_unknown_model_is_one_line(tmp_path: Path) -> None:
    """The port was taken and is given back; nothing was started."""
    command = [sys.executable, "-c", "from lamina.cli.main import app; app()", "serve", "--port", "0"]
    done = subprocess.run(
        [*command, "--home", str(tmp_path), "--model", "no such model"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr.startswith("lamina: 'no such model' is no model")
    assert done.stderr.count("\n") == 1


def test_every_option_of_serve_is_a_setting() -> None:
    """So that an option cannot be read and then ignored."""
    command = typer.main.get_command(serve_app)
    names = {parameter.name for parameter in command.params} - {"demo", "help"}
    assert names <= set(Settings.model_fields)
    assert {"host", "port"} <= names & set(GatewayConfig.__dataclass_fields__)
