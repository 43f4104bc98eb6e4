"""An engine whose model is a hash: what a block must contain, and what is drawn next, can be told from tokens alone.

    keys and values of token i  =  H(root, token 0, ..., token i)        16 bytes
    the next token              =  a few bits of the last ones of those

So a step reads and writes real memory through real block tables, costs microseconds, and any byte that is not what it
should be belongs to somebody else, is too old, or has not come yet.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fixtures.engines import TINY, tiny_config
from lamina.config import EngineConfig
from lamina.engine.batch import Batch
from lamina.engine.core import EngineCore
from lamina.engine.pool import BlockPool
from lamina.engine.sampler import Drawn, Sampled
from lamina.engine.sampling_state import SamplingState
from lamina.models.layers import TorchOps
from lamina.wiring.backends import StepParts
from lamina.wiring.core import assemble
from lamina.wiring.tiers import MakeTiers
from lamina_kvtier.identity import BlockId, IdentityChain
from lamina_kvtier.tier import BlockKey, adapter_bytes
from lamina_lora.slots import AdapterSlots

__all__ = ["BLOCK", "BLOCK_BYTES", "Content", "SimulatedModel", "continuation", "simulated_core"]

BLOCK = 4  # tokens
_ROW = 16  # bytes of a token: a key and a value of two float32
BLOCK_BYTES = BLOCK * _ROW
_SHAPE = TINY | {"num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 2}

Root = Callable[[str | None, str], BlockId]


@lru_cache(maxsize=1 << 16)
def _next(before: bytes, token: int) -> bytes:
    return hashlib.blake2b(before + token.to_bytes(4, "little"), digest_size=_ROW).digest()


@lru_cache(maxsize=1 << 12)
def payload(root: BlockId, tokens: tuple[int, ...]) -> bytes:
    """Keys and values of all these tokens, one after the other."""
    rows, last = [], root
    for token in tokens:
        last = _next(last, token)
        rows.append(last)
    return b"".join(rows)


@lru_cache(maxsize=1 << 12)
def _identities(root: BlockId, tokens: tuple[int, ...]) -> list[BlockId]:
    chain = IdentityChain(root, BLOCK)
    chain.extend(tokens)
    return chain.ids


def _draw(row: bytes, index: int) -> int:
    """Few different ones, so that prompts that agree go on alike, and choices of one prompt part."""
    return 3 + (row[0] + 3 * index) % 5


def continuation(root: BlockId, prompt: Sequence[int], count: int, index: int) -> list[int]:
    """What choice `index` of a prompt says."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(_draw(payload(root, tuple(tokens))[-_ROW:], index))
    return tokens[len(prompt) :]


@dataclass(frozen=True, slots=True)
class Content:
    """What must lie under an identity, and whose it is."""

    key: BlockKey
    data: bytes


