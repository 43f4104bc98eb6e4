"""`lamina adapters`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lamina.cli.access import Access, adapter_service, run
from lamina.cli.listing import Json, echo_json, echo_table, instant

if TYPE_CHECKING:
    from lamina.tenancy.records import AdapterRecord, DeletedAdapters

__all__ = ["app"]

app = typer.Typer(add_completion=False, no_args_is_help=True, help="Add, list and delete tenants' LoRA adapters.")

_Tenant = Annotated[str, typer.Option(help="The owner's name or id.")]
_Adapter = Annotated[
    str, typer.Argument(help="NAME (all versions or the latest), NAME@VERSION, or the id adp_...", metavar="ADAPTER")
]


@app.command()
def add(
    folder: Annotated[
        Path,
        typer.Argument(
            help="A PEFT folder with adapter_config.json and adapter_model.safetensors.",
            exists=True,
            file_okay=False,
        ),
    ],
    tenant: _Tenant,
    name: Annotated[str | None, typer.Option(help="The model name in the API. Default: the folder's name.")] = None,
    json: Json = False,
) -> None:
    """Validate a PEFT folder and add it as the next version of NAME.

    Example: lamina adapters add ./out/support --tenant acme --name support
    """

    async def work(access: Access) -> AdapterRecord:
        owner = await access.tenants.get(tenant)
        service = await adapter_service(access)
        return await service.intake(owner.id, name=name or folder.resolve().name, folder=folder)

    record = run(work)
    if json:
        echo_json(record)
        return
    done = "Added" if record.created else "Nothing to do: the same content is already"
    typer.echo(f"{done} {record.reference} ({record.id}, rank {record.rank}, {record.size_bytes} bytes).")
    typer.echo(f'Clients ask for it as "model": "{record.name}" or "{record.reference}".')


@app.command("list")
def list_(tenant: _Tenant, json: Json = False) -> None:
    """List a tenant's adapters, newest first.

    Example: lamina adapters list --tenant acme
    """

    async def work(access: Access) -> list[AdapterRecord]:
        owner = await access.tenants.get(tenant)
        found: list[AdapterRecord] = []
        page = await access.catalog.list(owner.id)
        found.extend(page.data)
        while page.has_more:
            page = await access.catalog.list(owner.id, after=page.last_id)
            found.extend(page.data)
        return found

    records = run(work)
    if json:
        echo_json(records)
        return
    _table(records)


@app.command()
def show(adapter: _Adapter, tenant: _Tenant, json: Json = False) -> None:
    """Show one adapter version; for a bare NAME the latest.

    Example: lamina adapters show support@2 --tenant acme
    """

    async def work(access: Access) -> AdapterRecord:
        return await access.catalog.get((await access.tenants.get(tenant)).id, adapter)

    record = run(work)
    if json:
        echo_json(record)
        return
    _table([record])


@app.command()
def delete(adapter: _Adapter, tenant: _Tenant, json: Json = False) -> None:
    """Retire one version, or all versions of a bare NAME. Version numbers are never used again.

    A running server refuses it within seconds, and unloads it with its next round of housekeeping.

    Example: lamina adapters delete support@1 --tenant acme
    """

    async def work(access: Access) -> DeletedAdapters:
        return await access.catalog.delete((await access.tenants.get(tenant)).id, adapter)

    deleted = run(work)
    if json:
        echo_json(deleted)
        return
    typer.echo(f"Deleted {', '.join(record.reference for record in deleted.retired)}.")


def _table(records: list[AdapterRecord]) -> None:
    echo_table(
        ("NAME", "VERSION", "ID", "BASE MODEL", "RANK", "BYTES", "STATUS", "CREATED", "DIGEST"),
        (
            (r.name, str(r.version), r.id, r.base_model, str(r.rank), str(r.size_bytes), r.status.value,
             instant(r.created_at), r.digest[:12])
            for r in records
        ),
        empty="No adapters yet. Add one: lamina adapters add FOLDER --tenant TENANT",
    )  # fmt: skip
