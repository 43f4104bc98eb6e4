"""`lamina serve`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["app"]

app = typer.Typer(add_completion=False)

_ENGINE, _FILES = "Engine", "Files"


@app.command()
def serve(
    model: Annotated[
        str | None, typer.Option(help="A name of `lamina models list`, a Hugging Face folder, or a hub id.")
    ] = None,
    demo: Annotated[
        bool, typer.Option("--demo", help="Make two demo tenants with an adapter each, and print their keys.")
    ] = False,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; 0 takes a free one.")] = None,
    served_name: Annotated[str | None, typer.Option(help="The base model's name in the API.")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda.", rich_help_panel=_ENGINE)] = None,
    dtype: Annotated[
        str | None, typer.Option(help="auto, float32, bfloat16 or float16.", rich_help_panel=_ENGINE)
    ] = None,
    kv_bytes: Annotated[
        str | None, typer.Option(help="Memory for KV blocks, such as 4GiB.", rich_help_panel=_ENGINE)
    ] = None,
    adapter_bytes: Annotated[
        str | None, typer.Option(help="Memory for loaded adapters.", rich_help_panel=_ENGINE)
    ] = None,
    max_context: Annotated[
        int | None, typer.Option(help="Tokens of prompt and completion.", rich_help_panel=_ENGINE)
    ] = None,
    max_batch_tokens: Annotated[int | None, typer.Option(help="Tokens in one step.", rich_help_panel=_ENGINE)] = None,
    max_running: Annotated[
        int | None, typer.Option(help="Choices generating at once.", rich_help_panel=_ENGINE)
    ] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads of the engine.", rich_help_panel=_ENGINE)] = None,
    home: Annotated[Path | None, typer.Option(help="Database, secret and adapters.", rich_help_panel=_FILES)] = None,
    cache: Annotated[Path | None, typer.Option(help="Fetched models.", rich_help_panel=_FILES)] = None,
    database_url: Annotated[str | None, typer.Option(help="SQLite or PostgreSQL.", rich_help_panel=_FILES)] = None,
    log_level: Annotated[str | None, typer.Option(help="DEBUG, INFO, WARNING or ERROR.")] = None,
) -> None:
    """Run the server until Ctrl-C.

    Every setting is also an environment variable, LAMINA_ and its name in capitals; see docs/configuration.md.
    """
    given = {name: value for name, value in locals().items() if name != "demo"}
    # Imported here so that `--help` answers at once.
    from lamina.cli.progress import console_progress
    from lamina.models.hub import resolve
    from lamina.wiring.logs import set_up_logging
    from lamina.wiring.serve import serve as run
    from lamina.wiring.settings import load_settings, unknown_variables

    settings = load_settings(**given)
    set_up_logging(settings.log_level)
    for warning in unknown_variables(os.environ):
        typer.echo(f"lamina: {warning}", err=True)

    def find_model() -> Path:
        with console_progress() as progress:
            return resolve(settings.model, settings.cache, progress)

    run(settings, demo=demo, find_model=find_model, say=typer.echo)