class SimulatedModel:
    """Runner and sampler of one engine. `written` has every block that was ever computed in full, by identity; it may
    be shared by engines that come after each other.

    Each step writes its rows, and then reads all that its choices have: `AssertionError` unless that is what it should
    be. `unreadable` names device blocks that may not be written now.
    """

    def __init__(self, pool: BlockPool, written: dict[BlockId, Content], *, ahead: bool) -> None:
        self.runs_ahead = ahead
        self.root: Root = lambda adapter, namespace: b""  # the engine's, as soon as there is one
        self.may_not_write: Callable[[], frozenset[int]] = frozenset
        self.fails = False  # the next step does, in the middle
        self.memory: NDArray[np.uint8] = pool.data.view(pool.num_blocks, -1).view(torch.uint8).numpy()
        self.rows = self.memory.reshape(pool.num_blocks, BLOCK, _ROW)
        self._pool, self._written = pool, written
        self._seats: dict[SamplingState, int] = {}
        self._drawn: dict[int, int] = {}  # the last token, by seat

    # --- runner -------------------------------------------------------------------------------------------

    def warm_up(self) -> None:
        """Nothing is compiled."""

    def forward(self, batch: Batch) -> Tensor:
        """[R, 1 + bytes of a row]: the last rows of those that draw."""
        self._require_writable([*batch.fresh, *(copy.target for copy in batch.copies)])
        self._pool.copy(batch.copies)
        self._pool.clear(batch.fresh)
        sequences = [self._sequence(batch, at) for at in range(len(batch.spans))]
        for span, (root, tokens) in zip(batch.spans, sequences, strict=True):
            self._write(span.table, root, tokens, span.start)
        if self.fails:
            self.fails = False
            raise RuntimeError("a step that fails on purpose")
        for at, (span, (root, tokens)) in enumerate(zip(batch.spans, sequences, strict=True)):
            self._read(span.table, root, tokens)
            self._note(batch, at, root, tokens)
        last = {id(chunk): payload(*sequences[at])[-_ROW:] for at, chunk in enumerate(batch.chunks)}
        return torch.tensor([list(last[id(chunk)]) for chunk in batch.sampled], dtype=torch.float32).view(-1, _ROW)

    def _sequence(self, batch: Batch, at: int) -> tuple[BlockId, tuple[int, ...]]:
        """Root and tokens up to the end of the chunk, those in flight included."""
        chunk, span = batch.chunks[at], batch.spans[at]
        new = batch.token_ids[span.row : span.row + span.count].tolist()
        tokens = [*chunk.choice.tokens[: span.start], *(self._drawn[-1 - t] if t < 0 else t for t in new)]
        assert min(tokens) >= 0, "a token that is still being drawn lies in the past"
        request = chunk.choice.request.request
        return self.root(request.adapter, request.namespace), tuple(tokens)

    def _write(self, table: NDArray[np.int64], root: BlockId, tokens: tuple[int, ...], start: int) -> None:
        rows = np.frombuffer(payload(root, tokens), np.uint8).reshape(-1, _ROW)
        places = range(start, len(tokens))
        self._require_writable({int(table[place // BLOCK]) for place in places})
        for place in places:
            block = table[place // BLOCK]
            self.rows[block, place % BLOCK] = 0xEE if self.fails and place % 2 else rows[place]

    def _read(self, table: NDArray[np.int64], root: BlockId, tokens: tuple[int, ...]) -> None:
        found = self.rows[table].reshape(-1, _ROW)[: len(tokens)].tobytes()
        assert found == payload(root, tokens), f"blocks {table.tolist()} are not what {list(tokens)} left in them"

    def _require_writable(self, blocks: Sequence[int] | set[int]) -> None:
        assert not self.may_not_write().intersection(blocks), "a step writes into a block that is being copied"

    def _note(self, batch: Batch, at: int, root: BlockId, tokens: tuple[int, ...]) -> None:
        data, request = payload(root, tokens), batch.chunks[at].choice.request.request
        for block, identity in enumerate(_identities(root, tokens)):
            key = BlockKey(identity, request.namespace, adapter_bytes(request.adapter))
            self._written[identity] = Content(key, data[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES])

    # --- sampler ------------------------------------------------------------------------------------------

    def launch(self, logits: Tensor, states: Sequence[SamplingState]) -> Drawn:
        rows = [bytes(int(byte) for byte in row) for row in logits.tolist()]
        tokens = [_draw(row, state.index) for row, state in zip(rows, states, strict=True)]
        for state, token in zip(states, tokens, strict=True):
            if state not in self._seats:
                self._seats[state] = next(seat for seat in range(1000) if seat not in self._seats.values())
            self._drawn[self._seats[state]] = token
        return Drawn([Sampled(token, None) for token in tokens])

    def placeholder(self, state: SamplingState) -> int:
        return -1 - self._seats[state]

    def leave(self, state: SamplingState) -> None:
        self._seats.pop(state, None)


class _Adapters:
    """All adapters that anybody names are there."""

    def __init__(self) -> None:
        self.unloaded: list[str] = []

    def check(self, digest: str) -> None:
        """It is there."""

    def try_acquire(self, digest: str) -> int:
        return 1

    def release(self, digest: str) -> None:
        """Nothing is counted."""

    def load_seconds(self, digest: str) -> float:
        return 0.0

    def unload(self, digest: str) -> None:
        self.unloaded.append(digest)

    def loaded(self) -> list[str]:
        return []

    def wait(self, *, seconds: float) -> None:
        """Nobody waits in a simulation."""

    def check_integrity(self) -> None:
        """Nothing to check."""

    def close(self) -> None:
        """Nothing to close."""


class _Backend:
    ops = TorchOps()

    def __init__(self, written: dict[BlockId, Content], ahead: bool) -> None:
        self._written, self._ahead = written, ahead

    def parts(self, model: object, pool: BlockPool, config: EngineConfig) -> StepParts:
        self.model = simulated = SimulatedModel(pool, self._written, ahead=self._ahead)

        def runner(slots: AdapterSlots) -> SimulatedModel:
            return simulated

        return StepParts(cast(Any, None), simulated, runner)


def simulated_core(
    tiers: MakeTiers, written: dict[BlockId, Content], *, ahead: bool, **options: Any
) -> tuple[EngineCore, SimulatedModel]:
    """An engine as `wiring` puts it together, but for its model and its adapters. `options` are EngineConfig fields."""
    config = EngineConfig(
        model=Path("simulated"), adapters=Path("nowhere"), block_size=BLOCK, max_queue_s=0.0, **options
    )
    backend = _Backend(written, ahead)
    core = assemble(
        cast(Any, SimpleNamespace(config=tiny_config(_SHAPE))),
        config,
        digest="simulated",
        dtype=torch.float32,
        device=torch.device("cpu"),
        backend=backend,
        tiers=tiers,
    )
    core._adapters.close()
    adapters = cast(Any, _Adapters())
    core._adapters = core._intake._adapters = core.scheduler._adapters = adapters
    backend.model.root = core._root
    return core, backend.model
