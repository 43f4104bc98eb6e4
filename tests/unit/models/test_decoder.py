"""Every architecture against transformers, on tiny random models that went through files."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from fixtures.dense import DenseAttend, logits_of
from lamina.models.config import ModelConfig
from lamina.models.interface import CausalLM, Linear
from lamina.models.loader import load_model, random_model
from lamina.models.registry import FAMILIES

CPU = torch.device("cpu")
Loaded = Callable[[str], tuple[Any, CausalLM]]
TOKENS = 23

BASE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0}
MIXED = ["full_attention", "sliding_attention", "full_attention"]

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-mha": ("Llama", {"num_key_value_heads": 4}),
    "llama-mqa": ("Llama", {"num_key_value_heads": 1, "rms_norm_eps": 1e-3}),
    "llama-gqa3-head16": ("Llama", {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True, "num_attention_heads": 3, "num_key_value_heads": 1}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-llama3-rope": ("Llama", {"rope_parameters": LLAMA3}),
    "llama-linear-rope": ("Llama", {"rope_parameters": LINEAR}),
    "llama-gelu": ("Llama", {"hidden_act": "gelu_pytorch_tanh"}),
    "mistral-window": ("Mistral", {"sliding_window": 5}),
    "mistral-full": ("Mistral", {"sliding_window": None, "head_dim": 8}),
    "mistral-window-1": ("Mistral", {"sliding_window": 1, "num_key_value_heads": 1}),
    "qwen2": ("Qwen2", {}),
    "qwen2-upper-window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
    "qwen2-tied-theta": (
        "Qwen2",
        {"tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    ),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3-mha-bias": ("Qwen3", {"head_dim": 8, "num_key_value_heads": 4, "attention_bias": True}),
    "qwen3-mixed-window": (
        "Qwen3",
        {"head_dim": 12, "use_sliding_window": True, "sliding_window": 3, "layer_types": MIXED},
    ),
    "gemma2": ("Gemma2", {"head_dim": 16, "sliding_window": 4}),
    "gemma2-caps": (
        "Gemma2",
        {
            "head_dim": 12,
            "sliding_window": 6,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
            "query_pre_attn_scalar": 20,
        },
    ),
    "gemma2-no-caps-untied": (
        "Gemma2",
        {
            "head_dim": 12,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "tie_word_embeddings": False,
            "num_key_value_heads": 1,
        },
    ),
    "gemma3": ("Gemma3", {"head_dim": 16, "sliding_window": 4, "num_hidden_layers": 7}),
    "gemma3-pattern-ropes": (
        "Gemma3",
        {
            "head_dim": 12,
            "sliding_window": 5,
            "layer_types": MIXED,
            "query_pre_attn_scalar": 7,
            "rope_parameters": {
                "full_attention": LINEAR,
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
    ),
    "gemma3-final-cap-mha": ("Gemma3", {"head_dim": 8, "final_logit_softcapping": 1.5, "num_key_value_heads": 4}),
}


def oracle(case: str, seed: int = 0) -> Any:
    """A transformers model whose every weight is random: norms and biases too, which it would leave at 1 and 0."""
    kind, options = CASES[case]
    name = "Gemma3Text" if kind == "Gemma3" else kind
    config = getattr(transformers, f"{name}Config")(**(BASE | options))
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 2:
                parameter.copy_(noise * 1.5 / parameter.shape[1] ** 0.5)
            else:
                parameter.copy_(parameter + 0.3 * noise)
    return model


def saved(model: Any, folder: Path, **options: Any) -> Path:
    model.save_pretrained(folder, **options)
    return folder


def prompt(vocab: int = 97, count: int = TOKENS, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, vocab, (count,), generator=torch.Generator().manual_seed(seed))


def reloaded(reference: Any, folder: Path, dtype: torch.dtype) -> Any:
    """The reference from its files: `.to(dtype)` would round its rope frequencies too."""
    config = copy.deepcopy(reference.config)
    return type(reference).from_pretrained(folder, config=config, dtype=dtype, attn_implementation="eager").eval()


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    """case -> (reference, our fp32 model from its files). Not to be changed."""

    @functools.cache
    def load(case: str) -> tuple[Any, CausalLM]:
        reference = oracle(case)
        folder = saved(reference, tmp_path_factory.mktemp(case))
        return reference, load_model(folder, dtype=torch.float32, device=CPU)

    return load


@torch.no_grad()
def oracle_logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = model(ids[None]).logits[0]
    return result


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_those_of_transformers(case: str, loaded: Loaded) -> None:
    """fp32 logits of a whole prompt are within 1e-4 of the reference's."""
    reference, model = loaded(case)
    ids = prompt()
    expected = oracle_logits(reference, ids)
    assert expected.std() > 0.1, "logits without contrast would prove nothing"
    torch.testing.assert_close(logits_of(model, ids), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("case", CASES)
def test_chunks_give_the_same_logits(case: str, loaded: Loaded) -> None:
    """A sequence in pieces through a cache gives what it gives in one piece, single tokens included."""
    _, model = loaded(case)
    ids = prompt()
    whole = logits_of(model, ids)
    torch.testing.assert_close(logits_of(model, ids, 9), whole, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(logits_of(model, ids, 1, 1, 13, 1), whole, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("case", ["llama-llama3-rope", "gemma3-pattern-ropes"])
def test_positions_far_out_rotate_alike(case: str, loaded: Loaded) -> None:
    """Rope scaling agrees with the reference up to the last position of the context."""
    reference, model = loaded(case)
    ids = prompt(count=128)
    torch.testing.assert_close(logits_of(model, ids), oracle_logits(reference, ids), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", ["llama", "qwen2", "qwen3", "gemma2", "gemma3", "mistral-window"])
def test_16_bit_stays_close_to_float32(case: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Computing in 16 bits moves the logits by no more than the reference's own 16-bit run does, give or take half."""
    reference = oracle(case)
    folder = saved(reference, tmp_path)
    exact = logits_of(load_model(folder, dtype=torch.float32, device=CPU), prompt())
    ours = logits_of(load_model(folder, dtype=dtype, device=CPU), prompt())
    theirs = oracle_logits(reloaded(reference, folder, dtype), prompt()).float()
    assert ours.dtype == torch.float32
    assert (ours - exact).norm() <= 1.5 * (theirs - exact).norm()


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_checkpoint_and_computing_dtype_are_independent(stored: torch.dtype, tmp_path: Path) -> None:
    """Weights stored in one type and computed in float32 give what the reference gives for those same values."""
    reference = oracle("llama-tied").to(stored)
    folder = saved(reference, tmp_path)
    model = load_model(folder, dtype=torch.float32, device=CPU)
    expected = oracle_logits(reloaded(reference, folder, torch.float32), prompt())
    torch.testing.assert_close(logits_of(model, prompt()), expected, atol=1e-4, rtol=1e-4)


def test_every_architecture_has_cases() -> None:
    assert {f"{kind}ForCausalLM" for kind, _ in CASES.values()} == set(FAMILIES)


def test_attention_is_told_window_scale_and_cap(loaded: Loaded) -> None:
    """Gemma 2 alternates windows and scales by its own scalar."""
    _, model = loaded("gemma2-caps")
    attend = DenseAttend()
    model.forward(prompt(), torch.arange(TOKENS), attend, None)
    scale = 20**-0.5
    assert attend.seen == {
        0: (pytest.approx(scale), 6, 2.0),
        1: (pytest.approx(scale), None, 2.0),
        2: (pytest.approx(scale), 6, 2.0),
    }


class RecordingLora:
    """Adds x @ delta for each site, and remembers the shapes it saw."""

    def __init__(self, deltas: dict[tuple[int, str], torch.Tensor]) -> None:
        self.deltas, self.calls = deltas, []  # type: ignore[var-annotated]

    def project(self, layer: int, site: str, x: torch.Tensor, linear: Linear) -> torch.Tensor:
        y = linear(x)
        self.calls.append((layer, site, tuple(x.shape), tuple(y.shape)))
        return y.add_(x @ self.deltas[layer, site])


@pytest.mark.parametrize("case", ["llama-gqa3-head16", "qwen3", "gemma3"])
def test_lora_hooks_change_the_model_like_changed_weights(case: str, tmp_path: Path) -> None:
    """A delta added at every fused site equals the same delta merged into the reference's weights."""
    reference = oracle(case)
    model = load_model(saved(reference, tmp_path), dtype=torch.float32, device=CPU)
    geometry = model.config.geometry()
    generator = torch.Generator().manual_seed(5)
    deltas: dict[tuple[int, str], torch.Tensor] = {}
    sites = {
        "qkv": ("q_proj", "k_proj", "v_proj"),
        "o": ("o_proj",),
        "gate_up": ("gate_proj", "up_proj"),
        "down": ("down_proj",),
    }
    for layer in range(geometry.num_layers):
        for site, names in sites.items():
            inputs = geometry.in_features(site)
            delta = torch.randn(inputs, geometry.out_features(site), generator=generator) * 0.3 / inputs**0.5
            deltas[layer, site] = delta
            for name in names:
                column = geometry.column_of(name)
                piece = delta[:, column : column + geometry.targets[name][1]]
                module = reference.get_submodule(geometry.module_name(layer, name))
                module.weight.data.add_(piece.T)
    lora = RecordingLora(deltas)
    hidden = model.forward(prompt(), torch.arange(TOKENS), DenseAttend(), lora)
    torch.testing.assert_close(model.logits(hidden), oracle_logits(reference, prompt()), atol=1e-4, rtol=1e-4)
    assert [call[:2] for call in lora.calls] == [(n, s) for n in range(geometry.num_layers) for s in sites]


def test_random_models_repeat() -> None:
    """The same seed gives the same model, another seed another one; contrast enough for greedy decoding."""
    config = ModelConfig.from_dict(BASE | {"architectures": ["Qwen3ForCausalLM"], "head_dim": 16})
    first, again, other = (logits_of(random_model(config, seed, torch.float32, CPU), prompt()) for seed in (3, 3, 4))
    assert torch.equal(first, again)
    assert not torch.allclose(first, other)
    assert first.std() > 0.1
    assert first.isfinite().all()


def test_forward_leaves_its_inputs_alone(loaded: Loaded) -> None:
    """Work in place never reaches the embedding table or the token ids: two runs agree bit for bit."""
    _, model = loaded("gemma3")
    ids = prompt()
    first = logits_of(model, ids)
    assert torch.equal(ids, prompt())
    assert torch.equal(first, logits_of(model, ids))


def test_rows_do_not_depend_on_their_neighbours(loaded: Loaded) -> None:
    """`logits` of chosen rows are the chosen logits."""
    _, model = loaded("llama")
    hidden = model.forward(prompt(), torch.arange(TOKENS), DenseAttend(), None)
    rows = torch.tensor([3, 3, 22])
    torch.testing.assert_close(model.logits(hidden[rows]), model.logits(hidden)[rows], atol=1e-5, rtol=1e-5)
