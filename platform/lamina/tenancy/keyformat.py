"""The written form of an API key: lamina_<env>_<id>_<secret>. Pure text, no database."""

from __future__ import annotations

import hmac
import re
from dataclasses import dataclass, field
from hashlib import sha256

from lamina.errors import ConfigurationInvalid, Unauthenticated
from lamina.tenancy.ids import random_text

__all__ = ["INVALID_KEY", "MAX_KEY_CHARS", "ApiKey", "check_environment"]

MAX_KEY_CHARS = 160  # checked before anything else looks at what a stranger sent
INVALID_KEY = (
    "The API key is not valid. Send 'Authorization: Bearer lamina_...' with a key that 'lamina keys create' "
    "or your administrator gave you."
)

_KEY_ID_BYTES = 10
_SECRET_BYTES = 32
_KEY = re.compile(r"lamina_([a-z0-9]{1,16})_([a-z2-7]{16})_([a-z2-7]{52})", re.ASCII)
_ENVIRONMENT = re.compile(r"[a-z0-9]{1,16}", re.ASCII)


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key taken apart. Knowing its form says nothing about whether it is valid."""

    env: str
    public_id: str
    secret: str = field(repr=False)

    @classmethod
    def generate(cls, env: str) -> ApiKey:
        """A fresh key with 256 secret bits."""
        return cls(env, random_text(_KEY_ID_BYTES), random_text(_SECRET_BYTES))

    @classmethod
    def parse(cls, raw: object) -> ApiKey:
        """Raises Unauthenticated for whatever is not a key, always with the message of an unknown key."""
        if not isinstance(raw, str) or len(raw) > MAX_KEY_CHARS:
            raise Unauthenticated(INVALID_KEY)
        match = _KEY.fullmatch(raw)
        if match is None:
            raise Unauthenticated(INVALID_KEY)
        return cls(*match.groups())

    @property
    def key_id(self) -> str:
        return f"key_{self.public_id}"

    @property
    def raw(self) -> str:
        return f"lamina_{self.env}_{self.public_id}_{self.secret}"

    def mac(self, pepper: bytes) -> bytes:
        """HMAC-SHA256 of the whole key, 32 bytes: what the database keeps.

        The secret has 256 random bits, so no slow hash is needed; the pepper makes a stolen table useless.
        """
        return hmac.new(pepper, b"lamina api key v1\0" + self.raw.encode("ascii"), sha256).digest()


def check_environment(env: str) -> str:
    """Raises ConfigurationInvalid unless `env` can stand in a key."""
    if _ENVIRONMENT.fullmatch(env) is None:
        raise ConfigurationInvalid(
            f"The environment {env!r} must be 1 to 16 of a-z and 0-9, for example 'live' or 'test'.",
            param="environment",
        )
    return env
