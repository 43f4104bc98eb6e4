"""Attention over the paged cache on device kernels."""

from __future__ import annotations

from torch import Tensor

from lamina.engine.device_inputs import StepInputs
from lamina.engine.pool import BlockPool
from lamina.models.interface import Rotation
from lamina_kernels.gpu.attention_decode import DecodeScratch, paged_decode
from lamina_kernels.gpu.attention_prefill import paged_prefill
from lamina_kernels.gpu.rotate_write import rotate_write

__all__ = ["DeviceAttention"]


class DeviceAttention:
    """`Attend` for one step at a time: rotates and writes in one launch, then attends by kind of row."""

    def __init__(self, pool: BlockPool, *, heads: int, max_decode_rows: int) -> None:
        self._pool = pool.data
        self._scratch = DecodeScratch.allocate(max_decode_rows, heads, pool.head_dim, pool.data.device)
        self._inputs: StepInputs | None = None

    def begin(self, inputs: StepInputs) -> None:
        self._inputs = inputs

    def __call__(
        self,
        layer: int,
        qk: Tensor,
        v: Tensor,
        rotate: Rotation,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """See `Attend`. Raises RuntimeError before `begin`."""
        step = self._inputs
        if step is None:
            raise RuntimeError("begin() must set the step's inputs first")
        q, k = qk.split_with_sizes((qk.shape[1] - v.shape[1], v.shape[1]), 1)
        rotate_write(q, k, v, rotate.cos, rotate.signed_sin, self._pool, layer, step.kv_slots, None)
        out = q.new_empty((q.shape[0], q.shape[1] * q.shape[2]))
        rows = step.decode_rows
        if rows:
            paged_decode(
                q[:rows],
                self._pool,
                layer,
                step.tables[:rows],
                step.contexts[:rows],
                out[:rows],
                self._scratch,
                scale=scale,
                window=window,
                softcap=softcap,
            )
        if step.prefill_tiles.shape[0]:
            paged_prefill(
                q,
                self._pool,
                layer,
                step.tables,
                step.prefill_tiles,
                step.contexts,
                out,
                scale=scale,
                window=window,
                softcap=softcap,
            )
        return out
