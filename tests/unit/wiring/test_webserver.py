"""The web server bounds what a stranger can make it hold."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count

import pytest
from fastapi import FastAPI, Request

from lamina.wiring.listener import listen
from lamina.wiring.webserver import WebServer


@asynccontextmanager
async def serving() -> AsyncIterator[int]:
    app = FastAPI()

    @app.post("/")
    async def size(request: Request) -> int:
        return len(await request.body())

    with listen("127.0.0.1", 0) as socket:
        server = WebServer(app, grace_s=1)
        running = asyncio.create_task(server.serve(sockets=[socket]))
        while not server.started:  # noqa: ASYNC110 - uvicorn offers a flag, no event
            await asyncio.sleep(0.01)
        try:
            yield socket.getsockname()[1]
        finally:
            server.stop()
            await running


def many_headers(number: int) -> bytes:
    return f"x-{number}: {'v' * 4000}\r\n".encode()


def one_header(number: int) -> bytes:
    return (b"x-long: " if number == 0 else b"") + b"v" * 4000


def long_path(number: int) -> bytes:
    return b"p" * 4000


@pytest.mark.parametrize("piece", [many_headers, one_header, long_path])
async def test_an_endless_head_is_cut_off(piece) -> None:  # type: ignore[no-untyped-def]
    """400 and a closed connection, whether the head grows by headers, by one header or by its path."""
    async with serving() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST /" if piece is long_path else b"POST / HTTP/1.1\r\nhost: x\r\n")
        sent = 0
        for number in count():
            if reader.at_eof() or sent > 1 << 20 or writer.is_closing():
                break
            sent += len(data := piece(number))
            writer.write(data)
            try:
                await writer.drain()
            except ConnectionError:
                break
            await asyncio.sleep(0)
        assert sent < 1 << 20
        writer.close()


async def test_large_bodies_and_later_requests_pass() -> None:
    """The bound is on heads: a body larger than it is fine, and so is the next request on the connection."""
    async with serving() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for size in (300_000, 5, 300_000):
            writer.write(f"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: {size}\r\n\r\n".encode() + b"b" * size)
            await writer.drain()
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200")
            length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
            assert int(await reader.readexactly(length)) == size
        writer.close()
