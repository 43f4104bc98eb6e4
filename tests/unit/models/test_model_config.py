"""`config.json` is not trusted: what is understood is read right, everything else is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lamina.errors import ConfigurationInvalid, LaminaError, UnsupportedModel
from lamina.models.config import ModelConfig
from lamina.models.registry import FAMILIES
from lamina.models.rope_config import RopeConfig

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def variant(architecture: str = "Llama", **changes: Any) -> dict[str, Any]:
    return LLAMA | {"architectures": [f"{architecture}ForCausalLM"]} | changes


def read(architecture: str = "Llama", **changes: Any) -> ModelConfig:
    return ModelConfig.from_dict(variant(architecture, **changes))


def without(name: str) -> dict[str, Any]:
    return {key: value for key, value in LLAMA.items() if key != name}


BAD_VALUES = [
    ("vocab_size", 0),
    ("vocab_size", -5),
    ("vocab_size", "100"),
    ("vocab_size", 1 << 40),
    ("vocab_size", True),
    ("vocab_size", 10.5),
    ("vocab_size", float("nan")),
    ("hidden_size", [48]),
    ("hidden_size", 1 << 20),
    ("num_hidden_layers", 0),
    ("num_hidden_layers", 100_000),
    ("num_attention_heads", 10),  # does not divide the hidden size
    ("num_attention_heads", 0),
    ("num_key_value_heads", 3),  # does not divide the heads
    ("num_key_value_heads", 0),
    ("head_dim", 0),
    ("head_dim", 7),
    ("head_dim", 1 << 20),
    ("intermediate_size", -1),
    ("max_position_embeddings", 0),
    ("max_position_embeddings", 1 << 60),
    ("rms_norm_eps", -1e-5),
    ("rms_norm_eps", float("inf")),
    ("rms_norm_eps", "small"),
    ("rope_theta", 0),
    ("rope_theta", -10_000),
    ("rope_theta", float("nan")),
    ("tie_word_embeddings", "yes"),
    ("attention_bias", 1),
    ("mlp_bias", "no"),
    ("rope_scaling", "linear"),
    ("eos_token_id", 100),
    ("eos_token_id", -1),
    ("eos_token_id", [2, "3"]),
    ("eos_token_id", True),
    ("bos_token_id", 100),
    ("bos_token_id", [1]),
    ("hidden_act", 3),
    ("dtype", 16),
    ("architectures", "LlamaForCausalLM"),
    ("architectures", []),
    ("architectures", [None]),
    ("architectures", ["LlamaForCausalLM", "Qwen2ForCausalLM"]),
]


@pytest.mark.parametrize(("name", "value"), BAD_VALUES, ids=lambda item: str(item)[:24])
def test_bad_values_are_refused_by_field(name: str, value: Any) -> None:
    with pytest.raises(ConfigurationInvalid) as caught:
        read(**{name: value})
    assert caught.value.param == name
    assert name in str(caught.value)


@pytest.mark.parametrize("name", [name for name in LLAMA if name != "num_key_value_heads"])
@pytest.mark.parametrize("null", [False, True], ids=["absent", "null"])
def test_what_every_model_has_is_required(name: str, null: bool) -> None:
    with pytest.raises(ConfigurationInvalid, match=name):
        ModelConfig.from_dict(LLAMA | {name: None} if null else without(name))


def test_limits_are_stated() -> None:
    with pytest.raises(ConfigurationInvalid, match="from 1 to 512"):
        read(num_hidden_layers=513)


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "Gemma3ForConditionalGeneration", "LlamaModel", ""])
def test_an_unsupported_architecture_is_named_with_the_supported_ones(name: str) -> None:
    with pytest.raises(UnsupportedModel) as caught:
        ModelConfig.from_dict(LLAMA | {"architectures": [name]})
    assert repr(name) in str(caught.value)
    assert all(family in str(caught.value) for family in FAMILIES)


UNSUPPORTED = [
    ("Llama", "rope_scaling", {"rope_type": "yarn", "factor": 4.0}, "default, linear, llama3"),
    ("Llama", "rope_scaling", {"type": "dynamic", "factor": 4.0}, "dynamic"),
    ("Qwen2", "rope_scaling", {"type": "mrope", "mrope_section": [1, 2]}, "mrope_section"),
    ("Llama", "rope_parameters", {"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ("Llama", "partial_rotary_factor", 0.25, "whole head"),
    ("Llama", "quantization_config", {"quant_method": "gptq"}, "quantised"),
    ("Llama", "hidden_act", "relu", "silu"),
    ("Gemma2", "hidden_activation", "gelu", "gelu_pytorch_tanh"),
    ("Llama", "dtype", "float8_e4m3fn", "bfloat16"),
    ("Gemma3", "use_bidirectional_attention", True, "causal"),
    ("Gemma3", "attn_logit_softcapping", 50.0, "attn_logit_softcapping"),
    ("Qwen3", "layer_types", ["full_attention", "linear_attention"] * 2, "linear_attention"),
    ("Mistral", "layer_types", ["full_attention", "sliding_attention"] * 2, "layer_types"),
    ("Llama", "layer_types", ["sliding_attention"] * 4, "layer_types"),
]


@pytest.mark.parametrize(("architecture", "name", "value", "told"), UNSUPPORTED)
def test_what_would_change_the_model_is_refused(architecture: str, name: str, value: Any, told: str) -> None:
    """A feature that is not there is never ignored; the message names what is supported or what is wrong."""
    with pytest.raises(UnsupportedModel, match=told):
        read(architecture, **{name: value})


BAD_ROPES = [
    {"rope_type": "linear"},
    {"rope_type": "linear", "factor": 0},
    {"rope_type": "linear", "factor": "2"},
    {"rope_type": "llama3", "factor": 8.0},
    LLAMA3 | {"high_freq_factor": 1.0},
    LLAMA3 | {"low_freq_factor": 0},
    LLAMA3 | {"original_max_position_embeddings": -1},
    {"rope_type": 3},
    {"rope_theta": "big"},
]


@pytest.mark.parametrize("rope", BAD_ROPES, ids=str)
def test_bad_rope_settings_are_refused(rope: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationInvalid):
        read(rope_parameters=rope)


def test_both_spellings_of_rope_mean_the_same() -> None:
    """transformers 4 wrote rope_theta and rope_scaling, 5 writes rope_parameters."""
    scaling = LLAMA3 | {"original_max_position_embeddings": 64}
    old = read(rope_theta=500_000.0, rope_scaling=scaling)
    new = read(rope_parameters=scaling | {"rope_theta": 500_000.0})
    assert old.rope == new.rope
    assert old.rope == RopeConfig(theta=500_000.0, kind="llama3", factor=8.0, original_max_context=64)


def test_the_oldest_spelling_of_rope_is_read() -> None:
    assert read(rope_scaling={"type": "linear", "factor": 2}).rope == RopeConfig(theta=1e4, kind="linear", factor=2.0)


def test_llama3_rope_without_original_context_takes_the_models() -> None:
    assert read(rope_scaling=LLAMA3).rope.original_max_context == 128


def test_gemma3_has_two_ropes() -> None:
    old = read("Gemma3", rope_theta=1e6, rope_local_base_freq=5e3, rope_scaling={"rope_type": "linear", "factor": 8.0})
    assert old.rope == RopeConfig(theta=1e6, kind="linear", factor=8.0)
    assert old.local_rope == RopeConfig(theta=5e3)
    default = read("Gemma3")
    assert (default.rope.theta, default.local_rope) == (1e6, RopeConfig(theta=1e4))
    with pytest.raises(ConfigurationInvalid, match="full_attention"):
        read("Gemma3", rope_parameters={"rope_type": "default", "rope_theta": 1e6})


WINDOWS = [
    ("Llama", {}, (None,) * 4),
    ("Llama", {"sliding_window": 8}, (None,) * 4),
    ("Mistral", {}, (4096,) * 4),
    ("Mistral", {"sliding_window": None}, (None,) * 4),
    ("Mistral", {"sliding_window": 8}, (8,) * 4),
    ("Qwen2", {"sliding_window": 8, "max_window_layers": 1}, (None,) * 4),
    ("Qwen2", {"sliding_window": 8, "max_window_layers": 1, "use_sliding_window": True}, (None, 8, 8, 8)),
    ("Qwen3", {"sliding_window": None, "use_sliding_window": True, "max_window_layers": 0}, (None,) * 4),
    ("Gemma2", {"sliding_window": 8}, (8, None, 8, None)),
    ("Gemma3", {"sliding_window": 8}, (8, 8, 8, 8)),
    ("Gemma3", {"sliding_window": 8, "num_hidden_layers": 7}, (8, 8, 8, 8, 8, None, 8)),
    ("Gemma3", {"sliding_window": 8, "sliding_window_pattern": 2}, (8, None, 8, None)),
    ("Gemma3", {"sliding_window": 8, "_sliding_window_pattern": 3}, (8, 8, None, 8)),
]


@pytest.mark.parametrize(("architecture", "changes", "windows"), WINDOWS, ids=str)
def test_windows_by_layer(architecture: str, changes: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    assert read(architecture, **changes).windows == windows


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"layer_types": ["sliding_attention"] * 4}, "sliding_window"),  # but use_sliding_window is off
        ({"layer_types": ["full_attention"] * 3}, "4 layers"),
        ({"layer_types": "full_attention"}, "list of strings"),
        ({"use_sliding_window": True, "sliding_window": 0}, "sliding_window"),
        ({"use_sliding_window": True, "max_window_layers": -1}, "max_window_layers"),
    ],
)
def test_bad_windows_are_refused(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigurationInvalid, match=told):
        read("Qwen3", **changes)


def test_family_defaults() -> None:
    """What old files leave out, as the reference fills it in."""
    llama, qwen2, qwen3, gemma2 = (read(name) for name in ("Llama", "Qwen2", "Qwen3", "Gemma2"))
    assert (llama.head_dim, llama.tie_embeddings, llama.qkv_bias, llama.norm_eps) == (12, False, False, 1e-6)
    assert (qwen2.qkv_bias, qwen2.o_bias, qwen2.qk_norm) == (True, False, False)
    assert (qwen3.head_dim, qwen3.qk_norm) == (128, True)
    assert (gemma2.head_dim, gemma2.tie_embeddings, gemma2.activation) == (256, True, "gelu_tanh")
    assert (gemma2.attn_softcap, gemma2.final_softcap, gemma2.attn_scale) == (50.0, 30.0, 1 / 16)
    assert gemma2.embedding_scale == 48**0.5
    assert read("Gemma2", attn_logit_softcapping=None).attn_softcap is None


def test_geometry_describes_the_projections() -> None:
    geometry = read(head_dim=16).geometry()
    assert geometry.num_layers == 4
    assert geometry.targets["q_proj"] == (48, 64)
    assert geometry.targets["v_proj"] == (48, 32)
    assert geometry.targets["o_proj"] == (64, 48)
    assert geometry.targets["down_proj"] == (72, 48)


def write(folder: Path, config: Any, generation: Any = None) -> Path:
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        (2, None, (2,)),
        ([2, 5, 2], None, (2, 5)),
        (None, None, ()),
        (2, {"eos_token_id": [7, 8]}, (7, 8)),
        (2, {"eos_token_id": 7}, (7,)),
        (2, {"eos_token_id": None}, (2,)),
        (2, {"temperature": 0.6}, (2,)),
    ],
)
def test_end_of_sequence_ids(config: Any, generation: Any, expected: tuple[int, ...], tmp_path: Path) -> None:
    """generation_config.json decides where it says something, as in the reference's `generate`."""
    folder = write(tmp_path, variant(eos_token_id=config), generation)
    assert ModelConfig.from_folder(folder).eos_token_ids == expected


