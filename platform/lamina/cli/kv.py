"""`lamina kv`: the block pool as far as the database knows it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from lamina.cli.access import Access, run
from lamina.cli.listing import Json, echo_json, echo_table, instant

if TYPE_CHECKING:
    from lamina.tenancy.records import PoolRecord, QuotaRecord

__all__ = ["app"]

app = typer.Typer(add_completion=False, no_args_is_help=True, help="Look at the KV block pool.")


@app.callback()
def group() -> None:
    """Keeps `top` a subcommand while it is the only one."""


@app.command()
def top(json: Json = False) -> None:
    """Show the pool, what is promised of it, and what tenants have pinned, from the database.

    Which blocks are in use right now only a running server knows: lamina_kv_tenant_blocks of its /metrics.

    Example: lamina kv top
    """
    pool, quotas = run(_look)
    if json:
        echo_json({"pool": pool, "tenants": quotas})
        return
    typer.echo(_pool_line(pool, sum(quota.reserved_blocks for quota in quotas)))
    echo_table(
        ("TENANT", "RESERVED", "SHARE", "PINNED", "PIN LIMIT", "LIMIT"),
        (_row(quota, pool) for quota in sorted(quotas, key=lambda quota: -quota.reserved_blocks)),
        empty="No tenants yet. Make one: lamina tenants create NAME",
    )
    typer.echo("Blocks in use by tenant: lamina_kv_tenant_blocks of the server's /metrics.")


async def _look(access: Access) -> tuple[PoolRecord | None, tuple[QuotaRecord, ...]]:
    return await access.quotas.pool(), await access.quotas.list()


def _pool_line(pool: PoolRecord | None, reserved: int) -> str:
    if pool is None:
        return (
            f"No server has run over this database yet, so the pool's size is not known. Reserved: {reserved} blocks."
        )
    size = pool.capacity_blocks * pool.block_bytes / (1 << 20)
    return (
        f"{pool.capacity_blocks} blocks of {pool.block_tokens} tokens ({size:.0f} MiB), seen {instant(pool.seen_at)}. "
        f"Reserved: {reserved} of {pool.coverable_blocks} that can be promised."
    )


def _row(quota: QuotaRecord, pool: PoolRecord | None) -> tuple[str, ...]:
    share = "-" if pool is None else f"{quota.reserved_blocks / pool.capacity_blocks:.1%}"
    limit = "-" if quota.limit_blocks is None else str(quota.limit_blocks)
    return (
        quota.tenant_name,
        str(quota.reserved_blocks),
        share,
        str(quota.pinned_blocks),
        str(quota.pin_limit_blocks),
        limit,
    )
