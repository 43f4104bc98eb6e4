"""`lamina tenants|keys|adapters`, from the command line to the database and back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from fixtures.peft_folders import MODEL_CONFIG, write_adapter
from lamina.cli import adapters as adapters_command
from lamina.cli.access import Access
from lamina.cli.durations import parse_duration
from lamina.cli.main import app
from lamina.cli.sizes import parse_size, size
from lamina.errors import InvalidRequest
from lamina.tenancy.adapters import AdapterService
from lamina.tenancy.database import Database
from lamina.tenancy.keys import KeyService
from lamina.tenancy.memory import MemoryIntake
from lamina.tenancy.quotas import QuotaService
from lamina.tenancy.secret import load_or_create_secret
from lamina.types import TierSize

Run = Callable[..., Result]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LAMINA_HOME", str(tmp_path / "home"))
    for name in ("LAMINA_DATABASE_URL", "LAMINA_ENVIRONMENT"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "home"


@pytest.fixture
def lamina(home: Path) -> Run:
    def run(*arguments: str, fails: int = 0) -> Result:
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == fails, result.output
        return result

    return run


def of_json(result: Result) -> Any:
    return json.loads(result.stdout)


def authenticate(home: Path, raw: str) -> frozenset[str]:
    """As a server over the same home would."""

    async def work() -> frozenset[str]:
        database = Database.open(f"sqlite+aiosqlite:///{home / 'lamina.db'}")
        keys = KeyService(database=database, secret=load_or_create_secret(home / "secret"))
        try:
            return (await keys.authenticate(raw)).scopes
        finally:
            await keys.close()
            await database.close()

    return asyncio.run(work())


def test_tenants(lamina: Run, home: Path) -> None:
    """Make, list, show, change, delete; the first command migrates a fresh home."""
    assert "No tenants yet" in lamina("tenants", "list").stdout
    made = of_json(lamina("tenants", "create", "acme", "--weight", "2", "--json"))
    assert (made["name"], made["weight"], made["status"]) == ("acme", 2.0, "active")
    assert of_json(lamina("tenants", "list", "--json")) == [made]
    assert made["id"] in lamina("tenants", "show", "acme").stdout
    changed = of_json(lamina("tenants", "update", made["id"], "--status", "suspended", "--json"))
    assert (changed["status"], changed["weight"]) == ("suspended", 2.0)
    assert "Deleted tenant acme" in lamina("tenants", "delete", "acme").stdout
    assert of_json(lamina("tenants", "list", "--json")) == []


def test_a_key_from_the_command_line_opens_the_door(lamina: Run, home: Path) -> None:
    """The key alone is on standard output, and a server over the same home accepts it until it is revoked."""
    lamina("tenants", "create", "acme")
    raw = lamina("keys", "create", "--tenant", "acme").stdout.strip()
    assert authenticate(home, raw) == {"inference", "adapters:read", "adapters:write"}
    [record] = of_json(lamina("keys", "list", "--tenant", "acme", "--json"))
    assert record["id"].removeprefix("key_") in raw
    assert raw.rsplit("_", 1)[1] not in lamina("keys", "list").output
    lamina("keys", "revoke", record["id"])
    assert "revoked" in lamina("keys", "list").stdout


def test_rotation(lamina: Run, home: Path) -> None:
    """Both keys work during the overlap; the state says so; a second rotation is refused."""
    lamina("tenants", "create", "acme")
    arguments = ["--tenant", "acme", "--scope", "inference", "--expires-in", "90d", "--json"]
    issued = of_json(lamina("keys", "create", *arguments))
    assert issued["record"]["scopes"] == ["inference"]
    rotated = of_json(lamina("keys", "rotate", issued["record"]["id"], "--overlap", "1h", "--json"))
    assert authenticate(home, issued["key"]) == authenticate(home, rotated["key"]) == {"inference"}
    assert rotated["record"]["expires_at"] == issued["record"]["expires_at"]
    assert "rotated" in lamina("keys", "list").stdout
    again = lamina("keys", "rotate", issued["record"]["id"], fails=1)
    assert rotated["record"]["id"] in again.stderr


def test_adapters(lamina: Run, monkeypatch: pytest.MonkeyPatch, make_adapter_folder: Callable[[str], Path]) -> None:
    """Add twice, list, show and delete one tenant's adapters."""

    async def twin(access: Access) -> AdapterService:
        return AdapterService(database=access.database, intake=MemoryIntake(), base_model="base")

    monkeypatch.setattr(adapters_command, "adapter_service", twin)
    lamina("tenants", "create", "acme")
    lamina("tenants", "create", "globex")
    folder = str(make_adapter_folder("one"))
    added = lamina("adapters", "add", folder, "--tenant", "acme", "--name", "tag")
    assert '"model": "tag" or "tag@1"' in added.stdout
    assert "Nothing to do" in lamina("adapters", "add", folder, "--tenant", "acme", "--name", "tag").stdout
    assert of_json(lamina("adapters", "add", folder, "--tenant", "acme", "--json"))["name"] == "upload-one"
    listed = of_json(lamina("adapters", "list", "--tenant", "acme", "--json"))
    assert [record["name"] for record in listed] == ["upload-one", "tag"]
    assert "tag" in lamina("adapters", "show", "tag@1", "--tenant", "acme").stdout
    for command in ("show", "delete"):
        assert "does not exist" in lamina("adapters", command, "tag", "--tenant", "globex", fails=1).stderr
    assert "Deleted tag@1" in lamina("adapters", "delete", "tag", "--tenant", "acme").stdout
    assert len(of_json(lamina("adapters", "list", "--tenant", "acme", "--json"))) == 1


