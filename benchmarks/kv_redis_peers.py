"""What the Redis data plane is measured against: sockets and nothing else, and redis-py in each way it can be used."""

from __future__ import annotations

import importlib
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["RawSocket", "redis_py_paths"]

WINDOW = 8  # requests ahead of their replies
Views = Sequence[memoryview]


class RawSocket:
    """The least that can be done in Python: no deadlines, no errors, no missing values, no recovery."""

    def __init__(self, path: str, connections: int) -> None:
        self._sockets = [socket.socket(socket.AF_UNIX) for _ in range(connections)]
        for sock in self._sockets:
            sock.connect(path)

    def put(self, keys: Sequence[bytes], values: Views) -> None:
        self._split(_put, keys, values)

    def get(self, keys: Sequence[bytes], into: Views) -> None:
        self._split(_get, keys, into)

    def _split(self, work: Callable[..., None], keys: Sequence[bytes], views: Views) -> None:
        shares = [
            (sock, keys[at :: len(self._sockets)], views[at :: len(self._sockets)])
            for at, sock in enumerate(self._sockets)
        ]
        threads = [threading.Thread(target=work, args=share) for share in shares[1:]]
        for thread in threads:
            thread.start()
        work(*shares[0])
        for thread in threads:
            thread.join()

    def __enter__(self) -> RawSocket:
        return self

    def __exit__(self, *_: object) -> None:
        for sock in self._sockets:
            sock.close()


def _put(sock: socket.socket, keys: Sequence[bytes], values: Views) -> None:
    reply = memoryview(bytearray(5))
    for at, (key, value) in enumerate(zip(keys, values, strict=True)):
        head = b"*3\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(key), key, len(value))
        sent = sock.sendmsg((head, value, b"\r\n"))
        assert sent == len(head) + len(value) + 2
        if at >= WINDOW:
            sock.recv_into(reply, 5, socket.MSG_WAITALL)
    for _ in range(min(WINDOW, len(keys))):
        sock.recv_into(reply, 5, socket.MSG_WAITALL)
    assert reply == b"+OK\r\n"


def _get(sock: socket.socket, keys: Sequence[bytes], into: Views) -> None:
    requests = [b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(key), key) for key in keys]
    head, tail = memoryview(bytearray(32)), memoryview(bytearray(2))
    for request in requests[:WINDOW]:
        sock.sendall(request)
    for at, view in enumerate(into):
        line = len(b"$%d\r\n" % len(view))
        sock.recv_into(head, line, socket.MSG_WAITALL)
        got, *_ = sock.recvmsg_into((view, tail), 0, socket.MSG_WAITALL)
        assert got == len(view) + 2
        if at + WINDOW < len(requests):
            sock.sendall(requests[at + WINDOW])


def redis_py_paths(path: str) -> dict[str, Any]:
    """Empty where it is not installed."""
    try:
        redis = importlib.import_module("redis")
    except ImportError:
        return {}
    client = redis.Redis(unix_socket_path=path)
    parser = "hiredis" if importlib.util.find_spec("hiredis") else "no hiredis"
    ways = {"one by one": _OneByOne, "pipeline of 16": _Pipeline, "MSET/MGET of 16": _Many}
    return {f"redis-py ({parser}), {name}": way(client) for name, way in ways.items()}


class _OneByOne:
    def __init__(self, client: Any) -> None:
        self._client = client

    def put(self, keys: Sequence[bytes], values: Views) -> None:
        for key, value in zip(keys, values, strict=True):
            self._client.set(key, value)

    def get(self, keys: Sequence[bytes], into: Views) -> None:
        for key, view in zip(keys, into, strict=True):
            view[:] = self._client.get(key)


class _Pipeline:
    def __init__(self, client: Any) -> None:
        self._client = client

    def put(self, keys: Sequence[bytes], values: Views) -> None:
        for start in range(0, len(keys), 16):
            with self._client.pipeline(transaction=False) as pipeline:
                for key, value in zip(keys[start : start + 16], values[start : start + 16], strict=True):
                    pipeline.set(key, value)
                pipeline.execute()

    def get(self, keys: Sequence[bytes], into: Views) -> None:
        for start in range(0, len(keys), 16):
            with self._client.pipeline(transaction=False) as pipeline:
                for key in keys[start : start + 16]:
                    pipeline.get(key)
                _copy(pipeline.execute(), into[start : start + 16])


class _Many:
    def __init__(self, client: Any) -> None:
        self._client = client

    def put(self, keys: Sequence[bytes], values: Views) -> None:
        for start in range(0, len(keys), 16):
            self._client.mset(dict(zip(keys[start : start + 16], values[start : start + 16], strict=True)))

    def get(self, keys: Sequence[bytes], into: Views) -> None:
        for start in range(0, len(keys), 16):
            _copy(self._client.mget(keys[start : start + 16]), into[start : start + 16])


def _copy(found: Sequence[bytes], into: Views) -> None:
    for value, view in zip(found, into, strict=True):
        view[:] = value
