"""The one decoder behind every supported architecture.

A layer is h += A(norm(h)); h += M(norm(h)), where Gemma norms what A and M return as well. Each sum is taken together
with the norm that follows it, which belongs to the next layer after M. What differs between
architectures (biases, head norms, windows, ropes, scales) is decided when the layers are built, not when they run.
At small batches a step costs dispatch as much as arithmetic, so the code counts operations: fused projections, query
and key heads normed and rotated together, angles computed once per step, sums in place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lamina.models.config import ModelConfig
from lamina.models.interface import Attend, Linear, LoraApply, Rotation
from lamina.models.layers import Norm
from lamina.models.rope import Rope

__all__ = ["Attention", "Decoder", "DecoderLayer", "Mlp"]


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
        qkv = _project(self.qkv, self.layer, "qkv", x, lora)
        heads = qkv.view(qkv.shape[0], -1, self.head_dim)
        qk, v = heads.split_with_sizes((self.num_heads + self.num_kv_heads, self.num_kv_heads), 1)
        if self.heads_norm is not None:
            qk = self.heads_norm(qk)
        mixed = attend(
            self.layer, qk, v, rotations[self.rope], scale=self.scale, window=self.window, softcap=self.softcap
        )
        return _project(self.out, self.layer, "o", mixed, lora)


@dataclass(slots=True, kw_only=True, eq=False)
class Mlp:
    """Gated feed-forward part of one layer."""

    layer: int
    gate_up: Linear
    gated: Callable[[Tensor], Tensor]  # [T, 2 * inner] -> [T, inner]
    down: Linear

    def __call__(self, x: Tensor, lora: LoraApply | None) -> Tensor:
        """x [T, hidden] -> [T, hidden]."""
        inner = self.gated(_project(self.gate_up, self.layer, "gate_up", x, lora))
        return _project(self.down, self.layer, "down", inner, lora)


def _project(linear: Linear, layer: int, site: str, x: Tensor, lora: LoraApply | None) -> Tensor:
    return linear(x) if lora is None else lora.project(layer, site, x, linear)


@dataclass(slots=True, kw_only=True, eq=False)
class DecoderLayer:
    attention_norm: Norm
    attention: Attention
    after_attention: Callable[[Tensor], Tensor]
    mlp_norm: Norm
    mlp: Mlp
    after_mlp: Callable[[Tensor], Tensor]

    def __call__(
        self, h: Tensor, x: Tensor, rotations: Sequence[Rotation], attend: Attend, lora: LoraApply | None
    ) -> Tensor:
        """h [T, hidden] is the residual stream, x its attention norm; returns what is still to be added to h."""
        mixed = self.after_attention(self.attention(x, rotations, attend, lora))
        return self.after_mlp(self.mlp(self.mlp_norm.add(h, mixed), lora))


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
        self._first_norm = layers[0].attention_norm
        self._next_norms = (*(layer.attention_norm for layer in layers[1:]), final_norm)
        self._head = head
        scale = config.embedding_scale
        # Rounded to the computing type, as these models were trained.
        self._embedding_scale = None if scale is None else torch.tensor(scale, dtype=dtype).item()

    @property
    def config(self) -> ModelConfig:
        return self._config

    def linear(self, layer: int, site: str) -> Linear:
        parts = self._layers[layer]
        linears = {
            "qkv": parts.attention.qkv,
            "o": parts.attention.out,
            "gate_up": parts.mlp.gate_up,
            "down": parts.mlp.down,
        }
        return linears[site]

    def forward(self, token_ids: Tensor, positions: Tensor, attend: Attend, lora: LoraApply | None) -> Tensor:
        """token_ids and positions [T] int64 -> hidden states [T, hidden size]."""
        h = F.embedding(token_ids, self._embedding).to(self._dtype)
        if self._embedding_scale is not None:
            h.mul_(self._embedding_scale)
        rotations = [rope.at(positions) for rope in self._ropes]
        x = self._first_norm(h)
        for layer, next_norm in zip(self._layers, self._next_norms, strict=True):
            x = next_norm.add(h, layer(h, x, rotations, attend, lora))
        return x

    def logits(self, rows: Tensor) -> Tensor:
        """rows [R, hidden size] -> [R, vocabulary] float32."""
        logits = self._head(rows).float()
        if (cap := self._config.final_softcap) is not None:
            logits.div_(cap).tanh_().mul_(cap)
        return logits
