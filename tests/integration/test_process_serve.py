"""`lamina serve` as a process: what it prints, answers and leaves behind. The engine does no arithmetic."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest

from lamina.config import EngineConfig
from lamina.tenancy.principal import Scope
from lamina.wiring.listener import listen
from lamina.wiring.services import open_services
from lamina.wiring.settings import load_settings

pytestmark = pytest.mark.model

SERVER = Path(__file__).parents[1] / "support" / "fake_server.py"


@dataclass
class Server:
    process: subprocess.Popen[str]
    url: str
    key: str

    @property
    def engine(self) -> psutil.Process:
        """The engine process, the only child."""
        (child,) = psutil.Process(self.process.pid).children()
        return child

    def client(self) -> httpx.Client:
        return httpx.Client(
            base_url=self.url, headers={"Authorization": f"Bearer {self.key}"}, timeout=60, trust_env=False
        )

    def chat(self, client: httpx.Client, *, tokens: int) -> httpx.Response:
        return client.post("/v1/chat/completions", json=body(tokens))


def body(tokens: int, *, stream: bool = False) -> dict[str, object]:
    messages = [{"role": "user", "content": "Hello"}]
    return {"model": "smollm2-135m-instruct", "messages": messages, "max_tokens": tokens, "stream": stream}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def key(home: Path, demo_model: Path) -> str:
    """A key that is in the database before any server starts."""
    return asyncio.run(make_key(home, demo_model))


async def make_key(home: Path, demo_model: Path) -> str:
    tenancy = load_settings(home=home).tenancy()
    async with open_services(tenancy, EngineConfig(model=demo_model, adapters=tenancy.adapters)) as services:
        tenant = await services.tenants.create(name="tester")
        return (await services.keys.issue(tenant.id, name="test", scopes=[Scope.INFERENCE])).raw


@contextmanager
def serving(model: Path, home: Path, key: str, *arguments: str, grace_s: float = 1) -> Iterator[Server]:
    """A server that is ready; dead at the end in any case."""
    (home / "run").mkdir(exist_ok=True)
    process = start(model, home, *arguments, LAMINA_SHUTDOWN_GRACE_S=str(grace_s), XDG_RUNTIME_DIR=str(home / "run"))
    try:
        yield Server(process, wait_until_ready(process), key)
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
        shutil.rmtree(home / "run")  # a killed server leaves it


def start(model: Path, home: Path, *arguments: str, **variables: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(SERVER), str(model), str(home), *arguments],
        env=os.environ | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_until_ready(process: subprocess.Popen[str]) -> str:
    """The address, from the greeting."""
    assert process.stdout is not None
    seen = []
    for line in process.stdout:
        seen.append(line)
        if match := re.search(r"is ready after .* s: (http://\S+)/v1", line):
            return match[1]
    raise AssertionError("the server ended:\n" + "".join(seen))


def rest_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    with process.stdout:
        return process.stdout.read()


def test_a_ready_server_answers_and_recovers_from_a_dead_engine(demo_model: Path, home: Path, key: str) -> None:
    """Chat works without torch in the gateway; SIGKILL of the engine ends streams by an error event, is 503 with
    Retry-After meanwhile, and heals by itself."""
    with serving(demo_model, home, key) as server, server.client() as client:
        assert client.get("/health").status_code == 200
        answer = server.chat(client, tokens=5)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 5
        assert "libtorch" not in Path(f"/proc/{server.process.pid}/maps").read_text()

        engine = server.engine
        with client.stream("POST", "/v1/chat/completions", json=body(900_000, stream=True)) as stream:
            assert stream.status_code == 200, stream.read()
            lines = stream.iter_lines()
            next(lines)
            engine.kill()
            events = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
        assert json.loads(events[-1])["error"]["code"] == "engine_unavailable"
        refused = server.chat(client, tokens=5)
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) >= 1
        while client.get("/health").status_code != 200:
            pass
        assert server.chat(client, tokens=5).status_code == 200
        assert server.engine.pid != engine.pid


def test_the_command_line_finds_the_server_of_its_folder(demo_model: Path, home: Path, key: str) -> None:
    """`lamina kv` needs neither address nor key, and a tenant's key does not open what it uses."""

    def lamina(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", "from lamina.cli.main import app; app()", "kv", *arguments]
        return subprocess.run(command, env=os.environ | {"LAMINA_HOME": str(home)}, capture_output=True, text=True)

    with serving(demo_model, home, key) as server, server.client() as client:
        assert client.get("/operator/kv").status_code == 401
        top = lamina("top", "--json")
        assert top.returncode == 0, top.stderr
        assert json.loads(top.stdout)["server"] == server.url
        verified = lamina("verify")
        assert (verified.returncode, "All sound." in verified.stdout) == (0, True), verified.stderr
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(30) == 0
    assert not (home / "address").exists()
    assert json.loads(lamina("top", "--json").stdout)["server"] is None


def test_sigterm_under_load_ends_streams_and_leaves_nothing(demo_model: Path, home: Path, key: str) -> None:
    """Running streams end with an error event after the grace time, exit status 0, no process and no socket remain."""
    with serving(demo_model, home, key) as server, server.client() as client:
        engine = server.engine
        sockets = home / "run"
        assert [folder.stat().st_mode & 0o777 for folder in sockets.iterdir()] == [0o700]
        with client.stream("POST", "/v1/chat/completions", json=body(900_000, stream=True)) as stream:
            assert stream.status_code == 200, stream.read()
            lines = stream.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            events = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
        error = json.loads(events[-1])["error"]
        assert (error["code"], "shutting down" in error["message"]) == ("engine_unavailable", True)
        assert server.process.wait(30) == 0
        assert not engine.is_running()
        assert not list(sockets.iterdir())
        assert "Traceback" not in rest_of(server.process)


def test_a_second_signal_ends_it_now(demo_model: Path, home: Path, key: str) -> None:
    """With a long grace time and a running stream, the second Ctrl-C does not wait."""
    with serving(demo_model, home, key, grace_s=600) as server, server.client() as client:
        engine = server.engine
        with client.stream("POST", "/v1/chat/completions", json=body(900_000, stream=True)) as stream:
            next(stream.iter_lines())
            server.process.send_signal(signal.SIGINT)
            assert server.process.stdout is not None
            assert any("Stopping" in line for line in server.process.stdout)
            server.process.send_signal(signal.SIGINT)
            assert server.process.wait(30) == 130
        engine.wait(30)


def test_a_killed_server_leaves_no_engine(demo_model: Path, home: Path, key: str) -> None:
    """SIGKILL of `lamina serve` takes the engine along."""
    with serving(demo_model, home, key) as server:
        engine = server.engine
        server.process.kill()
        engine.wait(30)


def test_an_engine_that_cannot_start_ends_the_server(demo_model: Path, home: Path) -> None:
    """With the engine's own message and one line of ours; nothing keeps trying."""
    process = start(demo_model, home, "--refuse")
    output = rest_of(process)
    assert process.wait(30) == 1
    assert "this configuration cannot work" in output
    assert "exit status 78" in output
    assert "Traceback" not in output


def test_a_taken_port_is_said_at_once(home: Path) -> None:
    """Before the model is even looked for."""
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        process = start(Path("/nowhere"), home, LAMINA_PORT=str(port))
        output = rest_of(process)
    assert process.wait(30) == 1
    assert f"Port {port} on 127.0.0.1 is in use" in output
