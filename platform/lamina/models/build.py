"""Builds a decoder out of its fused weights."""

from __future__ import annotations

import torch
from torch import Tensor

from lamina.models.config import ModelConfig
from lamina.models.decoder import Attention, Decoder, DecoderLayer, Mlp
from lamina.models.interface import Linear
from lamina.models.layers import LayerOps, Norm, identity
from lamina.models.rope import Rope

__all__ = ["build_decoder"]


def build_decoder(config: ModelConfig, weights: dict[str, Tensor], *, dtype: torch.dtype, ops: LayerOps) -> Decoder:
    """A decoder that computes in `dtype`.

    `weights` are the fused tensors that `placement.fused_shapes` names, all in `dtype` but for the embedding, which
    may be narrower. They are taken out of the dict one by one, so that repacking needs room for one at a time.
    """
    return _Builder(config, weights, dtype, ops).decoder()


class _Builder:
    def __init__(self, config: ModelConfig, weights: dict[str, Tensor], dtype: torch.dtype, ops: LayerOps) -> None:
        self.config, self.weights, self.dtype, self.ops = config, weights, dtype, ops

    def decoder(self) -> Decoder:
        config = self.config
        embedding = self.weights.pop("embedding")
        ropes = [config.rope] if config.local_rope is None else [config.rope, config.local_rope]
        head = embedding.to(self.dtype) if config.tie_embeddings else self.weights.pop("head")
        return Decoder(
            config,
            dtype=self.dtype,
            embedding=embedding,
            layers=[self._layer(index) for index in range(config.num_layers)],
            ropes=[Rope(rope, config.head_dim, self.dtype, embedding.device) for rope in ropes],
            final_norm=self._norm("final_norm"),
            head=self.ops.linear(head, None),
        )

    def _layer(self, index: int) -> DecoderLayer:
        post = self.config.post_norms
        return DecoderLayer(
            attention_norm=self._norm(f"{index}.attention_norm"),
            attention=self._attention(index),
            after_attention=self._norm(f"{index}.after_attention") if post else identity,
            mlp_norm=self._norm(f"{index}.mlp_norm"),
            mlp=Mlp(
                layer=index,
                gate_up=self._linear(f"{index}.gate_up"),
                gated=self.ops.gated(self.config.activation),
                down=self._linear(f"{index}.down"),
            ),
            after_mlp=self._norm(f"{index}.after_mlp") if post else identity,
        )

    def _attention(self, index: int) -> Attention:
        config, window = self.config, self.config.windows[index]
        return Attention(
            layer=index,
            qkv=self._linear(f"{index}.qkv"),
            out=self._linear(f"{index}.o"),
            heads_norm=self._heads_norm(index) if config.qk_norm else None,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            rope=1 if window is not None and config.local_rope is not None else 0,
            scale=config.attn_scale,
            window=window,
            softcap=config.attn_softcap,
        )

    def _linear(self, site: str) -> Linear:
        return self.ops.linear(self.weights.pop(f"{site}.weight"), self.weights.pop(f"{site}.bias", None))

    def _norm(self, name: str) -> Norm:
        return self.ops.norm(self._norm_weight(name), self.config.norm_eps)

    def _heads_norm(self, index: int) -> Norm:
        """One norm for query and key heads together: each head gets its own row of weights."""
        q, k = self._norm_weight(f"{index}.q_norm"), self._norm_weight(f"{index}.k_norm")
        rows = torch.stack([q] * self.config.num_heads + [k] * self.config.num_kv_heads)
        return self.ops.norm(rows, self.config.norm_eps)

    def _norm_weight(self, name: str) -> Tensor:
        weight = self.weights.pop(name).float()
        return weight + 1.0 if self.config.unit_offset_norm else weight
