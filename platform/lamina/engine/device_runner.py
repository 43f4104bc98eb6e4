"""Runs a batch on device kernels: decode steps from captured graphs, the others kernel by kernel. Never waits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from triton.errors import TritonError

from lamina.engine.batch import Batch
from lamina.engine.device_attention import DeviceAttention
from lamina.engine.device_inputs import FixedInputs, HostInputs, StepInputs, StepShape, padding_inputs, upload
from lamina.engine.device_lora import DeviceLora, Projections
from lamina.engine.graphs import Graphs
from lamina.engine.pool import BlockPool
from lamina.models.interface import CausalLM
from lamina_kernels.gpu.blocks import clear_blocks, copy_blocks
from lamina_kvtier.blocks import CopyOnWrite

__all__ = ["DeviceRunner", "decode_buckets"]

TokenFeed = Callable[[Tensor], Tensor]
"""Token ids [T] int64 with placeholders -> those with the tokens that the device has drawn since."""


def decode_buckets(max_rows: int) -> tuple[int, ...]:
    """Row counts that graphs are captured for: 1, 2, 4, then every 8 up to 64, then every 32.

    Padding rows leave attention and LoRA at once, but the matrix products compute them; a coarser step above wastes
    at most a third, where products of up to 64 rows cost the same anyway (they wait for the weights).
    """
    steps = [1, 2, 4, *range(8, 64, 8), *range(64, max_rows, 32)]
    return (*(rows for rows in steps if rows < max_rows), max_rows)


@dataclass(frozen=True, slots=True)
class _Captured:
    fixed: FixedInputs
    replay: Callable[[], Tensor]


class DeviceRunner:
    """A `Runner` on Triton kernels.

    A graph is captured per bucket of decode rows and LoRA plan, or none, at its first use (`warm_up` does it before).
    It holds no adapter: slots are looked up on the device while it runs, so adapters come and go without a new capture.
    """

    def __init__(
        self,
        model: CausalLM,
        pool: BlockPool,
        attention: DeviceAttention,
        lora: DeviceLora,
        graphs: Graphs,
        shape: StepShape,
        *,
        feed: TokenFeed,
        buckets: Sequence[int],
        max_blocks: int,
    ) -> None:
        """`max_blocks`: of the longest sequence."""
        self._model = model
        self._pool = pool
        self._attention = attention
        self._lora = lora
        self._graphs = graphs
        self._shape = shape
        self._feed = feed
        self._buckets = tuple(buckets)
        self._max_blocks = max_blocks
        self._captured: dict[tuple[int, str | None], _Captured] = {}

    @torch.inference_mode()
    def forward(self, batch: Batch) -> Tensor:
        """Logits [R, vocabulary] float32. RuntimeError for a kernel that does not compile."""
        try:
            return self._forward(batch)
        except TritonError as error:
            raise RuntimeError(f"a kernel could not be compiled: {error}") from error

    def _forward(self, batch: Batch) -> Tensor:
        plan = self._lora.choose(batch.segments, batch.decode_rows)
        self._tidy(batch)
        rows = batch.num_tokens
        if batch.decode_rows == rows == len(batch.logit_rows) and rows <= self._buckets[-1]:
            bucket = next(bucket for bucket in self._buckets if bucket >= rows)
            hidden = self._replay(bucket, HostInputs(batch, self._shape, bucket), plan)[:rows]
        else:
            host = HostInputs(batch, self._shape)
            hidden = self._run(host.to_device(self._pool.data.device), plan, host.slots)
            self._lora.wait(host.slots)  # they have been waited for layer by layer
        return self._model.logits(hidden)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Captures every graph, largest first, so that they share memory, and compiles what prefill needs."""
        device = self._pool.data.device
        for plan in (None, self._lora.plans[-1]):
            inputs = padding_inputs(self._buckets[-1], self._max_blocks, lora=plan is not None, device=device)
            self._model.logits(self._run(inputs, plan))
        for bucket in reversed(self._buckets):
            for decode_plan in (None, *self._lora.decode_plans):
                self._capture(bucket, decode_plan)

    def _replay(self, bucket: int, host: HostInputs, plan: Projections | None) -> Tensor:
        self._lora.wait(host.slots)
        captured = self._captured.get((bucket, _name(plan))) or self._capture(bucket, plan)
        captured.fixed.fill(host)
        return captured.replay()

    def _capture(self, bucket: int, plan: Projections | None) -> _Captured:
        """Padding alone runs while it is captured: nothing is written, no adapter is read.

        The head stays outside: its logits would be kept for every graph, and are many times larger than all the rest.
        """
        fixed = FixedInputs(bucket, self._max_blocks, lora=plan is not None, device=self._pool.data.device)
        captured = _Captured(fixed, self._graphs.capture(lambda: self._run(fixed.inputs, plan)))
        self._captured[bucket, _name(plan)] = captured
        return captured

    def _run(self, inputs: StepInputs, plan: Projections | None, slots: frozenset[int] = frozenset()) -> Tensor:
        """The hidden states [R, hidden size] of the logit rows."""
        self._attention.begin(inputs)
        lora = None if plan is None or inputs.lora is None else self._lora.begin(inputs.lora, plan, slots)
        tokens = self._feed(inputs.token_ids)
        hidden = self._model.forward(tokens, inputs.positions, self._attention, lora)
        return hidden.index_select(0, inputs.logit_rows)

    def _tidy(self, batch: Batch) -> None:
        """Copies on write, then clears new blocks: a copy's source may have been given away in the same plan."""
        for copies in _independent(batch.copies):
            sources, targets = (self._ids([getattr(copy, end) for copy in copies]) for end in ("source", "target"))
            copy_blocks(self._pool.data, sources, targets)
        if batch.fresh:
            clear_blocks(self._pool.data, self._ids(batch.fresh))

    def _ids(self, blocks: Sequence[int]) -> Tensor:
        return upload(np.array(blocks, dtype=np.int32), self._pool.data.device)


def _name(plan: Projections | None) -> str | None:
    return None if plan is None else plan.name


def _independent(copies: Sequence[CopyOnWrite]) -> list[list[CopyOnWrite]]:
    """Runs of copies in which no block is both read and written, or written twice; their order matters."""
    runs: list[list[CopyOnWrite]] = []
    sources: set[int] = set()
    targets: set[int] = set()
    for copy in copies:
        clash = copy.source in targets or copy.target in targets or copy.target in sources
        if clash or not runs:
            runs.append([])
            sources, targets = set(), set()
        runs[-1].append(copy)
        sources.add(copy.source)
        targets.add(copy.target)
    return runs
