"""Turns a Llama-architecture GGUF file into a Hugging Face folder in bfloat16.

model.safetensors      weights, dequantised, rounded to nearest even; bytes depend on the GGUF alone
config.json            with rope_theta at the top level too: older readers look only there
generation_config.json
tokenizer.json         byte-level BPE; see `gguf_tokenizer`
tokenizer_config.json  special tokens and chat template
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, ReaderTensor, dequantize
from numpy.typing import NDArray

from lamina.errors import UnsupportedModel
from lamina.models.gguf_tokenizer import build_tokenizer, tokenizer_config
from lamina.models.progress import Progress, silent
from lamina.models.safetensors_writer import Bf16Writer

__all__ = ["convert_gguf"]

_TOP_LEVEL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_PER_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.weight")
Fields = Mapping[str, Any]


def convert_gguf(source: Path, folder: Path, progress: Progress = silent) -> None:
    """Converts the GGUF file `source` into the existing, empty `folder`.

    Raises UnsupportedModel, naming it, for an architecture, tokenizer or tensor that it does not know.
    """
    reader = _open(source)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    if fields.get("general.architecture") != "llama":
        raise UnsupportedModel(
            f"{source.name} has architecture {fields.get('general.architecture')!r}; only 'llama' converts "
            "from GGUF. Use the model's original Hugging Face folder instead."
        )
    tensors = {_hf_name(tensor.name): tensor for tensor in reader.tensors}
    _write_json(folder / "config.json", _config(fields, tied="lm_head.weight" not in tensors))
    _write_json(folder / "generation_config.json", _generation_config(fields))
    build_tokenizer(fields).save(str(folder / "tokenizer.json"), pretty=False)
    _write_json(folder / "tokenizer_config.json", tokenizer_config(fields))
    _write_weights(folder / "model.safetensors", tensors, fields, progress)


def _open(source: Path) -> GGUFReader:
    try:
        return GGUFReader(source)
    except (ValueError, KeyError, IndexError) as error:
        raise UnsupportedModel(f"{source.name} is no readable GGUF file: {error}.") from error


def _hf_name(name: str) -> str:
    if name in _TOP_LEVEL:
        return _TOP_LEVEL[name]
    match = _LAYER_NAME.fullmatch(name)
    if match is None or match[2] not in _PER_LAYER:
        raise UnsupportedModel(
            f"The GGUF holds a tensor {name!r}, which a plain Llama model lacks; it cannot be converted."
        )
    return f"model.layers.{match[1]}.{_PER_LAYER[match[2]]}.weight"


def _write_weights(path: Path, tensors: Mapping[str, ReaderTensor], fields: Fields, progress: Progress) -> None:
    # GGUF lists dimensions innermost first.
    shapes = {name: tuple(int(n) for n in reversed(tensors[name].shape)) for name in sorted(tensors)}
    heads = {
        "q_proj": int(fields["llama.attention.head_count"]),
        "k_proj": int(fields["llama.attention.head_count_kv"]),
    }
    with Bf16Writer(path, shapes) as writer:
        for name, shape in shapes.items():
            values = _values(tensors[name], shape)
            projection = name.split(".")[-2]
            if projection in heads:
                values = _unpermute(values, heads[projection])
            progress("convert", writer.write(name, values), writer.total_bytes)


def _values(tensor: ReaderTensor, shape: tuple[int, ...]) -> NDArray[np.float32]:
    values: NDArray[np.float32] = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
    if not np.isfinite(values).all():
        raise UnsupportedModel(f"The GGUF's tensor {tensor.name!r} holds values that are not finite.")
    return values.reshape(shape)


def _unpermute(weight: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Rows of each head from GGUF's rotary order (pairs side by side) to Hugging Face's (two halves)."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _config(fields: Fields, *, tied: bool) -> dict[str, Any]:
    heads = int(fields["llama.attention.head_count"])
    hidden = int(fields["llama.embedding_length"])
    rope_theta = _shortest(fields.get("llama.rope.freq_base", 10000.0))
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "hidden_size": hidden,
        "intermediate_size": int(fields["llama.feed_forward_length"]),
        "num_hidden_layers": int(fields["llama.block_count"]),
        "num_attention_heads": heads,
        "num_key_value_heads": int(fields["llama.attention.head_count_kv"]),
        "head_dim": int(fields.get("llama.rope.dimension_count", hidden // heads)),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "max_position_embeddings": int(fields["llama.context_length"]),
        "rms_norm_eps": _shortest(fields["llama.attention.layer_norm_rms_epsilon"]),
        "rope_theta": rope_theta,
        "rope_parameters": {"rope_theta": rope_theta, "rope_type": "default"},
        "tie_word_embeddings": tied,
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        **_generation_config(fields),
    }


def _generation_config(fields: Fields) -> dict[str, Any]:
    keys = {"bos": "bos", "eos": "eos", "pad": "padding"}
    ids = {f"{ours}_token_id": fields.get(f"tokenizer.ggml.{theirs}_token_id") for ours, theirs in keys.items()}
    return {key: value for key, value in ids.items() if value is not None}


def _shortest(value: float) -> float:
    """GGUF stores float32; this is the double that people wrote (1e-05, not 9.999999747378752e-06)."""
    return float(str(np.float32(value)))


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
