"""`lamina`: the root command. Each subcommand's module is loaded only when it is called."""

from __future__ import annotations

import importlib
from typing import Any, NoReturn

import typer
from typer.core import TyperGroup

from lamina.errors import ConfigurationInvalid, InvalidRequest, LaminaError

__all__ = ["app"]

_COMMANDS = {
    "serve": ("lamina.cli.serve", "Run the server: engine, gateway and what they need."),
    "models": ("lamina.cli.models", "Fetch and list base models."),
    "tenants": ("lamina.cli.tenants", "Make, list and change tenants."),
    "keys": ("lamina.cli.keys", "Issue, list, rotate and revoke API keys."),
    "adapters": ("lamina.cli.adapters", "Upload, list and delete tenants' adapters."),
    "quotas": ("lamina.cli.quotas", "Set and list what tenants are promised of the KV block pool."),
    "kv": ("lamina.cli.kv", "Look at the KV block pool."),
}
_WRONG_INPUT = (ConfigurationInvalid, InvalidRequest)


class _Later(TyperGroup):
    """Stands for a command in the list of commands; loads it to run it."""

    def __init__(self, name: str, module: str, summary: str) -> None:
        super().__init__(name=name, help=summary)
        self._module = module

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        command = typer.main.get_command(importlib.import_module(self._module).app)
        command.name = self.name
        return command.make_context(info_name, args, parent, **extra)


class _Root(TyperGroup):
    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        for name, (module, summary) in _COMMANDS.items():
            self.add_command(_Later(name, module, summary))

    def invoke(self, ctx: Any) -> Any:
        """Turns Lamina's errors into one line and an exit status: 2 for wrong input, else 1."""
        try:
            return super().invoke(ctx)
        except LaminaError as error:
            _fail(error)


app = typer.Typer(cls=_Root, no_args_is_help=True, pretty_exceptions_enable=False)


@app.callback()
def root() -> None:
    """Serve many tenants' LoRA adapters from one base model."""


@app.command()
def version() -> None:
    """Print the version."""
    import lamina

    typer.echo(lamina.__version__)


def _fail(error: LaminaError) -> NoReturn:
    typer.echo(f"lamina: {error.message}", err=True)
    raise typer.Exit(2 if isinstance(error, _WRONG_INPUT) else 1)
