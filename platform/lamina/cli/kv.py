"""`lamina kv`: who has what of the KV memory, why prompts miss, whether blocks are what they should be."""

from __future__ import annotations

import json as jsonlib
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lamina.cli.access import Access, run
from lamina.cli.kv_view import Overview, block_line, hit_rates
from lamina.cli.listing import Json, echo_json, echo_table, instant
from lamina.cli.operator import NoServer, Server, find_server, site_of
from lamina.cli.sizes import size
from lamina.errors import EngineUnavailable, InvalidRequest

if TYPE_CHECKING:
    from lamina.tenancy.records import PoolRecord, QuotaRecord, Tenant

__all__ = ["app"]

app = typer.Typer(add_completion=False, no_args_is_help=True, help="Look into the KV block tiers.")

_Url = Annotated[str | None, typer.Option(help="The server; found by itself if it runs over the same LAMINA_HOME.")]
_OVERVIEW, _EXPLAIN, _VERIFY = "/operator/kv", "/operator/kv/explain", "/operator/kv/verify"
_BATCH = 64  # blocks of one call while verifying; the engine serves requests between calls


# --- top --------------------------------------------------------------------------------------------------


@app.command()
def top(
    once: Annotated[bool, typer.Option("--once", help="Print it once instead of refreshing it.")] = False,
    interval: Annotated[float, typer.Option(help="Seconds between looks.", min=0.2)] = 2.0,
    url: _Url = None,
    json: Json = False,
) -> None:
    """Show what each tenant has in each tier, what it is promised, and how its prompts fare. Ctrl-C ends it.

    Without a running server it shows what the database knows: the pool, what is promised of it, and pins.

    Example: lamina kv top

    Example: lamina kv top --once --json
    """
    site, pool, quotas = run(_look)
    try:
        server = find_server(site, url)
        found = server.get(_OVERVIEW)
    except (NoServer, EngineUnavailable) as error:
        _from_database(pool, quotas, why=error.message, json=json)
        return
    if json:
        echo_json({"server": server.url} | found)
    elif once or not sys.stdout.isatty():
        _print_overview(Overview(found, quotas))
    else:
        with suppress(KeyboardInterrupt):
            _refresh(server, found, quotas, interval)


async def _look(access: Access) -> tuple[tuple[Path, bytes], PoolRecord | None, tuple[QuotaRecord, ...]]:
    return await site_of(access), await access.quotas.pool(), await access.quotas.list()


def _print_overview(overview: Overview) -> None:
    typer.echo(overview.headline())
    headers, rows = overview.tiers()
    echo_table(headers, rows, empty="No tenants yet. Make one: lamina tenants create NAME")
    headers, rows = overview.fates()
    typer.echo("")
    echo_table(headers, rows, empty="No prompt with a full block has come yet.")