def test_bad_generation_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationInvalid, match=r"generation_config\.json: eos_token_id"):
        ModelConfig.from_folder(write(tmp_path, LLAMA, {"eos_token_id": 1000}))


@pytest.mark.parametrize(
    ("text", "told"),
    [("{", "not valid JSON"), ("[]", "JSON object"), ("[" * 100_000, "not valid JSON"), ("\x00", "not valid JSON")],
    ids=["truncated", "list", "deep", "nul"],
)
def test_broken_files_are_refused(text: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationInvalid, match=told):
        ModelConfig.from_folder(write(tmp_path, text))


def test_a_huge_file_is_refused_unread(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationInvalid, match="limit of 4194304 bytes"):
        ModelConfig.from_folder(write(tmp_path, " " * (5 << 20)))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationInvalid, match=r"config\.json cannot be read"):
        ModelConfig.from_folder(tmp_path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
NAMES = sorted(
    LLAMA.keys()
    | {"head_dim", "rope_theta", "rope_scaling", "rope_parameters", "sliding_window", "layer_types", "eos_token_id"}
    | {"hidden_act", "hidden_activation", "rms_norm_eps", "tie_word_embeddings", "query_pre_attn_scalar", "dtype"}
    | {"use_sliding_window", "max_window_layers", "final_logit_softcapping", "attn_logit_softcapping"}
)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(FAMILIES)), st.dictionaries(st.sampled_from(NAMES), JSON, max_size=4))
def test_any_json_gives_a_model_or_a_typed_error(architecture: str, changes: dict[str, Any]) -> None:
    """No value of any field ends in another exception, and what is accepted has a sound shape."""
    try:
        config = ModelConfig.from_dict(LLAMA | {"architectures": [architecture]} | changes)
    except LaminaError:
        return
    assert config.num_heads % config.num_kv_heads == 0
    assert config.head_dim % 2 == 0
    assert len(config.windows) == config.num_layers
    config.geometry()
