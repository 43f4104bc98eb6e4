"""The architectures that Lamina runs, and what tells them apart. Torch-free.

All six are one decoder (`decoder.py`) with different parts. A new architecture of this kind is a new entry here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

from lamina.errors import UnsupportedModel

__all__ = ["FAMILIES", "Family", "family_of"]

BiasRule = Literal["never", "qkv", "attention_bias"]
WindowRule = Literal["never", "every_layer", "upper_layers", "alternating", "five_of_six"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What an architecture fixes or defaults to; everything else is in `config.json`."""

    windows: WindowRule = "never"
    bias: BiasRule = "never"  # attention_bias: q, k, v and o, if config.json says so
    mlp_bias: bool = False  # whether config.json may switch it on
    qk_norm: bool = False
    head_dim: int | None = None  # None: hidden size / heads
    tie_embeddings: bool = False
    activation_field: str = "hidden_act"
    activation: str = "silu"
    unit_offset_norm: bool = False  # weights are stored as w, applied as 1 + w
    post_norms: bool = False  # norms after attention and MLP, before the residual sum
    scale_embedding: bool = False  # by sqrt(hidden size)
    query_scalar: float | None = None  # default of query_pre_attn_scalar; None: head_dim, always
    has_attn_softcap: bool = False  # whether config.json may set attn_logit_softcapping
    has_final_softcap: bool = False  # same, final_logit_softcapping
    attn_softcap: float | None = None  # the defaults
    final_softcap: float | None = None
    rope_theta: float = 10_000.0
    local_rope_theta: float | None = None  # sliding layers have their own rope


_GEMMA2 = Family(
    windows="alternating",
    bias="attention_bias",
    head_dim=256,
    tie_embeddings=True,
    activation_field="hidden_activation",
    activation="gelu_pytorch_tanh",
    unit_offset_norm=True,
    post_norms=True,
    scale_embedding=True,
    query_scalar=256.0,
    has_final_softcap=True,
    has_attn_softcap=True,
    attn_softcap=50.0,
    final_softcap=30.0,
)
_GEMMA3 = replace(
    _GEMMA2,
    windows="five_of_six",
    qk_norm=True,
    rope_theta=1_000_000.0,
    local_rope_theta=10_000.0,
    has_attn_softcap=False,  # the reference ignores the field, so a value there cannot be meant
    attn_softcap=None,
    final_softcap=None,
)

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "LlamaForCausalLM": Family(bias="attention_bias", mlp_bias=True),
        "MistralForCausalLM": Family(windows="every_layer"),
        "Qwen2ForCausalLM": Family(windows="upper_layers", bias="qkv"),
        "Qwen3ForCausalLM": Family(windows="upper_layers", bias="attention_bias", qk_norm=True, head_dim=128),
        "Gemma2ForCausalLM": _GEMMA2,
        "Gemma3ForCausalLM": _GEMMA3,
    }
)
"""Architecture name as in `config.json` -> its traits."""


def family_of(architecture: str) -> Family:
    """Raises UnsupportedModel that names the architecture and lists the supported ones."""
    family = FAMILIES.get(architecture)
    if family is None:
        raise UnsupportedModel(
            f"The architecture {architecture!r} is not supported; supported: {', '.join(FAMILIES)}.",
            param="architectures",
        )
    return family
