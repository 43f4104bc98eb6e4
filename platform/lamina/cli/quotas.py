"""`lamina quotas`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import typer

from lamina.cli.access import run
from lamina.cli.listing import Json, echo_json, echo_table, instant

if TYPE_CHECKING:
    from lamina.tenancy.records import QuotaRecord

__all__ = ["app"]

app = typer.Typer(add_completion=False, no_args_is_help=True, help="What each tenant is promised of the KV block pool.")

_Tenant = Annotated[str, typer.Argument(help="The tenant's name or id.", metavar="TENANT")]


@app.command("set")
def set_(
    tenant: _Tenant,
    reserved_blocks: Annotated[int, typer.Option(help="Blocks that are there whenever it wants them.", min=0)] = 0,
    limit_blocks: Annotated[
        int | None, typer.Option(help="The most that it may have; the whole pool if left out.", min=1)
    ] = None,
    pin_limit_blocks: Annotated[
        int, typer.Option(help="The most that it may pin, out of what is reserved.", min=0)
    ] = 0,
    json: Json = False,
) -> None:
    """Set a tenant's quota, as a whole: what is left out gets its default. Servers follow within seconds.

    Refused if all reservations together exceed what the pool can cover, once a server has said how large it is.

    Example: lamina quotas set acme --reserved-blocks 2000 --limit-blocks 8000 --pin-limit-blocks 500
    """
    record = run(
        lambda access: access.quotas.set(
            tenant,
            reserved_blocks=reserved_blocks,
            limit_blocks=limit_blocks,
            pin_limit_blocks=pin_limit_blocks,
        )
    )
    if json:
        echo_json(record)
        return
    _table([record])


@app.command()
def unset(tenant: _Tenant, json: Json = False) -> None:
    """Take a tenant's quota away: nothing reserved, no limit, no pins.

    Example: lamina quotas unset acme
    """
    record = run(lambda access: access.quotas.remove(tenant))
    if json:
        echo_json(record)
        return
    _table([record])


@app.command("list")
def list_(json: Json = False) -> None:
    """List all tenants' quotas.

    Example: lamina quotas list --json
    """
    records = run(lambda access: access.quotas.list())
    if json:
        echo_json(records)
        return
    _table(records)


def _table(records: Iterable[QuotaRecord]) -> None:
    echo_table(
        ("TENANT", "RESERVED", "LIMIT", "PIN LIMIT", "WEIGHT", "SET"),
        (
            (
                record.tenant_name,
                str(record.reserved_blocks),
                "-" if record.limit_blocks is None else str(record.limit_blocks),
                str(record.pin_limit_blocks),
                f"{record.weight:g}",
                instant(record.updated_at, none="never"),
            )
            for record in records
        ),
        empty="No tenants yet. Make one: lamina tenants create NAME",
    )
