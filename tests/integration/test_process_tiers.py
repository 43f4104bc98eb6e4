"""`lamina serve` with tiers, as a tree of processes: its Valkey and its engine are killed under load.

The engine computes with a random tiny model; gateway, tenants, quotas, pins, supervisors and store are the real ones.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from fixtures.redis import running_redis
from lamina.config import EngineConfig
from lamina.tenancy.principal import Scope
from lamina.wiring.services import open_services
from lamina.wiring.settings import load_settings
from lamina.wiring.valkey import find_valkey

pytestmark = pytest.mark.model

TESTS = Path(__file__).parents[1]
MODEL = "smollm2-135m-instruct"
TALE = "Which tide carries the ferry out of the fjord, and who is at its helm tonight? " * 8
SYSTEM = " ".join(["You are the harbour's pilot and never leave the channel."] * 12)
_LIMIT_S = 60.0  # a test that hangs


@dataclass
class House:
    process: subprocess.Popen[str]
    url: str
    key: str
    run: Path  # where its sockets are
    log: list[str] = field(default_factory=list)

    def child(self, what: str) -> psutil.Process:
        """The running child whose command line contains this."""
        found: list[psutil.Process] = []

        def look() -> bool:
            found[:] = [child for child in psutil.Process(self.process.pid).children() if runs(child, what)]
            return len(found) == 1

        until(look)
        return found[0]

    def client(self) -> httpx.Client:
        headers = {"Authorization": f"Bearer {self.key}"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=_LIMIT_S, trust_env=False)

    def complete(self, prompt: str, tokens: int = 2) -> dict[str, Any]:
        with self.client() as client:
            answer = client.post("/v1/completions", json=body(prompt, tokens))
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def cached(self, prompt: str) -> int:
        return int(self.complete(prompt)["usage"]["prompt_tokens_details"]["cached_tokens"])

    def metric(self, name: str, labels: str = "") -> float:
        with self.client() as client:
            text = client.get("/metrics").text
        rows = [line for line in text.splitlines() if line.startswith((name + " ", name + "{")) and labels in line]
        return sum(float(line.rsplit(" ", 1)[1]) for line in rows)

    def ready(self) -> bool:
        with self.client() as client:
            return client.get("/health").status_code == 200


def body(prompt: str, tokens: int, *, stream: bool = False) -> dict[str, Any]:
    return {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": stream,
    }


class Load(threading.Thread):
    """One client that streams completions, all alike but for a number, until it is told to stop, or one fails."""

    def __init__(self, house: House, name: str, tokens: int) -> None:
        super().__init__(daemon=True)
        self.house, self.title, self.tokens = house, name, tokens
        self.enough = threading.Event()
        self.ends: list[str] = []  # of each stream: what it ended with
        self.first = threading.Event()

    def run(self) -> None:
        with self.house.client() as client:
            while not self.enough.is_set():
                try:
                    self.ends.append(self._stream(client, f"{SYSTEM} {self.title} {len(self.ends)}"))
                except httpx.HTTPError as error:  # the server is gone
                    self.ends.append(type(error).__name__)

    def _stream(self, client: httpx.Client, prompt: str) -> str:
        with client.stream("POST", "/v1/completions", json=body(prompt, self.tokens, stream=True)) as stream:
            if stream.status_code != 200:
                return f"{stream.status_code} {'retry-after' in stream.headers}"
            last = ""
            for line in stream.iter_lines():
                if line.startswith("data: "):
                    self.first.set()
                    last = line.removeprefix("data: ") if line != "data: [DONE]" else last
        event = json.loads(last)
        return str(event["error"]["code"] if "error" in event else event["choices"][0]["finish_reason"])


@pytest.fixture
def house(tmp_path: Path, demo_model: Path) -> Iterator[House]:
    key = asyncio.run(make_tenant(tmp_path / "home", demo_model))
    with serving(demo_model, tmp_path / "home", key) as made:
        yield made


@contextmanager
def serving(model: Path, home: Path, key: str, **environment: str) -> Iterator[House]:
    """A server that is ready; dead at the end in any case."""
    run = Path(tempfile.mkdtemp(prefix="lamina-"))  # a socket's path has to be short
    path = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))
    process = subprocess.Popen(
        [sys.executable, str(TESTS / "support" / "tiny_server.py"), str(model), str(home)],
        env=os.environ
        | {"PYTHONPATH": path, "XDG_RUNTIME_DIR": str(run), "LAMINA_SHUTDOWN_GRACE_S": "1"}
        | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    made = House(process, "", key, run)
    reader = threading.Thread(target=read, args=(made,))
    reader.start()
    try:
        until(lambda: bool(made.url) or process.poll() is not None)
        assert made.url, "".join(made.log)
        yield made
    finally:
        process.kill()
        process.wait()
        reader.join()
        shutil.rmtree(run, ignore_errors=True)


def read(house: House) -> None:
    assert house.process.stdout is not None
    with house.process.stdout as lines:
        for line in lines:
            house.log.append(line)
            if match := re.search(r"is ready after .* s: (http://\S+)/v1", line):
                house.url = match[1]


async def make_tenant(home: Path, model: Path) -> str:
    """A tenant with a reservation and room for pins; its key."""
    tenancy = load_settings(home=home).tenancy()
    async with open_services(tenancy, EngineConfig(model=model, adapters=tenancy.adapters)) as services:
        tenant = await services.tenants.create(name="tester")
        await services.quotas.set(tenant.id, reserved_blocks=24, pin_limit_blocks=12)
        return (await services.keys.issue(tenant.id, name="test", scopes=[Scope.INFERENCE])).raw


def runs(process: psutil.Process, what: str = "") -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE and what in " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return False


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + _LIMIT_S
    while not condition():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.02)


def test_a_killed_valkey_is_replaced_and_nobody_notices(house: House) -> None:
    """Streams go on and end as they should; what is stored in the next server serves the next engine."""
    clients = [Load(house, f"client {number}", tokens=40) for number in range(4)]
    for client in clients:
        client.start()
    house.complete(TALE)
    until(lambda: house.metric("lamina_engine_stored_blocks_total") > 40)  # the tale's are among them
    first = house.child("valkey-server")
    for _ in range(2):
        victim = house.child("valkey-server")
        victim.kill()
        until(lambda victim=victim: house.child("valkey-server").pid != victim.pid)
    assert house.child("valkey-server").pid != first.pid
    house.complete(TALE)  # which the engine knows to be in the store, where it is not any more
    stored = house.metric("lamina_engine_stored_blocks_total")
    until(lambda: house.metric("lamina_engine_stored_blocks_total") > stored + 40)
    # The engine looks every two seconds what the store has lost, and after one loss every four. Until then the crowd
    # must not push the tale out of host memory: nobody would have it any more.
    for _ in range(12):
        house.complete(TALE)
        time.sleep(0.5)
    for client in clients:
        client.enough.set()
    for client in clients:
        client.join()
    ends = [end for client in clients for end in client.ends]
    assert len(ends) >= len(clients)
    assert set(ends) == {"length"}
    assert house.metric("lamina_engine_cancelled_total") == 0

    house.child("--engine").kill()
    until(lambda: not house.ready())
    until(house.ready)
    assert house.cached(TALE) >= 16 * 4
    assert house.metric("lamina_engine_loaded_blocks_total") > 0
    end_of_all(house, signal.SIGKILL)


def test_a_killed_engine_ends_streams_and_finds_its_blocks_again(house: House) -> None:
    """Streams end with an error that says so, later ones are 503 until the next engine is there, or served; it has the
    quotas and pins of the one before, and what that one stored. Nothing of the dead engine stays."""
    order = {"model": MODEL, "prompt": SYSTEM, "ttl": 600, "floor": "gpu"}
    with house.client() as client:
        answers: list[httpx.Response] = []
        until(lambda: answers.append(client.post("/v1/pins", json=order)) or answers[-1].status_code != 503)
        pin = answers[-1]  # 503: quotas were not loaded yet
    assert pin.status_code == 201, pin.text
    blocks = pin.json()["blocks"]
    assert pin.json()["status"] in ("granted", "clipped")
    assert blocks >= 6
    house.complete(TALE)
    clients = [Load(house, f"client {number}", tokens=200) for number in range(3)]
    short = Load(house, "short", tokens=8)
    for each in (*clients, short):
        each.start()
    for each in clients:
        assert each.first.wait(_LIMIT_S), each.ends[:3]
    until(lambda: house.metric("lamina_engine_stored_blocks_total") >= 30)  # the tale's are the oldest
    engine, valkey = house.child("--engine"), house.child("valkey-server")
    sockets = files_below(house.run)
    engine.kill()
    for each in (*clients, short):
        each.enough.set()
    for each in (*clients, short):
        each.join()
    ends = [end for each in (*clients, short) for end in each.ends]
    assert {"engine_unavailable"} <= {*ends} <= {"length", "engine_unavailable", "503 True"}

    until(house.ready)
    assert house.child("--engine").pid != engine.pid
    assert house.child("valkey-server").pid == valkey.pid  # it is the server's, not the engine's
    assert not runs(engine)
    assert files_below(house.run) == sockets
    assert house.metric("lamina_engine_loaded_blocks_total") == 0
    assert house.cached(TALE) >= 16 * 4  # out of the store, the pool was empty
    loaded = house.metric("lamina_engine_loaded_blocks_total")
    assert loaded > 0
    assert house.cached(SYSTEM + " And now?") >= 16 * blocks  # so are a pin's, and it keeps them from now on
    assert house.metric("lamina_engine_loaded_blocks_total") >= loaded + blocks
    with house.client() as client:
        until(lambda: client.get(f"/v1/pins/{pin.json()['id']}").json().get("resident_blocks") == blocks)
        assert client.get(f"/v1/pins/{pin.json()['id']}").json()["blocks"] == blocks
    end_of_all(house, signal.SIGTERM)


def test_a_hot_prefix_outlives_the_engine_although_it_never_left_the_device(house: House) -> None:
    """Three requests for it, nothing that would evict or pin it, and then nobody asks for anything: it is in the store
    when the engine is killed, whole."""
    for number in range(3):
        cached = house.cached(f"{TALE} {number}")
    assert cached >= 16 * 4
    until(lambda: house.metric("lamina_engine_stored_blocks_total") >= cached // 16)
    assert house.metric("lamina_kv_evicted_blocks_total") == 0
    house.child("--engine").kill()
    until(lambda: not house.ready())
    until(house.ready)
    assert house.cached(f"{TALE} again") == cached
    assert house.metric("lamina_engine_loaded_blocks_total") == cached // 16


def test_a_server_that_was_told_to_stop_leaves_its_blocks_to_the_next_one(tmp_path: Path, demo_model: Path) -> None:
    """In a store of others: a rolling restart. One request is under way still."""
    home = tmp_path / "home"
    key = asyncio.run(make_tenant(home, demo_model))
    with running_redis(find_valkey()) as valkey:
        with serving(demo_model, home, key, LAMINA_KV_STORE_URL=str(valkey.address)) as house:
            house.complete(TALE)
            cached = house.cached(TALE)
            assert house.metric("lamina_engine_stored_blocks_total") == 0
            client = Load(house, "the last one", tokens=400)
            client.start()
            assert client.first.wait(_LIMIT_S), client.ends[:3]
            client.enough.set()
            house.process.send_signal(signal.SIGTERM)
            assert house.process.wait(_LIMIT_S) == 0
            client.join(_LIMIT_S)
        [said] = [line for line in house.log if "to the store before the end" in line]
        assert said.rstrip().endswith("none is left")
        with serving(demo_model, home, key, LAMINA_KV_STORE_URL=str(valkey.address)) as house:
            assert house.cached(TALE) == cached
            assert house.cached(f"{SYSTEM} the last one 0") >= 16 * 6
            assert house.metric("lamina_engine_loaded_blocks_total") >= cached // 16


def test_nothing_is_saved_to_a_store_that_ends_as_well(house: House) -> None:
    house.complete(TALE)
    house.process.send_signal(signal.SIGTERM)
    assert house.process.wait(_LIMIT_S) == 0
    assert not [line for line in house.log if "to the store before the end" in line]


def end_of_all(house: House, end: signal.Signals) -> None:
    """Under load: no engine, no Valkey, no shared memory; asked to end, it takes its sockets away, too."""
    shared = files_below(Path("/dev/shm"))
    client = Load(house, "the last one", tokens=200)
    client.start()
    assert client.first.wait(_LIMIT_S), client.ends[:3]
    tree = psutil.Process(house.process.pid).children(recursive=True)
    assert len(tree) >= 2
    client.enough.set()
    house.process.send_signal(end)
    house.process.wait(_LIMIT_S)
    until(lambda: not any(runs(process) for process in tree))
    client.join(_LIMIT_S)
    assert files_below(Path("/dev/shm")) <= shared
    if end is signal.SIGTERM:
        assert {*client.ends} <= {"length", "engine_unavailable"}
        assert not list(house.run.iterdir())


def files_below(folder: Path) -> set[str]:
    return {str(path) for path in folder.rglob("*")} if folder.exists() else set()
