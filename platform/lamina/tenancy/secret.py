"""The server's secret: 32 random bytes in a file that only its owner reads, and what is derived from them.

Lose the file and every API key and every cached KV block of a tenant becomes void; copy it to every node that
shares the database.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
from hashlib import sha256
from pathlib import Path

from lamina.errors import ConfigurationInvalid

__all__ = ["SECRET_BYTES", "kv_namespace", "load_or_create_secret"]

SECRET_BYTES = 32


def load_or_create_secret(path: Path) -> bytes:
    """The secret at `path`, made first if there is none; of several processes at once, one makes it.

    Raises ConfigurationInvalid if the file is damaged or readable by others.
    """
    if not path.exists():
        _create(path)
    return _read(path)


def kv_namespace(secret: bytes, tenant_id: str) -> str:
    """The tenant's KV namespace, hex, 64 characters. Cannot be guessed from the tenant's id."""
    return hmac.new(secret, b"lamina kv namespace v1\0" + tenant_id.encode(), sha256).hexdigest()


def _create(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_bytes(SECRET_BYTES))
            file.flush()
            os.fsync(file.fileno())
        # A link appears complete or not at all, and fails if another process was first: then theirs counts.
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)
    finally:
        draft.unlink()


def _read(path: Path) -> bytes:
    with path.open("rb") as file:
        mode = os.fstat(file.fileno()).st_mode
        secret = file.read(SECRET_BYTES + 1)
    if mode & 0o077:
        raise ConfigurationInvalid(
            f"{path} is accessible to other users (mode {mode & 0o777:04o}); run: chmod 600 {path}"
        )
    if len(secret) != SECRET_BYTES:
        raise ConfigurationInvalid(
            f"{path} must hold exactly {SECRET_BYTES} bytes; restore it from a backup, or remove it to start "
            "with a new secret (every API key then stops working)."
        )
    return secret
