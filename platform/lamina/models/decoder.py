"""The one decoder behind every supported architecture.

A layer is h += A(norm(h)); h += M(norm(h)), where Gemma norms what A and M return as well. What differs between
architectures (biases, head norms, windows, ropes, scales) is decided when the layers are built, not when they run.
At small batches a step costs dispatch as much as arithmetic, so the code counts operations: fused projections, query
and key heads normed and rotated together, angles computed once per step, sums and products in place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lamina.models.config import ModelConfig
from lamina.models.interface import Attend, LoraApply
from lamina.models.layers import Linear
from lamina.models.rope import Rope, Rotation

__all__ = ["Attention", "Decoder", "DecoderLayer", "Mlp"]

Norm = Callable[[Tensor], Tensor]


@dataclass(slots=True, kw_only=True, eq=False)
class Attention:
    """Self-attention of one layer."""

    layer: int
    qkv: Linear
    out: Linear
    heads_norm: Norm | None  # norms [T, query + KV heads, dim]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: int  # index into the step's rotations
    scale: float
    window: int | None
    softcap: float | None

    def __call__(self, x: Tensor, rotations: Sequence[Rotation], attend: Attend, lora: LoraApply | None) -> Tensor:
        """x [T, hidden] -> [T, hidden]."""
        qkv = self.qkv(x)
        if lora is not None:
            lora.apply(self.layer, "qkv", x, qkv)
        q, k, v = self._split(qkv, rotations[self.rope])
        mixed = attend(self.layer, q, k, v, scale=self.scale, window=self.window, softcap=self.softcap)
        y = self.out(mixed)
        if lora is not None:
            lora.apply(self.layer, "o", mixed, y)
        return y

    def _split(self, qkv: Tensor, rotate: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        heads = qkv.view(qkv.shape[0], -1, self.head_dim)
        rotated = self.num_heads + self.num_kv_heads
        qk, v = heads.split_with_sizes((rotated, self.num_kv_heads), 1)
        if self.heads_norm is not None:
            qk = self.heads_norm(qk)
        rotate(qk)
        q, k = qk.split_with_sizes((self.num_heads, self.num_kv_heads), 1)
        return q, k, v


@dataclass(slots=True, kw_only=True, eq=False)
class Mlp:
    """Gated feed-forward part of one layer."""

    layer: int
    gate_up: Linear
    gated: Callable[[Tensor], Tensor]  # [T, 2 * inner] -> [T, inner]
    down: Linear

    def __call__(self, x: Tensor, lora: LoraApply | None) -> Tensor:
        """x [T, hidden] -> [T, hidden]."""
        gate_up = self.gate_up(x)
        if lora is not None:
            lora.apply(self.layer, "gate_up", x, gate_up)
        inner = self.gated(gate_up)
        y = self.down(inner)
        if lora is not None:
            lora.apply(self.layer, "down", inner, y)
        return y


@dataclass(slots=True, kw_only=True, eq=False)
class DecoderLayer:
    attention_norm: Norm
    attention: Attention
    after_attention: Norm
    mlp_norm: Norm
    mlp: Mlp
    after_mlp: Norm

    def __call__(self, h: Tensor, rotations: Sequence[Rotation], attend: Attend, lora: LoraApply | None) -> None:
        """Changes the residual stream h [T, hidden] in place."""
        h.add_(self.after_attention(self.attention(self.attention_norm(h), rotations, attend, lora)))
        h.add_(self.after_mlp(self.mlp(self.mlp_norm(h), lora)))


class Decoder:
    """A `CausalLM`."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: torch.dtype,
        embedding: Tensor,
        layers: Sequence[DecoderLayer],
        ropes: Sequence[Rope],
        final_norm: Norm,
        head: Linear,
    ) -> None:
        """`embedding` [vocabulary, hidden] may be narrower than `dtype`, in which everything is computed."""
        self._config = config
        self._dtype = dtype
        self._embedding = embedding
        self._layers = tuple(layers)
        self._ropes = tuple(ropes)
        self._final_norm = final_norm
        self._head = head
        scale = config.embedding_scale
        # Rounded to the computing type, as these models were trained.
        self._embedding_scale = None if scale is None else torch.tensor(scale, dtype=dtype).item()

    @property
    def config(self) -> ModelConfig:
        return self._config

    def forward(self, token_ids: Tensor, positions: Tensor, attend: Attend, lora: LoraApply | None) -> Tensor:
        """token_ids and positions [T] int64 -> hidden states [T, hidden size]."""
        h = F.embedding(token_ids, self._embedding).to(self._dtype)
        if self._embedding_scale is not None:
            h.mul_(self._embedding_scale)
        rotations = [rope.at(positions) for rope in self._ropes]
        for layer in self._layers:
            layer(h, rotations, attend, lora)
        return self._final_norm(h)

    def logits(self, rows: Tensor) -> Tensor:
        """rows [R, hidden size] -> [R, vocabulary] float32."""
        logits = self._head(rows).float()
        if (cap := self._config.final_softcap) is not None:
            logits.div_(cap).tanh_().mul_(cap)
        return logits
