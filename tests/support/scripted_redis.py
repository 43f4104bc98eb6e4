"""A server that answers each command with whatever bytes a test wants."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import BinaryIO

__all__ = ["ScriptedRedis"]

Script = Callable[[list[bytes]], bytes | None]
"""From a command's arguments to the answer; None: hang up."""

GREETINGS = {b"HELLO": b"-ERR unknown command 'HELLO'\r\n", b"PING": b"+PONG\r\n", b"SELECT": b"+OK\r\n"}


class ScriptedRedis:
    """Listens on 127.0.0.1. Greets like an old server; everything else is up to `script`, which may be changed."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.commands: list[list[bytes]] = []
        self.connections = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, name="scripted-redis", daemon=True)]
        self._threads[0].start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self._listener.getsockname()[1]}"

    def close(self) -> None:
        for sock in (self._listener, *self._sockets):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(5)
        self._listener.close()

    def __enter__(self) -> ScriptedRedis:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                sock, _ = self._listener.accept()
                self.connections += 1
                self._sockets.append(sock)
                thread = threading.Thread(target=self._serve, args=(sock,), name="scripted-redis", daemon=True)
                self._threads.append(thread)
                thread.start()

    def _serve(self, sock: socket.socket) -> None:
        with sock, sock.makefile("rb") as stream, suppress(OSError):
            while (command := _read(stream)) is not None:
                self.commands.append(command)
                answer = GREETINGS.get(command[0]) or self.script(command)
                if answer is None:
                    return
                sock.sendall(answer)


def _read(stream: BinaryIO) -> list[bytes] | None:
    head = stream.readline()
    if not head:
        return None
    arguments = []
    for _ in range(int(head[1:])):
        length = int(stream.readline()[1:])
        arguments.append(stream.read(length + 2)[:-2])
    return arguments