def test_adding_an_adapter_for_a_model_folder(lamina: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real judge: what fits the configured model is added under its name, what does not is refused."""
    model = tmp_path / "tiny"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(MODEL_CONFIG))
    monkeypatch.setenv("LAMINA_MODEL", str(model))
    monkeypatch.setenv("LAMINA_MAX_LORA_RANK", "4")
    lamina("tenants", "create", "acme")
    good, bad = write_adapter(tmp_path / "good"), write_adapter(tmp_path / "bad", rank=8)
    added = of_json(lamina("adapters", "add", str(good), "--tenant", "acme", "--json"))
    assert (added["name"], added["base_model"], added["rank"]) == ("good", "tiny", 2)
    assert "rank" in lamina("adapters", "add", str(bad), "--tenant", "acme", fails=1).stderr
    refused = lamina("adapters", "add", str(good), "--tenant", "acme", "--name", "tiny", fails=2)
    assert "base model" in refused.stderr


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["tenants", "create", "a b"], 2, "letter or digit"),
        (["tenants", "create", "acme"], 1, "exists already"),
        (["tenants", "create", "b", "--weight", "0"], 2, "above 0"),
        (["tenants", "show", "nobody"], 1, "'nobody'"),
        (["tenants", "update", "acme", "--status", "gone"], 2, "active, suspended"),
        (["keys", "create", "--tenant", "nobody"], 1, "'nobody'"),
        (["keys", "create", "--tenant", "acme", "--scope", "root"], 2, "'root'"),
        (["keys", "create", "--tenant", "acme", "--expires-in", "soon"], 2, "for example 90d"),
        (["keys", "create", "--tenant", "acme", "--expires-in", "0s"], 2, "not in the future"),
        (["keys", "revoke", "key_nobody"], 1, "'key_nobody'"),
        (["keys", "rotate", "key_nobody", "--overlap", "31d"], 2, "30 days"),
        (["adapters", "show", "nothing", "--tenant", "acme"], 1, "'nothing'"),
        (["adapters", "add", "/nowhere", "--tenant", "acme"], 2, "/nowhere"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_mistakes_are_one_line_and_an_exit_status(lamina: Run, arguments: list[str], status: int, message: str) -> None:
    """2 for what the user wrote, 1 for what was found; never a traceback."""
    lamina("tenants", "create", "acme")
    result = lamina(*arguments, fails=status)
    assert message in result.stderr
    assert "Traceback" not in result.output


def test_a_tenant_with_keys_is_deleted_only_by_force(lamina: Run) -> None:
    """The refusal says what it owns and how to go on."""
    lamina("tenants", "create", "acme")
    lamina("keys", "create", "--tenant", "acme")
    refused = lamina("tenants", "delete", "acme", fails=1)
    assert "1 live key" in refused.stderr
    lamina("tenants", "delete", "acme", "--force")
    assert of_json(lamina("keys", "list", "--json")) == []


def test_quotas(lamina: Run, home: Path) -> None:
    """Set, list, take away; what a server has said of the pool bounds them, and `kv top` shows both."""
    lamina("tenants", "create", "acme")
    lamina("tenants", "create", "globex")
    assert "not known" in lamina("kv", "top").stdout
    arguments = ["--reserved-blocks", "40", "--limit-blocks", "80", "--pin-limit-blocks", "10"]
    assert of_json(lamina("quotas", "set", "acme", *arguments, "--json"))["reserved_blocks"] == 40
    note_pool(home, coverable_blocks=60)
    refused = lamina("quotas", "set", "globex", "--reserved-blocks", "21", fails=1)
    assert "leave 20" in refused.stderr
    lamina("quotas", "set", "globex", "--reserved-blocks", "20")
    assert [record["reserved_blocks"] for record in of_json(lamina("quotas", "list", "--json"))] == [40, 20]
    shown = lamina("kv", "top").stdout
    assert "64 blocks of 16 tokens" in shown
    assert "Reserved: 60 of 60" in shown
    assert of_json(lamina("kv", "top", "--json"))["pool"]["coverable_blocks"] == 60
    tiers = ["--host-reserved", "4GiB", "--host-limit", "8 GiB", "--host-pin-limit", "512MiB", "--store-limit", "1.5TB"]
    assert "LAMINA_HOST_KV_BYTES" in lamina("quotas", "set", "acme", *tiers, fails=1).stderr
    note_pool(home, coverable_blocks=60, host=TierSize(6 << 30, 5 << 30))
    record = of_json(lamina("quotas", "set", "acme", *tiers, "--json"))
    assert (record["host_reserved_bytes"], record["host_pin_limit_bytes"]) == (4 << 30, 512 << 20)
    assert (record["reserved_blocks"], record["store_limit_bytes"]) == (0, 1_500_000_000_000)
    rows = [line.split() for line in lamina("quotas", "list").stdout.splitlines() if line.startswith("acme")]
    assert [row[1] for row in rows] == ["gpu", "host", "store"]
    assert rows[1][2:8] == ["4", "GiB", "8", "GiB", "512", "MiB"]
    refused = lamina("quotas", "set", "globex", "--host-reserved", "2GiB", fails=1)
    assert "bytes of host memory" in refused.stderr
    assert (
        "--host-limit '4 potatoes' is no size"
        in lamina("quotas", "set", "acme", "--host-limit", "4 potatoes", fails=2).stderr
    )
    assert "never" in lamina("quotas", "unset", "acme").stdout
    assert "comes out of" in lamina("quotas", "set", "acme", "--pin-limit-blocks", "1", fails=2).stderr
    assert "'nobody'" in lamina("quotas", "set", "nobody", fails=1).stderr
    assert "Example: lamina kv top" in lamina("kv", "top", "--help").stdout


def note_pool(home: Path, *, coverable_blocks: int, host: TierSize | None = None) -> None:
    """As a server over the same home does."""

    async def work() -> None:
        database = Database.open(f"sqlite+aiosqlite:///{home / 'lamina.db'}")
        quotas = QuotaService(database=database, secret=load_or_create_secret(home / "secret"))
        await quotas.note_pool(
            capacity_blocks=64, coverable_blocks=coverable_blocks, block_bytes=1 << 20, block_tokens=16, host=host
        )
        await database.close()

    asyncio.run(work())


@pytest.mark.parametrize("command", ["tenants", "keys", "adapters", "quotas"])
def test_every_command_has_help_with_an_example(command: str) -> None:
    """A command without an example is not finished."""
    from typer.main import get_command

    module = __import__(f"lamina.cli.{command}", fromlist=["app"])
    group: Any = get_command(module.app)
    assert {"list", {"adapters": "add", "quotas": "set"}.get(command, "create")} <= group.commands.keys()
    for sub in group.commands.values():
        assert f"Example: lamina {command} {sub.name}" in sub.help


@pytest.mark.parametrize("text", ["", "90", "d", "-1d", "1.5h", "1w", "1d ", "9999999d", "\u0661d"])
def test_what_is_no_duration(text: str) -> None:
    """The option is named in the message."""
    with pytest.raises(InvalidRequest, match="--overlap"):
        parse_duration(text, param="overlap")


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("0", 0),
        ("4096", 4096),
        ("512MiB", 512 << 20),
        ("4GiB", 4 << 30),
        ("4 gib", 4 << 30),
        ("4G", 4 << 30),
        ("1.5GB", 1_500_000_000),
        ("2TiB", 2 << 40),
        ("7B", 7),
    ],
)
def test_sizes(text: str, number: int) -> None:
    """Powers of 1000 with a plain B, as disks are sold, and else of 1024, as memory is."""
    assert parse_size(text, option="--x") == number


@pytest.mark.parametrize("text", ["", "-1", "GiB", "4XB", "4iB", "1e9", "4GiBB", "\u0664GiB", "1.2.3M", "4 Gi B"])
def test_what_is_no_size(text: str) -> None:
    """The option is named in the message."""
    with pytest.raises(InvalidRequest, match="--host-limit"):
        parse_size(text, option="--host-limit")


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (4096, "4 KiB"),
        (5 << 29, "2.5 GiB"),
        (10**12, "931 GiB"),
        (2**62, "4.194e+06 TiB"),
    ],
)
def test_sizes_for_people(number: int, text: str) -> None:
    assert size(number) == text