def _refresh(server: Server, found: Mapping[str, Any], quotas: Sequence[QuotaRecord], interval: float) -> None:
    from rich.live import Live

    with Live(_panel(found, quotas), screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(interval)
            found = server.get(_OVERVIEW)
            live.update(_panel(found, quotas), refresh=True)


def _panel(found: Mapping[str, Any], quotas: Sequence[QuotaRecord]) -> Any:
    from rich.console import Group
    from rich.table import Table

    overview = Overview(found, quotas)
    tables: list[Table | str] = []
    for headers, rows in (overview.tiers(), overview.fates()):
        table = Table(box=None, pad_edge=False)
        for at, header in enumerate(headers):
            table.add_column(header, justify="left" if at < 2 or header.startswith("MISSES") else "right")
        for row in rows:
            table.add_row(*row)
        tables += [table, ""]
    return Group(overview.headline(), "", *tables)


def _from_database(pool: PoolRecord | None, quotas: Sequence[QuotaRecord], *, why: str, json: bool) -> None:
    if json:
        echo_json({"server": None, "pool": pool, "tenants": quotas})
        return
    typer.echo(_pool_line(pool, sum(quota.reserved_blocks for quota in quotas)))
    echo_table(
        ("TENANT", "RESERVED", "SHARE", "PINNED", "PIN LIMIT", "LIMIT"),
        (_row(quota, pool) for quota in sorted(quotas, key=lambda quota: -quota.reserved_blocks)),
        empty="No tenants yet. Make one: lamina tenants create NAME",
    )
    typer.echo(f"This is what the database knows; who uses what, a running server says. {why}")


def _pool_line(pool: PoolRecord | None, reserved: int) -> str:
    if pool is None:
        return (
            f"No server has run over this database yet, so the pool's size is not known. Reserved: {reserved} blocks."
        )
    room = size(pool.capacity_blocks * pool.block_bytes)
    return (
        f"{pool.capacity_blocks} blocks of {pool.block_tokens} tokens ({room}), seen {instant(pool.seen_at)}. "
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


# --- explain ----------------------------------------------------------------------------------------------


@app.command()
def explain(
    model: Annotated[str, typer.Option(help="The base model's name, or an adapter's.")],
    tenant: Annotated[
        str | None, typer.Option(help="Whose prompt: name or id. May be left out if there is one tenant.")
    ] = None,
    prompt: Annotated[str | None, typer.Option(help="The prompt of a completion.")] = None,
    prompt_file: Annotated[
        Path | None, typer.Option(help="The same, from a file.", exists=True, dir_okay=False)
    ] = None,
    messages: Annotated[
        Path | None,
        typer.Option(help="A file with a chat's messages, as JSON like the API's.", exists=True, dir_okay=False),
    ] = None,
    url: _Url = None,
    json: Json = False,
) -> None:
    """Say where each block of a prompt is now, or why it is nowhere. Asks a running server, and changes nothing there.

    A missing block has the tier that lost it last, why, and with how much more room it would still be there.

    Example: lamina kv explain --tenant acme --model support-bot --messages chat.json
    """
    text = _one_prompt(prompt, prompt_file, messages)
    site, owner, namespace = run(lambda access: _whose(access, tenant))
    found = find_server(site, url).post(
        _EXPLAIN, {"tenant_id": owner.id, "namespace": namespace, "model": model} | text
    )
    if json:
        echo_json({"tenant": owner.name, "model": model} | found)
        return
    _print_explanation(found)


def _one_prompt(prompt: str | None, prompt_file: Path | None, messages: Path | None) -> dict[str, Any]:
    if sum(given is not None for given in (prompt, prompt_file, messages)) != 1:
        raise InvalidRequest("Give one of --prompt, --prompt-file and --messages.")
    try:
        if messages is not None:
            parsed = jsonlib.loads(messages.read_text(encoding="utf-8"))
            return {"messages": parsed["messages"] if isinstance(parsed, dict) else parsed}
        return {"prompt": prompt if prompt_file is None else prompt_file.read_text(encoding="utf-8")}
    except (OSError, ValueError, LookupError) as error:
        raise InvalidRequest(f"{messages or prompt_file} cannot be used: {error}.") from error


async def _whose(access: Access, tenant: str | None) -> tuple[tuple[Path, bytes], Tenant, str]:
    from lamina.tenancy.secret import kv_namespace

    tenants = await access.tenants.list()
    if tenant is not None:
        owner = await access.tenants.get(tenant)
    elif len(tenants) == 1:
        owner = tenants[0]
    else:
        raise InvalidRequest(f"There are {len(tenants)} tenants; say whose prompt it is: --tenant NAME.")
    return await site_of(access), owner, kv_namespace(access.secret, owner.id)


def _print_explanation(found: Mapping[str, Any]) -> None:
    unit = found["block_tokens"]
    typer.echo(
        f"{found['tokens']} tokens, {found['blocks']} blocks of {unit} tokens ({size(found['block_bytes'])} each) that "
        "a request looks for; the rest is always computed."
    )
    rows = [block_line(run, unit) for run in found["runs"]]
    echo_table(("BLOCKS", "TOKENS", "WHERE", "WHY"), rows, empty="The prompt has no full block to look for.")
    if found["store"] == "unavailable":
        typer.echo("The store does not answer: blocks that only it has are shown as missing.")
    typer.echo("\nHit rate of this tenant's blocks since the engine started, and with more room in one tier:")
    echo_table(("ROOM", "HIT RATE"), hit_rates(found), empty="")


# --- verify -----------------------------------------------------------------------------------------------


@app.command()
def verify(
    everything: Annotated[bool, typer.Option("--all", help="Every block instead of a sample.")] = False,
    sample: Annotated[int, typer.Option(help="Blocks of each tier to check.", min=1)] = 256,
    deadline: Annotated[
        float, typer.Option(help="Seconds after which it stops, saying how far it came.", min=1)
    ] = 60.0,
    url: _Url = None,
    json: Json = False,
) -> None:
    """Check a running server's tiers: all books, and what lies in host memory and in the store.

    Books are checked in one go between two steps, and all requests wait for it: about 70 ms per 10,000 blocks. Host
    memory is compared with a fingerprint taken when each block arrived; blocks of the store are loaded, and their
    headers and checksums compared. Exits 1 if anything is wrong.

    Example: lamina kv verify

    Example: lamina kv verify --all --deadline 600
    """
    server = find_server(run(site_of), url)
    until = time.monotonic() + deadline
    reports = [_verify_tier(server, tier, None if everything else sample, until) for tier in ("gpu", "host", "store")]
    violations = [violation for report in reports for violation in report["violations"]]
    if json:
        echo_json({"server": server.url, "sound": not violations, "tiers": reports})
    else:
        echo_table(("TIER", "CHECKED", "OF", "ABSENT", "VIOLATIONS", ""), map(_verified, reports), empty="")
        for violation in violations:
            typer.echo(violation)
        typer.echo(
            f"{len(violations)} violations: save the log, and restart the server." if violations else "All sound."
        )
    if violations:
        raise typer.Exit(1)


def _verify_tier(server: Server, tier: str, sample: int | None, until: float) -> dict[str, Any]:
    """One tier's batches added up; `complete` unless the deadline came first. `sample`: None: all blocks."""
    total: dict[str, Any] = {"tier": tier, "total": 0, "checked": 0, "absent": 0, "violations": [], "complete": False}
    with _progress(tier) as progress:
        start: int | None = 0
        while start is not None and time.monotonic() < until:
            where = {"start": start} if sample is None else {"seed": secrets.randbits(32)}
            left = _BATCH if sample is None else sample - total["checked"] - total["absent"]
            batch = server.post(_VERIFY, {"tier": tier, "count": min(_BATCH, left)} | where)
            total["total"] = batch["total"]
            for name in ("checked", "absent", "violations"):
                total[name] += batch[name]
            done, wanted = total["checked"] + total["absent"], min(sample or batch["total"], batch["total"])
            progress(done, wanted)
            start = batch["following"] if sample is None else None if done >= wanted else 0
        total["complete"] = start is None
    return total


@contextmanager
def _progress(tier: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on standard error while a tier is checked, where that is a terminal."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bars:
        bar = bars.add_task(f"Checking {tier}", total=None)
        yield lambda done, wanted: bars.update(bar, completed=done, total=wanted)


def _verified(report: Mapping[str, Any]) -> tuple[str, ...]:
    note = "" if report["complete"] else "the deadline came first"
    if report["complete"] and not report["total"]:
        note = "nothing to check"
    numbers = (str(report[name]) for name in ("checked", "total", "absent"))
    return (report["tier"], *numbers, str(len(report["violations"])), note)
