"""`lamina tenants`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from lamina.cli.access import Access, run
from lamina.cli.listing import Json, echo_json, echo_table, instant

if TYPE_CHECKING:
    from lamina.tenancy.records import Tenant

__all__ = ["app"]

app = typer.Typer(add_completion=False, no_args_is_help=True, help="Make, list, change and delete tenants.")

_Tenant = Annotated[str, typer.Argument(help="The tenant's name or id.", metavar="TENANT")]
_Weight = Annotated[float, typer.Option(help="Share of the engine relative to other tenants, above 0 to 1000.")]


@app.command()
def create(
    name: Annotated[str, typer.Argument(help="1 to 64 letters, digits, '.', '_' and '-'.")],
    weight: _Weight = 1.0,
    json: Json = False,
) -> None:
    """Make a tenant.

    Example: lamina tenants create acme --weight 2
    """
    tenant = run(lambda access: access.tenants.create(name=name, weight=weight))
    if json:
        echo_json(tenant)
        return
    typer.echo(f"Made tenant {tenant.name} ({tenant.id}).")
    typer.echo(f"Next: lamina keys create --tenant {tenant.name}")


@app.command("list")
def list_(json: Json = False) -> None:
    """List all tenants.

    Example: lamina tenants list --json
    """
    tenants = run(lambda access: access.tenants.list())
    if json:
        echo_json(tenants)
        return
    _table(tenants)


@app.command()
def show(tenant: _Tenant, json: Json = False) -> None:
    """Show one tenant.

    Example: lamina tenants show acme
    """
    found = run(lambda access: access.tenants.get(tenant))
    if json:
        echo_json(found)
        return
    _table([found])


@app.command()
def update(
    tenant: _Tenant,
    weight: Annotated[
        float | None, typer.Option(help="Share of the engine relative to other tenants, above 0 to 1000.")
    ] = None,
    status: Annotated[str | None, typer.Option(help="active, or suspended: its keys are refused.")] = None,
    json: Json = False,
) -> None:
    """Change a tenant's share, suspend it or bring it back. Servers follow within 5 seconds.

    Example: lamina tenants update acme --status suspended
    """
    changed = run(lambda access: access.tenants.update(tenant, weight=weight, status=status))
    if json:
        echo_json(changed)
        return
    _table([changed])


@app.command()
def delete(
    tenant: _Tenant,
    force: Annotated[bool, typer.Option("--force", help="Also if it owns live keys or adapters; they go too.")] = False,
    json: Json = False,
) -> None:
    """Delete a tenant for good.

    Example: lamina tenants delete acme --force
    """

    async def work(access: Access) -> Tenant:
        deleted = await access.tenants.delete(tenant, force=force)
        await access.catalog.remove_unowned(deleted.adapter_digests)
        return deleted.tenant

    deleted = run(work)
    if json:
        echo_json(deleted)
        return
    typer.echo(f"Deleted tenant {deleted.name} ({deleted.id}).")


def _table(tenants: tuple[Tenant, ...] | list[Tenant]) -> None:
    echo_table(
        ("NAME", "ID", "WEIGHT", "STATUS", "CREATED"),
        ((t.name, t.id, f"{t.weight:g}", t.status.value, instant(t.created_at)) for t in tenants),
        empty="No tenants yet. Make one: lamina tenants create NAME",
    )
