"""The command line's way to a running server over the same data folder: /operator/, with signed tickets."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lamina.errors import EngineUnavailable, InvalidRequest, LaminaError, NotFound

if TYPE_CHECKING:
    from lamina.cli.access import Access

__all__ = ["NoServer", "Server", "find_server", "site_of"]

_TIMEOUT_S = 60.0
_ELSEWHERE = frozenset({301, 302, 303, 307, 308})  # statuses that send to another address


class NoServer(LaminaError):
    """No server answers."""


class Server:
    """One running server. Calls block; raise NoServer if nobody answers, and what the server refuses."""

    def __init__(self, url: str, secret: bytes) -> None:
        from lamina.tenancy.operator import OperatorDoor

        self.url = url.rstrip("/")
        self._door = OperatorDoor(secret)
        # Never through a proxy, nor where an answer sends: a ticket is for this server.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _StayHere())

    def get(self, path: str) -> dict[str, Any]:
        return self._call(path, None)

    def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        return self._call(path, json.dumps(body).encode())

    def _call(self, path: str, data: bytes | None) -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {self._door.ticket(path)}", "Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, data=data, headers=headers)  # noqa: S310 - checked below
        try:
            with self._opener.open(request, timeout=_TIMEOUT_S) as response:
                found: dict[str, Any] = json.load(response)
        except urllib.error.HTTPError as error:
            raise _refusal(error, self.url) from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise NoServer(f"No server answers at {self.url} ({_why(error)}). Start one: lamina serve") from error
        return found


class _StayHere(urllib.request.HTTPRedirectHandler):
    """A redirect is an error like any other status; urllib would follow it, and send Authorization along."""

    def redirect_request(self, *_: object) -> None:
        return None


async def site_of(access: Access) -> tuple[Path, bytes]:
    """The data folder and its secret: what `find_server` takes."""
    return access.settings.home, access.secret


def find_server(site: tuple[Path, bytes], url: str | None) -> Server:
    """At `url`, else where the server of this data folder said that it listens.

    Raises NoServer if none did, InvalidRequest for what is no address.
    """
    from lamina.wiring.address import announced_address

    home, secret = site
    if url is not None and not url.startswith(("http://", "https://")):
        raise InvalidRequest(f"--url takes an address that begins with http:// or https://, not {url!r}.")
    found = url or announced_address(home)
    if found is None:
        raise NoServer(f"No server runs over {home}. Start one: lamina serve; or name one with --url.")
    return Server(found, secret)


def _why(error: Exception) -> str:
    return str(getattr(error, "reason", error)) or type(error).__name__


def _refusal(error: urllib.error.HTTPError, url: str) -> LaminaError:
    try:
        message = str(json.load(error)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        message = f"The server at {url} answered {error.code}."
    match error.code:
        case 401:
            return InvalidRequest(
                f"The server at {url} runs over another data folder than this command, or is no Lamina server of this "
                "version. Set LAMINA_HOME as for the server, or name the right one with --url."
            )
        case 404:
            return NotFound(message)
        case 503:
            return EngineUnavailable(message)
        case code if code in _ELSEWHERE:
            where = error.headers.get("Location", "it does not say where")
            return InvalidRequest(
                f"The server at {url} sends elsewhere ({code}: {where}). A ticket is for one server, so this was not "
                "followed. Name the right one with --url."
            )
        case code if code < 500:
            return InvalidRequest(message)
    return LaminaError(message)
