"""The listening socket, taken before anything slow starts."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from lamina.errors import ConfigurationInvalid

__all__ = ["base_url", "listen"]

_BACKLOG = 2048


@contextmanager
def listen(host: str, port: int) -> Iterator[socket.socket]:
    """A listening TCP socket, taken before anything slow starts. Port 0 takes a free one.

    Connections wait in it until the gateway accepts. Raises ConfigurationInvalid, saying what to do.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise ConfigurationInvalid(f"{host!r} is no address to listen on: {error}.", param="host") from error
    with socket.socket(family, kind, protocol) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
            listener.listen(_BACKLOG)
        except OSError as error:
            raise ConfigurationInvalid(_why_not(host, port, error), param="port") from error
        yield listener


def base_url(listener: socket.socket) -> str:
    """What a client on this machine calls, without `/v1`."""
    host, port = listener.getsockname()[:2]
    if host in ("0.0.0.0", "::"):  # noqa: S104 - compared, not bound
        host = "127.0.0.1" if host == "0.0.0.0" else "::1"  # noqa: S104
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _why_not(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"Port {port} on {host} is in use; stop what uses it, or take another with --port."
    if error.errno == errno.EACCES:
        return f"Port {port} may not be opened by this user; take one above 1023 with --port."
    return f"Cannot listen on {host}, port {port}: {error.strerror}."
