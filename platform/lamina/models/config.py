"""A model's shape, read from the `config.json` of a Hugging Face folder. Torch-free; trusts no value."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lamina.errors import ConfigurationInvalid, UnsupportedModel
from lamina.models.fields import Fields
from lamina.models.registry import Family, family_of
from lamina.models.rope_config import RopeConfig, read_rope, read_rope_pair
from lamina.models.windows import read_windows
from lamina_lora.geometry import BaseGeometry

__all__ = ["ModelConfig"]

MAX_CONFIG_BYTES = 4 << 20
MAX_VOCAB = 1 << 21
MAX_HIDDEN = 1 << 16
MAX_INTERMEDIATE = 1 << 20
MAX_LAYERS = 512
MAX_HEADS = 1024
MAX_HEAD_DIM = 1024
MAX_CONTEXT = 1 << 24  # tokens

_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_DTYPES = ("float32", "float16", "bfloat16", "float64")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Everything that the model code needs to know, with no defaults left open."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    activation: str  # silu | gelu_tanh
    max_context: int  # tokens
    rope: RopeConfig
    local_rope: RopeConfig | None  # the rope of layers with a window, if it differs
    windows: tuple[int | None, ...]  # per layer: a token sees itself and the window - 1 before; None: all before
    attn_scale: float  # factor on q·k
    attn_softcap: float | None
    final_softcap: float | None
    embedding_scale: float | None
    tie_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    unit_offset_norm: bool
    post_norms: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    dtype: str | None  # of the checkpoint, as it says itself

    @classmethod
    def from_folder(cls, folder: Path) -> ModelConfig:
        """Reads `config.json`, and the end-of-sequence ids of `generation_config.json` if it has them.

        Raises ConfigurationInvalid (missing or broken file, bad value; `param` is the field) and UnsupportedModel.
        """
        config = cls.from_dict(_read_json(folder / "config.json"))
        generation = folder / "generation_config.json"
        if not generation.is_file():
            return config
        fields = Fields(_read_json(generation), "generation_config.json")
        ids = _eos_ids(fields, config.vocab_size)
        return replace(config, eos_token_ids=ids) if ids else config

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ModelConfig:
        """`values`: the content of a `config.json`. Raises as `from_folder`."""
        fields = Fields(values, "config.json")
        architecture = _architecture(fields)
        family = family_of(architecture)
        _refuse_what_changes_the_model(fields, family)
        return cls(architecture=architecture, **_sizes(fields, family), **_parts(fields, family), **_tokens(fields))

    def geometry(self) -> BaseGeometry:
        """The model as adapters see it."""
        hidden, inner = self.hidden_size, self.intermediate_size
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        targets = {
            "q_proj": (hidden, q),
            "k_proj": (hidden, kv),
            "v_proj": (hidden, kv),
            "o_proj": (q, hidden),
            "gate_proj": (hidden, inner),
            "up_proj": (hidden, inner),
            "down_proj": (inner, hidden),
        }
        return BaseGeometry(num_layers=self.num_layers, targets=targets, vocab_size=self.vocab_size, hidden_size=hidden)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_CONFIG_BYTES + 1)
    except OSError as error:
        raise ConfigurationInvalid(
            f"{path} cannot be read ({error.strerror}); a model folder needs it.", param=path.name
        ) from error
    if len(raw) > MAX_CONFIG_BYTES:
        raise ConfigurationInvalid(f"{path} is larger than the limit of {MAX_CONFIG_BYTES} bytes.", param=path.name)
    try:
        values = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ConfigurationInvalid(f"{path} is not valid JSON: {error}.", param=path.name) from error
    if not isinstance(values, dict):
        raise ConfigurationInvalid(f"{path} must hold a JSON object.", param=path.name)
    return values


def _architecture(fields: Fields) -> str:
    names = fields.texts("architectures")
    if names is None or len(names) != 1:
        raise fields.invalid("architectures", "must be a list of one name")
    return names[0]


def _refuse_what_changes_the_model(fields: Fields, family: Family) -> None:
    if fields.raw("quantization_config") is not None:
        raise UnsupportedModel(
            "config.json: quantised checkpoints are not supported; supported: float32, float16 and bfloat16 weights.",
            param="quantization_config",
        )
    if fields.boolean("use_bidirectional_attention", default=False):
        raise UnsupportedModel(
            "config.json: use_bidirectional_attention is not supported; only causal attention is.",
            param="use_bidirectional_attention",
        )
    if not family.has_attn_softcap and fields.raw("attn_logit_softcapping") is not None:
        raise UnsupportedModel(
            "config.json: attn_logit_softcapping is not supported for this architecture.",
            param="attn_logit_softcapping",
        )


def _sizes(fields: Fields, family: Family) -> dict[str, Any]:
    hidden = fields.integer("hidden_size", high=MAX_HIDDEN)
    heads = fields.integer("num_attention_heads", high=MAX_HEADS)
    kv_heads = fields.integer("num_key_value_heads", high=MAX_HEADS, default=heads)
    if heads % kv_heads:
        raise fields.invalid("num_key_value_heads", f"must divide num_attention_heads ({heads})")
    return {
        "vocab_size": fields.integer("vocab_size", high=MAX_VOCAB),
        "hidden_size": hidden,
        "intermediate_size": fields.integer("intermediate_size", high=MAX_INTERMEDIATE),
        "num_layers": fields.integer("num_hidden_layers", high=MAX_LAYERS),
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": _head_dim(fields, family, hidden, heads),
        "max_context": fields.integer("max_position_embeddings", high=MAX_CONTEXT),
    }


def _head_dim(fields: Fields, family: Family, hidden: int, heads: int) -> int:
    dim = fields.integer("head_dim", low=2, high=MAX_HEAD_DIM, default=family.head_dim)
    name = "head_dim"
    if dim is None:
        if hidden % heads:
            raise fields.invalid("num_attention_heads", f"must divide hidden_size ({hidden}) if head_dim is not given")
        dim, name = hidden // heads, "num_attention_heads"
    if dim % 2 or not 2 <= dim <= MAX_HEAD_DIM:
        raise fields.invalid(name, f"must give heads of an even dimension from 2 to {MAX_HEAD_DIM} (they have {dim})")
    return dim


def _parts(fields: Fields, family: Family) -> dict[str, Any]:
    layers = fields.integer("num_hidden_layers", high=MAX_LAYERS)
    attention_bias = family.bias == "attention_bias" and fields.boolean("attention_bias", default=False)
    rope, local_rope = _ropes(fields, family)
    hidden = fields.integer("hidden_size", high=MAX_HIDDEN)
    return {
        "norm_eps": fields.number("rms_norm_eps", low=0.0, high=1.0, default=1e-6),
        "activation": _activation(fields, family),
        "rope": rope,
        "local_rope": local_rope,
        "windows": read_windows(fields, family.windows, layers),
        "attn_scale": _attn_scale(fields, family),
        "attn_softcap": _softcap(fields, "attn_logit_softcapping", family.has_attn_softcap, family.attn_softcap),
        "final_softcap": _softcap(fields, "final_logit_softcapping", family.has_final_softcap, family.final_softcap),
        "embedding_scale": hidden**0.5 if family.scale_embedding else None,
        "tie_embeddings": fields.boolean("tie_word_embeddings", default=family.tie_embeddings),
        "qkv_bias": attention_bias or family.bias == "qkv",
        "o_bias": attention_bias,
        "mlp_bias": family.mlp_bias and fields.boolean("mlp_bias", default=False),
        "qk_norm": family.qk_norm,
        "unit_offset_norm": family.unit_offset_norm,
        "post_norms": family.post_norms,
    }


def _activation(fields: Fields, family: Family) -> str:
    name = fields.text(family.activation_field, default=family.activation)
    if name not in _ACTIVATIONS:
        raise UnsupportedModel(
            f"config.json: the activation {name!r} is not supported; supported: {', '.join(_ACTIVATIONS)}.",
            param=family.activation_field,
        )
    return _ACTIVATIONS[name]


def _ropes(fields: Fields, family: Family) -> tuple[RopeConfig, RopeConfig | None]:
    max_context = fields.integer("max_position_embeddings", high=MAX_CONTEXT)
    if family.local_rope_theta is None:
        return read_rope(fields, default_theta=family.rope_theta, max_context=max_context), None
    return read_rope_pair(
        fields,
        default_theta=family.rope_theta,
        default_local_theta=family.local_rope_theta,
        max_context=max_context,
    )


def _attn_scale(fields: Fields, family: Family) -> float:
    if family.query_scalar is None:
        hidden = fields.integer("hidden_size", high=MAX_HIDDEN)
        heads = fields.integer("num_attention_heads", high=MAX_HEADS)
        return 1.0 / math.sqrt(_head_dim(fields, family, hidden, heads))
    return 1.0 / math.sqrt(fields.number("query_pre_attn_scalar", low=1e-6, high=1e6, default=family.query_scalar))


def _softcap(fields: Fields, name: str, allowed: bool, default: float | None) -> float | None:
    if not allowed or (fields.has(name) and fields.raw(name) is None):
        return None
    return fields.number(name, low=1e-3, high=1e6, default=default)


def _tokens(fields: Fields) -> dict[str, Any]:
    vocab = fields.integer("vocab_size", high=MAX_VOCAB)
    dtype = fields.text("dtype", default=None) or fields.text("torch_dtype", default=None)
    if dtype is not None and dtype.removeprefix("torch.") not in _DTYPES:
        raise UnsupportedModel(
            f"config.json: the dtype {dtype!r} is not supported; supported: {', '.join(_DTYPES)}.", param="dtype"
        )
    return {
        "bos_token_id": fields.integer("bos_token_id", low=0, high=vocab - 1, default=None),
        "eos_token_ids": _eos_ids(fields, vocab),
        "dtype": dtype and dtype.removeprefix("torch."),
    }


def _eos_ids(fields: Fields, vocab: int) -> tuple[int, ...]:
    value = fields.raw("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for item in ids:
        if isinstance(item, bool) or not isinstance(item, int) or not 0 <= item < vocab:
            raise fields.invalid("eos_token_id", f"must be a token id below {vocab}, or a list of them")
    return tuple(dict.fromkeys(ids))
