"""Birth and death of the engine process, seen from outside."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import zmq

from lamina.engine.wire import (
    Cancel,
    Events,
    Heartbeat,
    Ready,
    Refused,
    Shutdown,
    Submit,
    decode_from_core,
    encode,
)
from lamina.errors import EngineUnavailable
from lamina.types import FinishReason
from lamina.wiring.process import EngineProcess, describe_exit
from support.fake_engine import ENDLESS, REFUSE, harness, request, spawn_fake

_PARENT = """
import sys, time
from support.fake_engine import spawn_fake
process = spawn_fake(sys.argv[1], b"core")
print(process.pid, flush=True)
time.sleep(600)
"""


class RawGateway:
    """A bare ROUTER socket in the gateway's place, to say what the client never would."""

    def __init__(self, folder: str) -> None:
        self.address = f"ipc://{folder}/engine"
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.set(zmq.RCVTIMEO, 30_000)
        self._socket.bind(self.address)

    def send(self, *frames: bytes) -> None:
        self._socket.send_multipart([b"core", *frames])

    def receive(self) -> object:
        """The next message that is not a heartbeat."""
        while True:
            message = decode_from_core(self._socket.recv_multipart()[-1])
            if not isinstance(message, Heartbeat):
                return message

    def close(self) -> None:
        self._context.destroy(linger=0)


@pytest.fixture
def gateway() -> Iterator[RawGateway]:
    with tempfile.TemporaryDirectory(prefix="lamina-") as folder:
        raw = RawGateway(folder)
        yield raw
        raw.close()


@pytest.fixture
def process(gateway: RawGateway) -> Iterator[EngineProcess]:
    process = spawn_fake(gateway.address, b"core")
    yield process
    process.kill()
    asyncio.run(process.wait())


def test_garbage_does_not_stop_the_engine(gateway: RawGateway, process: EngineProcess) -> None:
    """Frames that are not messages, or not for a core, are dropped; the next request is served."""
    assert isinstance(gateway.receive(), Ready)
    for frames in ([b""], [b"\xc1"], [b"\x00" * 1_000_000], [b"a", b"b", b"c"], [encode(Heartbeat())]):
        gateway.send(*frames)
    gateway.send(encode(Cancel("unknown")))
    gateway.send(encode(Submit(request("r", kind=REFUSE))))
    refused = gateway.receive()
    assert isinstance(refused, Refused)
    assert refused.failure.code == "context_length_exceeded"
    gateway.send(encode(Submit(request("a", tokens=1))))
    assert isinstance(gateway.receive(), Events)


def test_shutdown_says_goodbye(gateway: RawGateway, process: EngineProcess) -> None:
    """A Shutdown message cancels what runs, delivers that, and exits 0."""
    assert isinstance(gateway.receive(), Ready)
    gateway.send(encode(Submit(request("a", tokens=ENDLESS))))
    assert isinstance(gateway.receive(), Events)
    gateway.send(encode(Shutdown()))
    reasons = set()
    while FinishReason.CANCELLED not in reasons:
        message = gateway.receive()
        assert isinstance(message, Events)
        reasons |= {event.finish_reason for event in message.events}
    assert asyncio.run(process.wait()) == 0


def test_an_orphaned_engine_ends(gateway: RawGateway) -> None:
    """SIGKILL of the parent leaves no engine process behind, even one that is busy."""
    parent = subprocess.Popen(
        [sys.executable, "-c", _PARENT, gateway.address],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[1],
    )
    assert parent.stdout is not None
    engine = psutil.Process(int(parent.stdout.readline()))
    assert isinstance(gateway.receive(), Ready)
    gateway.send(encode(Submit(request("a", tokens=ENDLESS))))
    assert isinstance(gateway.receive(), Events)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    engine.wait(30)
    assert not engine.is_running()


async def test_a_crash_while_starting_is_reported() -> None:
    """The supervisor gives up at once and says how the process ended."""
    async with harness("--crash") as engine:
        with pytest.raises(EngineUnavailable, match="exit status 3"):
            await asyncio.wait_for(engine.watching, 30)
        assert not engine.client.ready


def test_exits_are_described_for_people() -> None:
    """Signals and statuses read differently."""
    assert describe_exit(-9) == "killed by signal 9"
    assert describe_exit(70) == "exit status 70"
