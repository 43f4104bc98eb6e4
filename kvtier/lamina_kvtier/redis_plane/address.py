"""Where a server is, and how to prove who we are.

    redis://[[user]:password@]host[:port][/database]
    rediss://...                                 the same, over TLS
    unix://[[user]:password@]/path/to/socket[?db=database]

Options: `db`, and for TLS `ssl_ca_certs`, `ssl_certfile`, `ssl_keyfile`, spelled as redis-py spells them. There is none
to switch verification off. Parts with special characters are percent-encoded.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

__all__ = ["InvalidAddress", "RedisAddress"]

_TLS_OPTIONS = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
_PORT = 6379
_PATH_BYTES = 104  # of a unix socket; 108 on Linux, less on macOS
_MAX_DATABASE = 2**31 - 1


class InvalidAddress(ValueError):
    """A URL that names no server. The message never repeats a password."""


@dataclass(frozen=True, slots=True)
class RedisAddress:
    """A parsed URL. Exactly one of `host` and `path` is set."""

    host: str | None = None
    port: int = _PORT
    path: str | None = None
    database: int = 0
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    tls: bool = False
    ca_file: str | None = None  # None: the system's authorities
    cert_file: str | None = None  # of this client, if the server wants one
    key_file: str | None = None

    @staticmethod
    def parse(url: str) -> RedisAddress:
        """Raises InvalidAddress."""
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise InvalidAddress(f"The Redis URL is none: {_safe(str(error), url)}.") from None
        if parts.fragment:
            raise InvalidAddress("A Redis URL has no '#' part; write %23 for a '#' in a password.")
        options = _options(parts)
        user, password = _credentials(parts)
        if parts.scheme == "unix":
            path = _socket_path(parts)
            return RedisAddress(path=path, database=_database(options.get("db", "")), user=user, password=password)
        if parts.scheme not in ("redis", "rediss"):
            raise InvalidAddress(f"A Redis URL starts with redis://, rediss:// or unix://, not {parts.scheme!r}.")
        if not parts.hostname:
            raise InvalidAddress("The Redis URL has no host: redis://host:6379/0.")
        return RedisAddress(
            host=parts.hostname,
            port=_PORT if port is None else port,
            database=_path_database(parts, options),
            user=user,
            password=password,
            tls=parts.scheme == "rediss",
            ca_file=options.get("ssl_ca_certs"),
            cert_file=options.get("ssl_certfile"),
            key_file=options.get("ssl_keyfile"),
        )

    def __str__(self) -> str:
        """For people and logs: no credentials."""
        if self.path is not None:
            return f"unix://{self.path}"
        host = f"[{self.host}]" if ":" in (self.host or "") else self.host
        return f"{'rediss' if self.tls else 'redis'}://{host}:{self.port}/{self.database}"

    def tls_context(self) -> ssl.SSLContext | None:
        """None without TLS. Raises InvalidAddress for files that cannot be read."""
        if not self.tls:
            return None
        try:
            context = ssl.create_default_context(cafile=self.ca_file)
            if self.cert_file is not None:
                context.load_cert_chain(self.cert_file, self.key_file)
        except (OSError, ssl.SSLError) as error:
            raise InvalidAddress(f"TLS for {self} cannot be set up: {error}.") from None
        return context


def _options(parts: SplitResult) -> dict[str, str]:
    allowed = {"redis": ("db",), "unix": ("db",), "rediss": ("db", *_TLS_OPTIONS)}.get(parts.scheme, ())
    options: dict[str, str] = {}
    for name, value in parse_qsl(parts.query, keep_blank_values=True):
        if name not in allowed:
            raise InvalidAddress(f"A {parts.scheme}:// URL has no option {name!r}; there are {', '.join(allowed)}.")
        if name in options or not value:
            raise InvalidAddress(f"The option {name!r} of a Redis URL is given once, with a value.")
        options[name] = value
    if "ssl_keyfile" in options and "ssl_certfile" not in options:
        raise InvalidAddress("ssl_keyfile needs ssl_certfile.")
    return options


def _credentials(parts: SplitResult) -> tuple[str | None, str | None]:
    user = unquote(parts.username) if parts.username else None
    password = unquote(parts.password) if parts.password else None
    if user is not None and password is None:
        raise InvalidAddress("A user without a password; a password alone is written redis://:password@host.")
    return user, password


def _socket_path(parts: SplitResult) -> str:
    if parts.hostname or parts.port:
        raise InvalidAddress("A unix:// URL has three slashes: unix:///run/redis.sock.")
    path = unquote(parts.path)
    if path in ("", "/") or "\0" in path:
        raise InvalidAddress("A unix:// URL names the socket's path: unix:///run/redis.sock.")
    if len(path.encode()) >= _PATH_BYTES:
        raise InvalidAddress(f"The socket's path is longer than the {_PATH_BYTES - 1} bytes that sockets can have.")
    return path


def _path_database(parts: SplitResult, options: dict[str, str]) -> int:
    named = parts.path.strip("/")
    if named and "db" in options:
        raise InvalidAddress("The database is named twice, in the path and as option 'db'.")
    return _database(named or options.get("db", ""))


def _database(text: str) -> int:
    if not text:
        return 0
    if not (text.isascii() and text.isdigit()) or int(text) > _MAX_DATABASE:
        raise InvalidAddress(f"A database is a number, not {text[:32]!r}.")
    return int(text)


def _safe(message: str, url: str) -> str:
    """urllib's messages may quote what it could not read, and that may be a password."""
    return "its port is no number" if "ort" in message else "it cannot be read" if url else "it is empty"
