"""Random identifiers: lower-case base32, so that they survive shells, URLs and reading aloud."""

from __future__ import annotations

import base64
import secrets

__all__ = ["new_id", "random_text"]


def random_text(num_bytes: int) -> str:
    """`num_bytes` of randomness as [a-z2-7], 8 characters for every 5 bytes."""
    return base64.b32encode(secrets.token_bytes(num_bytes)).decode("ascii").rstrip("=").lower()


def new_id(prefix: str) -> str:
    """A fresh id with 80 random bits, for example "ten_kq2t5m7xw3yz4abc"."""
    return f"{prefix}_{random_text(10)}"
