"""Blocks are shared both ways with a real `lmcache server`: same keys, same bytes, on one Valkey between them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("lmcache", reason="lmcache is not installed; `make lmcache-check` runs these tests")

import torch

from fixtures.redis import tell
from lamina.wiring.valkey import EmbeddedValkey
from lamina_kvtier.lmcache_tier import LmcacheTier, LmcacheTierConfig
from lamina_kvtier.lmcache_wire import LmcacheNames
from lamina_kvtier.redis_plane import RedisAddress
from lamina_kvtier.tier import BlockKey, Outcome, Tally
from support.fault_proxy import FaultProxy
from support.lmcache_worker import PATIENCE_S, LmcacheWorker, until

LAYERS, TOKENS, HIDDEN = 3, 16, 24
SHAPE = torch.Size([2, LAYERS, TOKENS, HIDDEN])
BLOCK_BYTES = SHAPE.numel() * 4
BLOCKS = 5
MODEL = "interop-model"
CONFIG = LmcacheTierConfig(lookup_s=20, load_s=20, put_s=20, delete_s=20)


@pytest.fixture(scope="module")
def port(any_redis: EmbeddedValkey) -> Iterator[int]:
    """LMCache's RESP adapter speaks TCP only."""
    assert any_redis.address.path is not None
    with FaultProxy(any_redis.address.path) as proxy:
        yield proxy.port


@pytest.fixture(scope="module")
def worker(port: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LmcacheWorker]:
    """An engine's worker, connected to an LMCache server that keeps its blocks in the Valkey."""
    request_port, http_port = _free_ports(2)
    adapter = {"type": "resp", "host": "127.0.0.1", "port": port, "num_workers": 2}
    options = {
        "port": request_port,
        "http-port": http_port,
        "chunk-size": TOKENS,
        "supported-transfer-mode": "engine_driven",
        "l1-size-gb": 0.05,
        "eviction-policy": "LRU",
        "l2-adapter": json.dumps(adapter),
    }
    command = [str(Path(sys.executable).with_name("lmcache")), "server", "--no-l1-use-lazy", "--disable-observability"]
    command += [part for name, value in options.items() for part in (f"--{name}", str(value))]
    log = tmp_path_factory.mktemp("lmcache") / "server.log"
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=os.environ.copy())
    try:
        until(lambda: _accepts(request_port), lambda: process.poll() is None, log)
        worker = LmcacheWorker.connect(f"tcp://127.0.0.1:{request_port}", MODEL, SHAPE)
        yield worker
        worker.close()
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@pytest.fixture
def tier(any_redis: EmbeddedValkey) -> Iterator[LmcacheTier]:
    tier = LmcacheTier(any_redis.address, LmcacheNames(MODEL), BLOCK_BYTES, CONFIG)
    yield tier
    tier.close()


def test_what_our_tier_put_the_server_finds_and_retrieves(worker: LmcacheWorker, tier: LmcacheTier) -> None:
    tokens, contents = _tokens(), _contents()
    keys = [BlockKey(block, "tenant") for block in worker.hashes(tokens)]
    assert tier.put(keys, [_bytes(block) for block in contents]).result(PATIENCE_S) == (Outcome.OK,) * BLOCKS
    retrieved = worker.retrieve(tokens)
    assert len(retrieved) == BLOCKS
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(contents, retrieved, strict=True))


def test_what_the_server_stored_our_tier_finds_and_loads(worker: LmcacheWorker, tier: LmcacheTier) -> None:
    tokens, contents = _tokens(), _contents()
    worker.store(tokens, contents)
    ids = worker.hashes(tokens)
    until(lambda: tier.lookup(ids).result(PATIENCE_S) == Tally(BLOCKS, Outcome.OK))  # it writes behind
    into = [memoryview(bytearray(BLOCK_BYTES)) for _ in ids]
    assert tier.load(ids, into).result(PATIENCE_S) == (Outcome.OK,) * BLOCKS
    assert into == [_bytes(block) for block in contents]


def test_a_salt_keeps_apart_and_is_shared(worker: LmcacheWorker, any_redis: EmbeddedValkey) -> None:
    """Both spell it alike; and what is stored under one is not there under another, nor without."""
    tokens, contents = _tokens(), _contents()
    keys = [BlockKey(block, "tenant") for block in worker.hashes(tokens)]
    salted = LmcacheTier(any_redis.address, LmcacheNames(MODEL, salt="red"), BLOCK_BYTES, CONFIG)
    try:
        assert salted.put(keys, [_bytes(block) for block in contents]).result(PATIENCE_S) == (Outcome.OK,) * BLOCKS
    finally:
        salted.close()
    assert worker.found(tokens) == 0
    assert worker.found(tokens, "blue") == 0
    retrieved = worker.retrieve(tokens, "red")
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(contents, retrieved, strict=True))


def test_our_own_identities_never_meet_those_of_a_fleet(worker: LmcacheWorker, any_redis: EmbeddedValkey) -> None:
    """Lamina's blocks have another model name and 32 bytes of another chain."""
    names = LmcacheNames.of_layout(b"\x01" * 32)
    ours = LmcacheTier(any_redis.address, names, BLOCK_BYTES, CONFIG)
    try:
        tokens = _tokens()
        keys = [BlockKey(block, "tenant") for block in worker.hashes(tokens)]
        assert ours.put(keys, [_bytes(block) for block in _contents()]).result(PATIENCE_S) == (Outcome.OK,) * BLOCKS
        stored = tell(any_redis, b"EXISTS", *(names.key(key.id) for key in keys))
        assert stored == BLOCKS
        assert worker.found(tokens) == 0
    finally:
        ours.close()


def test_the_address_of_a_tier_may_be_tcp(worker: LmcacheWorker, port: int) -> None:
    tier = LmcacheTier(RedisAddress.parse(f"redis://127.0.0.1:{port}"), LmcacheNames(MODEL), BLOCK_BYTES, CONFIG)
    try:
        tokens, contents = _tokens(), _contents()
        keys = [BlockKey(block, "tenant") for block in worker.hashes(tokens)]
        assert tier.put(keys, [_bytes(block) for block in contents]).result(PATIENCE_S) == (Outcome.OK,) * BLOCKS
        assert len(worker.retrieve(tokens)) == BLOCKS
    finally:
        tier.close()


def _tokens() -> list[int]:
    """A prompt that no other test has."""
    return torch.randint(0, 50_000, (BLOCKS * TOKENS,)).tolist()


def _contents() -> list[torch.Tensor]:
    return [torch.randn(SHAPE) for _ in range(BLOCKS)]


def _bytes(block: torch.Tensor) -> memoryview:
    return memoryview(block.contiguous().view(-1).view(torch.uint8).numpy()).cast("B")


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    try:
        return [int(each.getsockname()[1]) for each in sockets]
    finally:
        for each in sockets:
            each.close()


def _accepts(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True
