"""How whoever may read the server's data folder proves that to a running server, without a key of its own.

A ticket is a time and a signature by the server's secret over that time and the path that is called. So nothing more
has to be kept, the secret never travels, and a ticket that somebody catches is good for one path and two minutes.
"""

from __future__ import annotations

import hmac
import time
from collections.abc import Callable
from hashlib import sha256

__all__ = ["OperatorDoor"]

_PREFIX = "lamina_operator"
_LIFETIME_S = 120  # either way: clocks of one machine agree better, those of two might not


class OperatorDoor:
    """Signs and checks tickets. `clock`: Unix seconds."""

    def __init__(self, secret: bytes, *, clock: Callable[[], float] = time.time) -> None:
        self._key = hmac.new(secret, b"lamina operator v1", sha256).digest()
        self._clock = clock

    def ticket(self, path: str) -> str:
        """For `Authorization: Bearer <ticket>` of one request to `path`."""
        return self._signed(path, int(self._clock()))

    def admits(self, ticket: str, path: str) -> bool:
        """Whether `ticket` was signed by this secret, for this path, lately. In constant time but for its form."""
        signed_at = ticket.removeprefix(f"{_PREFIX}_").partition("_")[0]
        if not (signed_at.isascii() and signed_at.isdigit() and len(signed_at) <= 12):
            return False
        genuine = hmac.compare_digest(ticket.encode(), self._signed(path, int(signed_at)).encode())
        return genuine and abs(self._clock() - int(signed_at)) <= _LIFETIME_S

    def _signed(self, path: str, at: int) -> str:
        signature = hmac.new(self._key, f"{at} {path}".encode(), sha256).hexdigest()
        return f"{_PREFIX}_{at}_{signature}"
