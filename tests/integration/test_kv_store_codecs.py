"""Blocks that one engine wrote to a real server in each codec, found by the next engine."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from fixtures.engines import drive, request, tiny_core
from lamina.errors import ConfigurationInvalid
from lamina.wiring.valkey import EmbeddedValkey
from lamina_kvtier.payload_codecs import EXACT_CODECS

PROMPT = [(7 * token) % 199 + 3 for token in range(97)]  # six full blocks, and a token to compute
FLOOD = [[(11 * token + row) % 199 + 3 for token in range(96)] for row in range(4)]


def served(store: Path, server: EmbeddedValkey, codec: str, *, flood: bool = False) -> tuple[list[int], int]:
    """The answer to the prompt and how many blocks of it came from the store; `flood`: then push its blocks out."""
    core = tiny_core(
        store, num_blocks=16, host_kv_bytes=1 << 20, kv_store_url=str(server.address), kv_store_codec=codec
    )
    try:
        tokens, _ = drive(core, [request("q", PROMPT)])
        loaded = core.stats().loaded_blocks
        for row, prompt in enumerate(FLOOD if flood else ()):
            drive(core, [request(f"f{row}", prompt)])
        until = time.monotonic() + 20
        while flood and core.stats().stored_blocks < 6 and time.monotonic() < until:
            core.step()
    finally:
        core.close()
    return tokens["q", 0], loaded


@pytest.mark.parametrize("codec", sorted(EXACT_CODECS))
def test_exact_codecs_bring_the_same_answer(tmp_path: Path, redis_server: EmbeddedValkey, codec: str) -> None:
    """Whoever wrote them, in whichever exact codec."""
    first, loaded = served(tmp_path, redis_server, codec, flood=True)
    assert loaded == 0
    for reader in EXACT_CODECS:
        assert served(tmp_path, redis_server, reader) == (first, 6)


def test_lossy_blocks_are_found_by_those_who_take_them(tmp_path: Path, redis_server: EmbeddedValkey) -> None:
    first, _ = served(tmp_path, redis_server, "fp8", flood=True)
    assert served(tmp_path, redis_server, "raw") == (first, 0)
    answer, loaded = served(tmp_path, redis_server, "fp8")
    assert loaded == 6
    assert len(answer) == len(first)


def test_an_unknown_codec_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationInvalid, match="fp8, raw"):
        tiny_core(tmp_path, kv_store_url="redis://localhost:1", kv_store_codec="lz4")
