"""What the supervisor tells a new engine process, once, on its standard input."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from lamina.config import EngineConfig
from lamina.errors import ConfigurationInvalid

__all__ = ["Launch", "new_identity"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Sent on standard input, which no other user can read in the process list."""

    address: str  # where the client listens
    identity: bytes  # whom the client expects
    parent: int  # process id of the supervisor
    config: EngineConfig
    heartbeat_s: float = 0.5
    log_level: str = "INFO"

    def to_json(self) -> bytes:
        return msgspec.json.encode(self, enc_hook=_encode_path)

    @staticmethod
    def from_json(data: bytes) -> Launch:
        """Raises ConfigurationInvalid."""
        try:
            return msgspec.json.decode(data, type=Launch, dec_hook=_decode_path)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigurationInvalid(
                f"The engine process got no valid launch order ({error}); start it through `lamina serve`."
            ) from error


def new_identity() -> bytes:
    """A name that no other engine process has or can guess."""
    return b"core-" + secrets.token_hex(16).encode()


def _encode_path(value: Any) -> str:
    if isinstance(value, Path):
        return str(value)
    raise NotImplementedError(f"cannot encode {type(value).__name__}")


def _decode_path(kind: type, value: Any) -> Any:
    if kind is Path and isinstance(value, str):
        return Path(value)
    raise NotImplementedError(f"cannot decode {kind.__name__}")
