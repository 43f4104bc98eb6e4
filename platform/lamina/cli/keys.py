"""`lamina keys`."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer

from lamina.cli.access import Access, run
from lamina.cli.durations import parse_duration
from lamina.cli.listing import Json, echo_json, echo_table, instant

if TYPE_CHECKING:
    from lamina.tenancy.records import IssuedKey, KeyRecord

__all__ = ["app"]

app = typer.Typer(add_completion=False, no_args_is_help=True, help="Issue, list, rotate and revoke API keys.")

_DEFAULT_SCOPES = ["inference", "adapters:read", "adapters:write"]
_KeyId = Annotated[str, typer.Argument(help="The key's id, key_...; not the key itself.", metavar="KEY_ID")]


@app.command()
def create(
    tenant: Annotated[str, typer.Option(help="The tenant's name or id.")],
    name: Annotated[str, typer.Option(help="What the key is for; letters, digits, '.', '_' and '-'.")] = "default",
    scope: Annotated[
        list[str] | None,
        typer.Option(
            help="Repeat for several: inference, adapters:read, adapters:write, usage:read, keys:admin. "
            "Default: the first three."
        ),
    ] = None,
    expires_in: Annotated[str | None, typer.Option(help="Lifetime, for example 90d, 12h. Default: no end.")] = None,
    json: Json = False,
) -> None:
    """Issue an API key. It is shown once and stored nowhere.

    Example: lamina keys create --tenant acme --name ci --scope inference --expires-in 90d
    """
    lifetime = None if expires_in is None else parse_duration(expires_in, param="expires-in")

    async def work(access: Access) -> IssuedKey:
        owner = await access.tenants.get(tenant)
        expires_at = None if lifetime is None else datetime.now(UTC) + lifetime
        return await access.keys.issue(owner.id, name=name, scopes=scope or _DEFAULT_SCOPES, expires_at=expires_at)

    _show_issued(run(work), json=json)


@app.command("list")
def list_(
    tenant: Annotated[str | None, typer.Option(help="Only this tenant's, by name or id.")] = None,
    json: Json = False,
) -> None:
    """List keys, without their secrets.

    Example: lamina keys list --tenant acme
    """

    async def work(access: Access) -> tuple[KeyRecord, ...]:
        owner = None if tenant is None else (await access.tenants.get(tenant)).id
        return await access.keys.list(owner)

    keys = run(work)
    if json:
        echo_json(keys)
        return
    now = datetime.now(UTC)
    echo_table(
        ("ID", "NAME", "TENANT", "STATE", "SCOPES", "EXPIRES", "LAST USED"),
        (
            (k.id, k.name, k.tenant_id, _state(k, now), ",".join(sorted(k.scopes)), instant(k.expires_at),
             instant(k.last_used_at))
            for k in keys
        ),
        empty="No keys yet. Issue one: lamina keys create --tenant TENANT",
    )  # fmt: skip


@app.command()
def revoke(key_id: _KeyId, json: Json = False) -> None:
    """End a key now. Running servers follow within 5 seconds.

    Example: lamina keys revoke key_kq2t5m7xw3yz4abc
    """
    record = run(lambda access: access.keys.revoke(key_id))
    if json:
        echo_json(record)
        return
    typer.echo(f"Revoked {record.id} ({record.name}). Running servers refuse it within 5 seconds.")


@app.command()
def rotate(
    key_id: _KeyId,
    overlap: Annotated[
        str, typer.Option(help="How long the old key goes on working, for example 24h; up to 30d.")
    ] = "0s",
    json: Json = False,
) -> None:
    """Issue a successor with the same name and scopes; the old key ends after the overlap.

    Example: lamina keys rotate key_kq2t5m7xw3yz4abc --overlap 24h
    """
    span = parse_duration(overlap, param="overlap")
    rotated = run(lambda access: access.keys.rotate(key_id, overlap=span))
    _show_issued(rotated.issued, json=json)
    if not json:
        typer.echo(f"The old key {rotated.old.id} works until {instant(rotated.old.expires_at)}.", err=True)


def _show_issued(issued: IssuedKey, *, json: bool) -> None:
    """The key alone on standard output, so that `KEY=$(lamina keys create ...)` works; the rest beside it."""
    if json:
        echo_json({"key": issued.raw, "record": issued.record})
        return
    typer.echo(f"API key {issued.record.id}, shown this once; keep it safe:", err=True)
    typer.echo(issued.raw)


def _state(key: KeyRecord, now: datetime) -> str:
    if key.revoked_at is not None:
        return "revoked"
    if key.expires_at is not None and key.expires_at <= now:
        return "expired"
    return "rotated" if key.replaced_by else "live"
