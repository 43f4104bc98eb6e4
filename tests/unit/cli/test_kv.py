"""What `lamina kv` makes of a server's answers."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, ClassVar

import pytest
from rich.console import Console

from lamina.cli import kv
from lamina.cli.kv_view import REASONS, Overview, block_line, hit_rates
from lamina.cli.operator import NoServer, Server
from lamina.errors import EngineUnavailable, InvalidRequest, LaminaError, NotFound
from lamina.tenancy.operator import OperatorDoor
from lamina.tenancy.records import QuotaRecord
from lamina_kvtier.reasons import Reason

SECRET = b"k" * 32
MIB = 1 << 20


def quota(tenant: str, **promised: Any) -> QuotaRecord:
    fields: dict[str, Any] = dict.fromkeys(QuotaRecord.__dataclass_fields__, 0)
    fields |= {name: None for name in fields if "_limit_" in f"_{name}" and "pin" not in name}
    return QuotaRecord(**fields | {"tenant_id": f"ten_{tenant}", "tenant_name": tenant} | promised)


FOUND: dict[str, Any] = {
    "block_bytes": MIB,
    "block_tokens": 16,
    "pool": {"total": 64, "free": 50, "active": 4, "cached": 10},
    "commons": {"host": {"capacity": 512 * MIB, "coverable": 400 * MIB}, "store": None},
    "tenants": [
        {
            "tenant": "ten_acme",
            "active": 4,
            "cached": 8,
            "pinned": 2,
            "pending": 3,
            "host_bytes": 100 * MIB,
            "host_pinned_bytes": 10 * MIB,
            "host_pending_bytes": 0,
            "store_bytes": None,
        }
    ],
    "prefixes": [
        {
            "tenant": "ten_acme",
            "hits": [["gpu", 30], ["host", 10]],
            "misses": [["gpu", "pressure", 20], ["none", "never_stored", 40]],
            "ghost_hits": [["gpu", 8 * MIB, 5], ["gpu", 16 * MIB, 10], ["host", 64 * MIB, 1]],
        }
    ],
}


def test_reasons_are_those_of_the_tiers() -> None:
    assert set(REASONS) == {reason.value for reason in Reason}


def test_a_tenant_has_a_row_for_each_tier_it_is_in() -> None:
    """Or is promised something of; tenants that have nothing are there too."""
    overview = Overview(FOUND, [quota("acme", limit_blocks=32), quota("globex", store_reserved_bytes=MIB)])
    headers, rows = overview.tiers()
    by = {(row[0], row[1]): dict(zip(headers, row, strict=True)) for row in rows}
    assert list(by) == [("acme", "gpu"), ("acme", "host"), ("globex", "gpu"), ("globex", "store")]
    assert (by["acme", "gpu"]["USED"], by["acme", "gpu"]["LIMIT"]) == ("14 MiB", "32 MiB")
    assert (by["acme", "host"]["CACHED"], by["acme", "host"]["PINNED"]) == ("90 MiB", "10 MiB")
    assert by["globex", "store"]["RESERVED"] == "1 MiB"
    assert overview.headline().startswith("gpu 64 MiB, host 512 MiB. Pool: 64 blocks of 16 tokens")


def test_fates_are_rates() -> None:
    _, rows = Overview(FOUND, [quota("acme")]).fates()
    assert rows == [("acme", "100", "40.0%", "30.0%", "10.0%", "0.0%", "none never_stored 66.7%, gpu pressure 33.3%")]


def test_the_live_view_is_the_same_in_tables() -> None:
    console = Console(file=io.StringIO(), width=160)
    console.print(kv._panel(FOUND, [quota("acme")]))
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert "none never_stored 66.7%" in shown
    assert "90 MiB" in shown


def test_more_room_adds_up_the_smaller_steps() -> None:
    rooms = [["gpu", 8 * MIB], ["gpu", 16 * MIB], ["host", 64 * MIB]]
    assert list(hit_rates({"prefixes": FOUND["prefixes"][0], "rooms": rooms})) == [
        ("now", "40.0%"),
        ("gpu +8 MiB", "45.0%"),
        ("gpu +16 MiB", "55.0%"),
        ("host +64 MiB", "41.0%"),
    ]


@pytest.mark.parametrize(
    ("run", "line"),
    [
        (
            {"first": 0, "blocks": 3, "tiers": ["gpu", "host"], "pins": ["pin_1"]},
            ("0-2", "0-47", "gpu host", "pinned by pin_1"),
        ),
        ({"first": 3, "blocks": 1, "tiers": ["store"], "pins": []}, ("3", "48-63", "store", "")),
        (
            {"first": 4, "blocks": 1, "tiers": [], "pins": [], "lost_by": "gpu", "reason": "pressure"}
            | {"room": [["gpu", MIB]]},
            ("4", "64-79", "missing", "the tier was full (gpu: pressure); gpu would have it with 1 MiB more"),
        ),
        (
            {"first": 5, "blocks": 1, "tiers": [], "pins": ["pin_1"], "lost_by": "none", "reason": "never_stored"}
            | {"room": []},
            ("5", "80-95", "missing", REASONS["never_stored"] + "; pinned by pin_1 once it is computed"),
        ),
    ],
    ids=["here", "one", "lost", "never"],
)
def test_blocks_say_where_or_why(run: dict[str, Any], line: tuple[str, ...]) -> None:
    assert block_line(run, 16) == line


# The way to a server


class _Scripted(BaseHTTPRequestHandler):
    status, body, location = 200, b"{}", ""
    seen: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.seen.append(self.headers["authorization"].removeprefix("Bearer "))
        self.send_response(self.status)
        if self.location:
            self.send_header("Location", self.location)
        self.end_headers()
        self.wfile.write(self.body)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.do_GET()

    def log_message(self, *_: object) -> None:
        """Quiet."""


@pytest.fixture
def scripted() -> Iterator[tuple[Server, type[_Scripted]]]:
    class Handler(_Scripted):
        seen: ClassVar[list[str]] = []

    with HTTPServer(("127.0.0.1", 0), Handler) as listener:
        thread = Thread(target=listener.serve_forever)
        thread.start()
        yield Server(f"http://127.0.0.1:{listener.server_port}/", SECRET), Handler
        listener.shutdown()
        thread.join()


def test_calls_carry_a_ticket(scripted: tuple[Server, type[_Scripted]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Straight to the server, whatever proxy is set."""
    server, handler = scripted
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    handler.body = b'{"a": 1}'
    assert server.get("/operator/kv") == {"a": 1}
    assert OperatorDoor(SECRET).admits(handler.seen[0], "/operator/kv")


