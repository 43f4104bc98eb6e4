"""`lamina models`."""

from __future__ import annotations

from typing import Annotated

import typer

from lamina.cli.listing import Json, echo_json, echo_table
from lamina.cli.progress import console_progress
from lamina.errors import ModelFetchFailed
from lamina.models.catalog import CATALOG, is_present, pull
from lamina.wiring.paths import default_cache

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, help="Fetch and list base models.")

_Name = Annotated[str, typer.Argument(help="A name that `lamina models list` shows.", metavar="NAME")]


@app.command("pull")
def pull_(
    name: _Name,
    verify: Annotated[bool, typer.Option(help="Also hash what is cached; fetch it again if it is damaged.")] = False,
) -> None:
    """Fetch a model into the cache and print its folder. At once if it is there already.

    Example: lamina models pull smollm2-135m-instruct
    """
    with console_progress() as report:
        folder = pull(name, default_cache(), report, deep=verify)
    typer.echo(folder)


@app.command("list")
def list_(json: Json = False) -> None:
    """List the models that can be fetched by name.

    Example: lamina models list
    """
    cache = default_cache()
    models = [
        {
            "name": entry.name,
            "cached": is_present(entry.name, cache),
            "license": entry.license,
            "summary": entry.summary,
            "folder": str(cache / entry.name),
        }
        for entry in CATALOG.values()
    ]
    if json:
        echo_json(models)
        return
    rows = ((str(m["name"]), "yes" if m["cached"] else "no", str(m["license"]), str(m["summary"])) for m in models)
    echo_table(("NAME", "CACHED", "LICENSE", "WHAT"), rows, empty="The catalogue is empty.")


@app.command()
def path(name: _Name) -> None:
    """Print the folder of a fetched model. Fails if it is not fetched.

    Example: ls "$(lamina models path smollm2-135m-instruct)"
    """
    cache = default_cache()
    if not is_present(name, cache):
        raise ModelFetchFailed(f"{name} is not in the cache {cache}. Fetch it: lamina models pull {name}")
    typer.echo(cache / name)
