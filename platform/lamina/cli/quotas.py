"""`lamina quotas`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lamina.cli.access import run
from lamina.cli.listing import Json, echo_json, echo_table, instant
from lamina.cli.sizes import parse_size, size

if TYPE_CHECKING:
    from lamina.tenancy.records import QuotaRecord

__all__ = ["app"]

app = typer.Typer(add_completion=False, no_args_is_help=True, help="What each tenant is promised of the KV memory.")


def _size_option(text: str) -> Any:
    return typer.Option(help=text, metavar="SIZE")


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
    host_reserved: Annotated[str, _size_option("The same of host memory: what is there whenever it wants it.")] = "0",
    host_limit: Annotated[str | None, _size_option("The most host memory; all of it if left out.")] = None,
    host_pin_limit: Annotated[str, _size_option("The most that it may pin there, out of what is reserved.")] = "0",
    store_reserved: Annotated[str, _size_option("The same of the store.")] = "0",
    store_limit: Annotated[str | None, _size_option("The most of the store; all of it if left out.")] = None,
    json: Json = False,
) -> None:
    """Set a tenant's quota, as a whole: what is left out gets its default. Servers follow within seconds.

    Blocks are those of the device pool. Host memory and store are counted in bytes, and host memory is kept in whole
    blocks: what is reserved rounds up, the limits round down. Refused if all reservations together exceed what a tier
    can cover, once a server has said how large it is; a store of LMCache's covers nothing, and holds nobody to a limit.

    Example: lamina quotas set acme --reserved-blocks 2000 --limit-blocks 8000 --pin-limit-blocks 500

    Example: lamina quotas set acme --host-reserved 4GiB --host-pin-limit 1GiB --store-limit 64GiB
    """
    record = run(
        lambda access: access.quotas.set(
            tenant,
            reserved_blocks=reserved_blocks,
            limit_blocks=limit_blocks,
            pin_limit_blocks=pin_limit_blocks,
            host_reserved_bytes=parse_size(host_reserved, option="--host-reserved"),
            host_limit_bytes=None if host_limit is None else parse_size(host_limit, option="--host-limit"),
            host_pin_limit_bytes=parse_size(host_pin_limit, option="--host-pin-limit"),
            store_reserved_bytes=parse_size(store_reserved, option="--store-reserved"),
            store_limit_bytes=None if store_limit is None else parse_size(store_limit, option="--store-limit"),
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
        ("TENANT", "TIER", "RESERVED", "LIMIT", "PIN LIMIT", "WEIGHT", "SET"),
        (row for record in records for row in _rows(record)),
        empty="No tenants yet. Make one: lamina tenants create NAME",
    )


def _rows(record: QuotaRecord) -> Iterator[tuple[str, ...]]:
    """One for the device pool, in blocks, and one for each tier below of which something is set."""
    common = f"{record.weight:g}", instant(record.updated_at, none="never")
    limit = "-" if record.limit_blocks is None else str(record.limit_blocks)
    yield (record.tenant_name, "gpu", str(record.reserved_blocks), limit, str(record.pin_limit_blocks), *common)
    host = record.host_reserved_bytes, record.host_limit_bytes, record.host_pin_limit_bytes
    store = record.store_reserved_bytes, record.store_limit_bytes, None
    for tier, (reserved, limit_bytes, pin_limit) in (("host", host), ("store", store)):
        if reserved or limit_bytes is not None:
            numbers = ("-" if number is None else size(number) for number in (reserved, limit_bytes, pin_limit))
            yield (record.tenant_name, tier, *numbers, *common)
