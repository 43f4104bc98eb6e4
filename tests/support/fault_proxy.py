"""A proxy between a client and a server that breaks what passes through it, in the ways that networks and servers do.

with FaultProxy(upstream_socket_path) as proxy:
    proxy.faults = Faults(delay_s=0.1)      # takes effect at once, for open connections too
    connect to proxy.address
"""

from __future__ import annotations

import select
import socket
import ssl
import threading
import time
from contextlib import suppress
from dataclasses import dataclass

__all__ = ["FaultProxy", "Faults"]

_PIECE = 64 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """What happens to the server's answers."""

    delay_s: float = 0.0  # before each piece of up to 64 KiB
    cut_after: int | None = None  # bytes of answers on one connection, then it is closed
    flip_at: int | None = None  # one bit of that byte of the answers on a connection
    silent: bool = False  # nothing comes any more
    refuse: bool = False  # new connections are closed at once


class FaultProxy:
    """Listens on 127.0.0.1, speaks to a unix socket. With `tls` it speaks TLS to clients."""

    def __init__(self, upstream: str, tls: ssl.SSLContext | None = None) -> None:
        self.faults = Faults()
        self.accepted = 0
        self._upstream, self._tls = upstream, tls
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._closed = False
        self._start(self._accept)

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    def drop_all(self) -> None:
        """Closes every open connection."""
        with self._lock:
            sockets = list(self._sockets)
        for sock in sockets:
            _hang_up(sock)

    def close(self) -> None:
        self._closed = True
        _hang_up(self._listener)
        self._listener.close()
        self.drop_all()
        for thread in self._threads:
            thread.join(5)
        for sock in self._sockets:
            sock.close()

    def __enter__(self) -> FaultProxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self.accepted += 1
            if self.faults.refuse:
                client.close()
                continue
            self._start(self._serve, client)

    def _serve(self, client: socket.socket) -> None:
        server = socket.socket(socket.AF_UNIX)
        with self._lock:
            self._sockets += [client, server]
        with suppress(OSError):
            if self._tls is not None:
                client = self._tls.wrap_socket(client, server_side=True)
                with self._lock:
                    self._sockets.append(client)
            server.connect(self._upstream)
            if not self._closed:
                self._carry(client, server)
        _hang_up(client)
        _hang_up(server)

    def _carry(self, client: socket.socket, server: socket.socket) -> None:
        """Both directions on one thread: a TLS session is not for two."""
        passed = 0
        while True:
            waiting = isinstance(client, ssl.SSLSocket) and client.pending() > 0
            ready = [client] if waiting else select.select([client, server], [], [])[0]
            if client in ready:
                if not (data := client.recv(_PIECE)):
                    return
                server.sendall(data)
            if server in ready:
                if not (data := server.recv(_PIECE)):
                    return
                passed = self._answer(client, bytearray(data), passed)

    def _answer(self, client: socket.socket, data: bytearray, passed: int) -> int:
        """Passes on what the faults leave of it; `passed` bytes went before. Raises OSError to hang up."""
        faults = self.faults
        time.sleep(faults.delay_s)
        if faults.silent:
            return passed
        if faults.flip_at is not None and passed <= faults.flip_at < passed + len(data):
            data[faults.flip_at - passed] ^= 1
        if faults.cut_after is not None and passed + len(data) > faults.cut_after:
            client.sendall(data[: max(0, faults.cut_after - passed)])
            raise ConnectionAbortedError("cut")
        client.sendall(data)
        return passed + len(data)

    def _start(self, target: object, *arguments: object) -> None:
        thread = threading.Thread(target=target, args=arguments, name="fault-proxy", daemon=True)  # type: ignore[arg-type]
        with self._lock:
            self._threads.append(thread)
        thread.start()


def _hang_up(sock: socket.socket) -> None:
    with suppress(OSError):
        socket.socket.shutdown(sock, socket.SHUT_RDWR)
