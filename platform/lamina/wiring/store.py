"""The embedded store: a Valkey server beside the engine, for as long as the server runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from lamina.config import EngineConfig
from lamina.wiring.valkey import EmbeddedValkey, ValkeyConfig

__all__ = ["EMBEDDED", "embedded_store"]

EMBEDDED = "embedded"
_BYTES = 1 << 30  # unless it is said how many


@contextmanager
def embedded_store(engine: EngineConfig) -> Iterator[EngineConfig]:
    """The engine's configuration with the address of a server of our own, if that is what it asks for.

    Raises ValkeyUnavailable if there is none for this machine.
    """
    if engine.kv_store_url != EMBEDDED:
        yield engine
        return
    valkey = EmbeddedValkey(ValkeyConfig(maxmemory_bytes=engine.kv_store_bytes or _BYTES)).start()
    try:
        # It dies a moment after the engine: what would be saved for the next one is lost all the same.
        yield replace(engine, kv_store_url=str(valkey.address), kv_store_drain_s=0.0)
    finally:
        valkey.stop()