@pytest.mark.parametrize(
    ("status", "kind"),
    [(401, InvalidRequest), (404, NotFound), (400, InvalidRequest), (503, EngineUnavailable), (500, LaminaError)],
)
def test_refusals_keep_their_message(
    scripted: tuple[Server, type[_Scripted]], status: int, kind: type[LaminaError]
) -> None:
    server, handler = scripted
    handler.status, handler.body = status, json.dumps({"error": {"message": "because"}}).encode()
    with pytest.raises(kind) as refusal:
        server.get("/operator/kv")
    assert type(refusal.value) is kind
    assert ("LAMINA_HOME" if status == 401 else "because") in refusal.value.message
    handler.body = b"<html>"
    with pytest.raises(kind):
        server.get("/operator/kv")


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_ticket_goes_nowhere_else(scripted: tuple[Server, type[_Scripted]], status: int, host: str) -> None:
    """Whoever answers may send a browser on, but not this: it would hand over what opens the door."""
    server, handler = scripted
    port = server.url.rpartition(":")[2]
    handler.status, handler.location = status, f"http://{host}:{port}/elsewhere"
    for call in (lambda: server.get("/operator/kv"), lambda: server.post("/operator/kv/verify", {})):
        with pytest.raises(InvalidRequest, match=f"{status}: http://{host}:{port}/elsewhere"):
            call()
    assert len(handler.seen) == 2  # one each, for what was asked


def test_what_is_no_server_is_none(scripted: tuple[Server, type[_Scripted]]) -> None:
    server, handler = scripted
    handler.body = b"<html>"
    with pytest.raises(NoServer, match="lamina serve"):
        server.get("/operator/kv")
    with pytest.raises(NoServer):
        Server("http://127.0.0.1:9", SECRET).get("/operator/kv")


# Verifying


class _Tiers:
    """Answers like a server that holds 150 blocks in host memory."""

    url = "http://here"

    def __init__(self, violations: int = 0) -> None:
        self.violations, self.orders = violations, list[dict[str, Any]]()

    def post(self, _path: str, order: dict[str, Any]) -> dict[str, Any]:
        self.orders.append(order)
        start = order.get("start", 0)
        checked = min(order["count"], 150 - start)
        stop = start + checked
        found = [f"block {at}" for at in range(start, stop) if at < self.violations]
        following = stop if "start" in order and stop < 150 else None
        return {"total": 150, "checked": checked, "absent": 0, "violations": found, "following": following}


def verified(tiers: Any, sample: int | None, until: float = float("inf")) -> dict[str, Any]:
    return kv._verify_tier(tiers, "host", sample, until)


def test_all_blocks_in_batches() -> None:
    tiers = _Tiers(violations=2)
    found = verified(tiers, None)
    assert [order["start"] for order in tiers.orders] == [0, 64, 128]
    assert (found["checked"], found["violations"], found["complete"]) == (150, ["block 0", "block 1"], True)


def test_a_sample_in_batches() -> None:
    """No more than asked for, and no more than there are."""
    tiers = _Tiers()
    assert verified(tiers, 100)["checked"] == 100
    assert [order["count"] for order in tiers.orders] == [64, 36]
    assert len({order["seed"] for order in tiers.orders}) == 2
    assert verified(_Tiers(), 1000)["checked"] >= 150


def test_a_deadline_ends_it() -> None:
    found = verified(_Tiers(), None, until=0.0)
    assert (found["checked"], found["complete"]) == (0, False)
    assert kv._verified(found)[-1] == "the deadline came first"


@pytest.mark.parametrize("text", ["{", '{"no": 1}'])
def test_messages_are_json(tmp_path: Path, text: str) -> None:
    file = tmp_path / "chat.json"
    file.write_text(text)
    with pytest.raises(InvalidRequest, match="cannot be used"):
        kv._one_prompt(None, None, file)
