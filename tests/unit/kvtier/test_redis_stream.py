"""Bytes of one connection, with a peer that reads as it likes."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lamina_kvtier.redis_plane import RedisAddress
from lamina_kvtier.redis_plane.stream import Stream, open_stream

PATIENCE_S = 60.0
DEADLINE_S = 0.2
MORE_THAN_FITS = os.urandom(16 << 20)  # into the buffers of both sides
Peer = Callable[[Callable[[socket.socket], None]], Stream]


@pytest.fixture(params=["unix", "tcp"])
def peer(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Peer]:
    """Connects to a server that does with its side what it is told, once. The small buffer is the reader's."""
    unix = request.param == "unix"
    listener = socket.socket(socket.AF_UNIX if unix else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
    listener.bind(str(tmp_path / "s") if unix else ("127.0.0.1", 0))
    listener.listen()
    url = f"unix://{tmp_path / 's'}" if unix else f"redis://127.0.0.1:{listener.getsockname()[1]}"
    streams: list[Stream] = []
    threads: list[threading.Thread] = []

    def meet(behave: Callable[[socket.socket], None]) -> Stream:
        stream = open_stream(RedisAddress.parse(url), None, time.monotonic() + PATIENCE_S)
        streams.append(stream)
        other, _ = listener.accept()

        def serve() -> None:
            with other:
                behave(other)

        threads.append(threading.Thread(target=serve))
        threads[-1].start()
        return stream

    yield meet
    for stream in streams:
        stream.close()
    for thread in threads:
        thread.join()
    listener.close()


@pytest.mark.parametrize("pause_s", [DEADLINE_S / 4, 0.004])
def test_a_reader_that_trickles_does_not_hold_a_send_past_its_deadline(peer: Peer, pause_s: float) -> None:
    """It takes a piece well within each deadline, or even each timer of the kernel, but all of them take seconds."""
    enough = threading.Event()

    def read(sock: socket.socket) -> None:
        while not enough.wait(pause_s) and sock.recv(1 << 15):
            pass

    stream = peer(read)
    stream.until(time.monotonic() + DEADLINE_S)
    with pytest.raises(TimeoutError, match="deadline"):
        stream.send([MORE_THAN_FITS], len(MORE_THAN_FITS))
    enough.set()


def test_nothing_is_sent_past_the_deadline(peer: Peer) -> None:
    got = bytearray()
    stream = peer(lambda sock: got.extend(sock.recv(1)))
    stream.until(time.monotonic() - 1)
    with pytest.raises(TimeoutError, match="deadline"):
        stream.send([b"x"], 1)
    stream.close()


def test_a_reader_that_stops_ends_a_send_at_its_deadline(peer: Peer) -> None:
    enough = threading.Event()
    stream = peer(lambda _: bool(enough.wait(PATIENCE_S)))
    stream.until(time.monotonic() + DEADLINE_S)
    with pytest.raises(TimeoutError, match="deadline"):
        stream.send([MORE_THAN_FITS], len(MORE_THAN_FITS))
    enough.set()


def test_what_does_not_fit_at_once_arrives_whole(peer: Peer) -> None:
    """And so do more frames than one system call takes."""
    got, end = bytearray(), threading.Event()

    def read(sock: socket.socket) -> None:
        while piece := sock.recv(1 << 15):
            got.extend(piece)
        end.set()

    stream = peer(read)
    stream.until(time.monotonic() + PATIENCE_S)
    at, frames = 0, list[bytes | memoryview]()
    for number in range(1500):
        size = 1 + number * 17 % 20_000
        frames.append(memoryview(MORE_THAN_FITS)[at : at + size] if number % 2 else MORE_THAN_FITS[at : at + size])
        at += len(frames[-1])
    stream.send(frames, at)
    stream.interrupt()
    assert end.wait(PATIENCE_S)
    assert got == MORE_THAN_FITS[:at]


def test_a_send_under_way_can_be_interrupted(peer: Peer) -> None:
    began = threading.Event()

    def read(sock: socket.socket) -> None:
        sock.recv(1)
        began.set()
        while sock.recv(1, socket.MSG_PEEK) and not stopped.wait(0.01):
            pass

    stopped = threading.Event()
    stream = peer(read)
    stream.until(time.monotonic() + PATIENCE_S)
    other = threading.Thread(target=lambda: (began.wait(PATIENCE_S), stream.interrupt()))
    other.start()
    with pytest.raises(ConnectionError):
        stream.send([MORE_THAN_FITS], len(MORE_THAN_FITS))
    stopped.set()
    other.join()


def test_a_reader_that_hangs_up_ends_a_send(peer: Peer) -> None:
    stream = peer(lambda sock: sock.recv(1) and None)
    stream.until(time.monotonic() + PATIENCE_S)
    with pytest.raises(ConnectionError):
        stream.send([MORE_THAN_FITS], len(MORE_THAN_FITS))
