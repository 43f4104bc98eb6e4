"""Runs a batch through the model: block copies, LoRA segments, attention, logits."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lamina.engine.attention import PagedAttention, plan_attention
from lamina.engine.batch import Batch
from lamina.engine.pool import BlockPool
from lamina.models.interface import CausalLM
from lamina_lora.slots import AdapterSlots

__all__ = ["EagerRunner", "Runner"]


class Runner(Protocol):
    def forward(self, batch: Batch) -> Tensor:
        """Logits [R, vocabulary] float32 of the batch's `logit_rows`; keys and values are in the pool afterwards."""
        ...

    def warm_up(self) -> None:
        """Compiles and captures what steps will need, so that no request waits for it. May take minutes."""
        ...


class EagerRunner:
    """Operator by operator, on torch alone: the CPU's way, and what device kernels are compared with."""

    def __init__(self, model: CausalLM, pool: BlockPool, slots: AdapterSlots) -> None:
        self._model = model
        self._pool = pool
        self._slots = slots
        self._attention = PagedAttention(pool)

    def warm_up(self) -> None:
        """Nothing is compiled."""

    @torch.inference_mode()
    def forward(self, batch: Batch) -> Tensor:
        self._pool.copy(batch.copies)  # before the clearing: a source may have been given away in the same plan
        self._pool.clear(batch.fresh)
        self._attention.begin(plan_attention(batch.spans, self._pool))
        lora = self._slots.batch(batch.segments, batch.num_tokens) if batch.segments else None
        tokens, positions = self._tensor(batch.token_ids), self._tensor(batch.positions)
        hidden = self._model.forward(tokens, positions, self._attention, lora)
        return self._model.logits(hidden.index_select(0, self._tensor(batch.logit_rows)))

    def _tensor(self, array: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(array).to(self._pool.data.device)
