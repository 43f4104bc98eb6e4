"""What a vLLM worker does with an LMCache server, without vLLM: chunks of tokens are stored there and retrieved."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lmcache.v1.distributed.api import MemoryLayoutDesc
from lmcache.v1.multiprocess.custom_types import IPCCacheServerKey, RegisterEngineDrivenContextPayload
from lmcache.v1.multiprocess.token_hasher import TokenHasher
from lmcache.v1.multiprocess.transfer_context.base import (
    EngineDrivenContext,
    EngineDrivenContextMetadata,
    create_engine_driven_context,
)
from lmcache.v1.multiprocess.transport.factory import RequestClientFactory

__all__ = ["PATIENCE_S", "LmcacheWorker", "until"]

PATIENCE_S = 180.0  # a hang must end the test, nothing else may depend on it

_numbers = itertools.count(1)


@dataclass
class LmcacheWorker:
    """One worker of a world of one, with blocks in float32."""

    client: Any
    context: EngineDrivenContext
    instance: int
    hasher: TokenHasher
    model: str
    shape: torch.Size

    @staticmethod
    def connect(url: str, model: str, shape: torch.Size) -> LmcacheWorker:
        """shape: of a chunk, [2, layers, tokens, heads * dim]."""
        _, layers, tokens, hidden = shape
        client = RequestClientFactory.create(url)
        instance = os.getpid()
        registration = RegisterEngineDrivenContextPayload(
            instance_id=instance,
            model_name=model,
            world_size=1,
            block_size=tokens,
            num_layers=layers,
            hidden_dim_size=hidden,
            dtype_str="float32",
            use_mla=False,
            num_physical_slots=tokens,
        )
        answer = client.register_kv_cache_engine_driven_context(registration).result(timeout=PATIENCE_S)
        layout = MemoryLayoutDesc([shape], [torch.float32])
        metadata = EngineDrivenContextMetadata(layout_desc=layout, block_size=tokens, use_mla=False)
        context = create_engine_driven_context(metadata, client, PATIENCE_S, answer.shm_name, answer.pool_size)
        return LmcacheWorker(client, context, instance, TokenHasher(tokens, "blake3"), model, shape)

    def hashes(self, tokens: list[int]) -> list[bytes]:
        return list(self.hasher.compute_chunk_hashes(tokens))

    def store(self, tokens: list[int], contents: list[torch.Tensor]) -> None:
        key = self._key(tokens)
        prepared = self.context.prepare_store(key, self.instance)
        if prepared is not None:  # in shared memory
            places, wanted = prepared
            for place, at in zip(places, wanted, strict=True):
                place.copy_(contents[at])
        assert self.context.commit_store(key, self.instance, contents)

    def found(self, tokens: list[int], salt: str = "") -> int:
        """Chunks that the server has brought into its memory, and locked for us."""
        return self._lookup(self._key(tokens, salt))

    def retrieve(self, tokens: list[int], salt: str = "") -> list[torch.Tensor]:
        """The chunks that there are."""
        key = self._key(tokens, salt)
        if not self._lookup(key):
            return []
        chunks = self.context.prepare_retrieve(key, self.instance)
        assert chunks is not None
        copies = [chunk.clone().view(self.shape) for chunk in chunks]
        self.context.commit_retrieve(key, self.instance)
        return copies

    def close(self) -> None:
        self.client.unregister_kv_cache_engine_driven_context(self.instance).result(timeout=PATIENCE_S)
        self.context.close()
        self.client.close()

    def _lookup(self, key: IPCCacheServerKey) -> int:
        self.client.lookup(key.no_worker_id_version(), 1).result(timeout=PATIENCE_S)
        found: list[int] = []

        def ended() -> bool:
            answer = self.client.query_prefetch_status(key.request_id).result(timeout=PATIENCE_S)
            found.extend([] if answer is None else [answer])
            return bool(found)

        until(ended)
        return found[0]

    def _key(self, tokens: list[int], salt: str = "") -> IPCCacheServerKey:
        return IPCCacheServerKey(
            model_name=self.model,
            world_size=1,
            worker_id=0,
            token_ids=tuple(tokens),
            start=0,
            end=len(tokens),
            request_id=f"request-{next(_numbers)}",
            cache_salt=salt,
            num_kv_readers=1,
        )


def until(condition: Callable[[], bool], lives: Callable[[], bool] = lambda: True, log: Path | None = None) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        told = "" if log is None else log.read_text()[-4000:]
        assert time.monotonic() < end, f"it never came true\n{told}"
        assert lives(), f"the server ended\n{told}"
        time.sleep(0.02)
