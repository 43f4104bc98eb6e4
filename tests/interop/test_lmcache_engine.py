"""An engine on an LMCache store: the next engine finds its blocks there, and another tenant's never."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("lmcache", reason="lmcache is not installed; `make lmcache-check` runs these tests")

from fixtures.engines import drive, request, tiny_core
from fixtures.redis import redis_servers, running_redis
from lamina.wiring.valkey import EmbeddedValkey

PROMPT = [(7 * token) % 199 + 3 for token in range(97)]  # six full blocks, and a token to compute
FLOOD = [[(11 * token + row) % 199 + 3 for token in range(96)] for row in range(4)]
TRIES = 5  # look-ups give up after a quarter of a second, and the machine that runs tests is busy


@pytest.fixture
def server() -> Iterator[EmbeddedValkey]:
    found = redis_servers()
    if not found:
        pytest.skip("no server here")
    with running_redis(next(iter(found.values()))) as running:
        yield running


def served(store: Path, server: EmbeddedValkey, *, tenant: str = "t", flood: bool = False) -> tuple[list[int], int]:
    """The answer to the prompt and how many blocks of it came from the store; `flood`: then push its blocks out."""
    core = tiny_core(store, num_blocks=16, host_kv_bytes=1 << 20, kv_store_url=f"lmcache+{server.address}")
    try:
        tokens, _ = drive(core, [request("q", PROMPT, tenant=tenant)])
        loaded = core.stats().loaded_blocks
        for row, prompt in enumerate(FLOOD if flood else ()):
            drive(core, [request(f"f{row}", prompt)])
        until = time.monotonic() + 60
        while flood and core.stats().stored_blocks < 6 and time.monotonic() < until:
            core.step()
    finally:
        core.close()
    return tokens["q", 0], loaded


def test_the_next_engine_finds_the_blocks_and_gives_the_same_answer(tmp_path: Path, server: EmbeddedValkey) -> None:
    first, loaded = served(tmp_path, server, flood=True)
    assert loaded == 0
    again = [served(tmp_path, server) for _ in range(TRIES)]
    assert {tuple(answer) for answer, _ in again} == {tuple(first)}
    assert max(loaded for _, loaded in again) == 6


def test_another_tenants_prompt_finds_nothing(tmp_path: Path, server: EmbeddedValkey) -> None:
    """Though it is the same, and gets the same answer."""
    first, _ = served(tmp_path, server, flood=True)
    assert served(tmp_path, server, tenant="another") == (first, 0)
