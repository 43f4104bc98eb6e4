"""Loaded weights: fused, scaled, in real ranks; and the same deltas as PEFT's own layers."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lamina_kernels.lora import LoraWeights
from lamina_lora import dora
from lamina_lora.batch import Segment
from lamina_lora.dora import dora_gains
from lamina_lora.errors import AdapterRejected
from lamina_lora.geometry import SITES, TARGETS, BaseGeometry
from lamina_lora.slots import AdapterSlots
from lamina_lora.validate import validate_adapter
from lamina_lora.weights import load_adapter, site_index
from support.lora_folders import TINY, config, tensors, write, write_plain


def test_slices_are_stacked_and_scaled(tmp_path: Path) -> None:
    """A stacks the present slices in column order; B is transposed and holds alpha / r."""
    weights = tensors(targets=("v_proj", "q_proj"))
    lora = load_adapter(write(tmp_path, config(), weights), TINY, torch.float32).sites[site_index(1, "qkv")]
    assert lora is not None
    stem = "base_model.model.model.layers.1.self_attn"
    a = torch.cat([weights[f"{stem}.q_proj.lora_A.weight"], weights[f"{stem}.v_proj.lora_A.weight"]])
    assert torch.equal(lora.a, a)
    assert lora.columns == (0, 36)
    assert torch.equal(lora.b[1], 2.0 * weights[f"{stem}.v_proj.lora_B.weight"].t())
    assert all(b.is_contiguous() for b in lora.b)


def test_only_what_changes_is_there(tmp_path: Path) -> None:
    """Sites and layers without the adapter hold nothing, and bytes are the real ranks'."""
    settings = config(target_modules=["down_proj"], layers_to_transform=[1])
    loaded = load_adapter(write(tmp_path, settings, tensors(targets=("down_proj",), layers=(1,))), TINY, torch.float32)
    present = [number for number, lora in enumerate(loaded.sites) if lora is not None]
    assert present == [site_index(1, "down")]
    assert loaded.nbytes == 4 * 4 * (40 + 24)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_converts_after_scaling(tmp_path: Path, dtype: torch.dtype) -> None:
    """The scaling is applied in float32, then rounded once."""
    settings = config(lora_alpha=3, use_rslora=True, target_modules=["o_proj"])
    weights = tensors(targets=("o_proj",))
    loaded = load_adapter(write(tmp_path, settings, weights), TINY, dtype).sites[site_index(0, "o")]
    assert loaded is not None
    exact = weights["base_model.model.model.layers.0.self_attn.o_proj.lora_B.weight"] * (3 / 2)
    assert torch.equal(loaded.b[0], exact.to(dtype).t())


def test_overflow_is_refused(tmp_path: Path) -> None:
    """Finite in the file, infinite in the engine's dtype: refused, not served."""
    weights = {name: value * 1e5 for name, value in tensors().items()}
    folder = write(tmp_path, config(), weights)
    load_adapter(folder, TINY, torch.float32)
    with pytest.raises(AdapterRejected, match=r"overflows torch\.float16"):
        load_adapter(folder, TINY, torch.float16)


def test_a_changed_store_is_noticed(tmp_path: Path) -> None:
    """Contents that no longer have the digest are refused."""
    folder = write_plain(tmp_path, seed=1)
    digest = validate_adapter(folder, TINY, max_rank=8).digest
    assert load_adapter(folder, TINY, torch.float32, digest=digest).digest == digest
    write_plain(tmp_path, seed=2)
    with pytest.raises(AdapterRejected, match="the stored adapter changed"):
        load_adapter(folder, TINY, torch.float32, digest=digest)


def test_the_rank_limit_holds_at_loading_too(tmp_path: Path) -> None:
    """An engine with a lower limit refuses what another one accepted."""
    with pytest.raises(AdapterRejected, match="rank above the limit of 3"):
        load_adapter(write_plain(tmp_path, rank=4), TINY, torch.float32, max_rank=3)


class _Base:
    """`BaseWeights` of one matrix for all layers."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        self._weights = weights

    def rows(self, layer: int, target: str) -> Tensor:
        return self._weights[target]


def _o_proj_dora(folder: Path, weight: Tensor, dtype: torch.dtype) -> LoraWeights:
    loaded = load_adapter(folder, TINY, dtype, base=_Base({"o_proj": weight})).sites[site_index(1, "o")]
    assert loaded is not None
    return loaded


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gains_are_magnitudes_over_norms(tmp_path: Path, dtype: torch.dtype) -> None:
    """Of W with the unrounded adapter added, in float32 whatever the model computes in."""
    weights = tensors(targets=("o_proj",), dora=True)
    folder = write(tmp_path, config(use_dora=True, target_modules=["o_proj"]), weights)
    weight = torch.randn(24, 24).to(dtype)
    (gains,) = _o_proj_dora(folder, weight, dtype).gains or ()
    stem = "base_model.model.model.layers.1.self_attn.o_proj.lora_"
    delta = 2.0 * weights[f"{stem}B.weight"].double() @ weights[f"{stem}A.weight"].double()
    want = weights[f"{stem}magnitude_vector"].double() / (weight.double() + delta).norm(dim=1)
    torch.testing.assert_close(gains, want.float())


def test_a_row_without_length_is_refused(tmp_path: Path) -> None:
    """No magnitude can be given to W + BA = 0."""
    weights = {name: value * ("lora_B" not in name) for name, value in tensors(targets=("o_proj",), dora=True).items()}
    folder = write(tmp_path, config(use_dora=True, target_modules=["o_proj"]), weights)
    with pytest.raises(AdapterRejected, match="zero or overflow"):
        _o_proj_dora(folder, torch.zeros(24, 24), torch.float32)


def test_dora_needs_the_base_weights(tmp_path: Path) -> None:
    """Without them the error says so, and a base of another shape is a mistake of the caller."""
    folder = write(tmp_path, config(use_dora=True, target_modules=["o_proj"]), tensors(targets=("o_proj",), dora=True))
    with pytest.raises(AdapterRejected, match="DoRA adapter"):
        load_adapter(folder, TINY, torch.float32)
    with pytest.raises(ValueError, match="do not fit"):
        _o_proj_dora(folder, torch.ones(24, 25), torch.float32)


def test_norms_are_taken_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of rows at a time changes nothing."""
    weight, a, b = torch.randn(40, 24), torch.randn(4, 24), torch.randn(40, 4)
    whole = dora_gains(weight, a, b, torch.ones(40))
    monkeypatch.setattr(dora, "_PIECE", 24 * 7)
    torch.testing.assert_close(dora_gains(weight, a, b, torch.ones(40)), whole)


CONFIGS: dict[str, dict[str, Any]] = {
    "all seven": {"r": 4, "lora_alpha": 8, "target_modules": list(TARGETS)},
    "all-linear": {"r": 3, "lora_alpha": 5, "target_modules": "all-linear"},
    "rsLoRA": {"r": 7, "lora_alpha": 8, "use_rslora": True, "target_modules": ["q_proj", "down_proj"]},
    "patterns": {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": list(TARGETS),
        # overlapping, and in the order in which PEFT saves them, so that it reads back what it trained
        "rank_pattern": {"^model.layers.0.mlp.up_proj": 1, r"layers\.1\..*": 6, "q_proj": 2},
        "alpha_pattern": {r"^model\.layers\.2\.self_attn\.o_proj$": 11, "self_attn.v_proj": 3},
    },
    "patterns and rsLoRA": {
        "r": 4,
        "lora_alpha": 8,
        "use_rslora": True,
        "target_modules": ["k_proj", "gate_proj"],
        "rank_pattern": {"layers.0.self_attn.k_proj": 9},
        "alpha_pattern": {"gate_proj": 2.5},
    },
    "pattern that is a suffix of a word": {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["up_proj", "gate_proj"],
        "rank_pattern": {".*p_proj": 2},
    },
    "some layers": {"r": 4, "lora_alpha": 8, "target_modules": ["v_proj"], "layers_to_transform": [0, 2]},
    "one layer by pattern": {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["v_proj", "up_proj"],
        "layers_to_transform": 1,
        "layers_pattern": "layers",
    },
    "regular expression": {"r": 4, "lora_alpha": 8, "target_modules": r".*\.[02]\..*\.(q|up|down)_proj"},
    "exclusions": {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": "all-linear",
        "exclude_modules": ["layers.1.mlp.up_proj", "o_proj"],
    },
    "excluded by expression": {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["q_proj", "k_proj"],
        "exclude_modules": r".*layers\.1.*",
    },
    "full name": {"r": 4, "lora_alpha": 8, "target_modules": ["model.layers.1.self_attn.q_proj", "mlp.up_proj"]},
    "gaussian and dropout": {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["q_proj"],
        "init_lora_weights": "gaussian",
        "lora_dropout": 0.1,
    },
    "negative alpha": {"r": 4, "lora_alpha": -8, "target_modules": ["q_proj"]},
    "DoRA": {"r": 4, "lora_alpha": 8, "target_modules": list(TARGETS), "use_dora": True},
    "DoRA, rsLoRA and patterns": {
        "r": 4,
        "lora_alpha": 8,
        "use_dora": True,
        "use_rslora": True,
        "target_modules": ["k_proj", "o_proj", "gate_proj"],
        "rank_pattern": {"layers.0.self_attn.k_proj": 9},
        "alpha_pattern": {"gate_proj": 2.5},
    },
}

GEOMETRY = BaseGeometry(num_layers=3, vocab_size=50, hidden_size=24, targets=TINY.targets)


def _peft_model(changes: dict[str, Any], folder: Path) -> Any:
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(7)
    shape = LlamaConfig(
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=50,
        attention_bias=True,
        mlp_bias=True,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # FutureWarnings between transformers and PEFT
        model = get_peft_model(LlamaForCausalLM(shape), LoraConfig(task_type="CAUSAL_LM", **changes))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.normal_()
                elif "magnitude" in name:
                    parameter.mul_(torch.rand_like(parameter) + 0.5)
        model.save_pretrained(folder)
        loaded = PeftModel.from_pretrained(LlamaForCausalLM(shape), str(folder)).eval()
        with torch.no_grad():
            for name, parameter in loaded.named_parameters():
                if name.endswith(".bias"):
                    parameter.normal_()
        return loaded


class _PeftLayers:
    """PEFT's layers, adapted or not, by the names of the base model. A `BaseWeights`."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def layer(self, layer: int, target: str) -> Any:
        return self.model.get_submodule(f"base_model.model.{GEOMETRY.module_name(layer, target)}")

    def base(self, layer: int, target: str) -> Any:
        adapted = self.layer(layer, target)
        return getattr(adapted, "base_layer", adapted)

    def rows(self, layer: int, target: str) -> Tensor:
        return self.base(layer, target).weight  # type: ignore[no-any-return]


@pytest.mark.parametrize("changes", CONFIGS.values(), ids=CONFIGS)
@torch.inference_mode()
def test_outputs_equal_pefts(tmp_path: Path, changes: dict[str, Any]) -> None:
    """PEFT writes the adapter and reads it back; every output is that of PEFT's own layers, biases included."""
    peft = _PeftLayers(_peft_model(changes, tmp_path))
    slots = AdapterSlots(1 << 30, lambda digest: load_adapter(tmp_path, GEOMETRY, torch.float32, base=peft))
    slot = slots.acquire("the adapter")
    batch = slots.batch([Segment(slot, 1, 4)], 5)
    for layer in range(3):
        for site, targets in SITES.items():
            x = torch.randn(5, GEOMETRY.in_features(site))
            y = torch.cat([peft.base(layer, target)(x) for target in targets], dim=1)
            want = torch.cat([peft.layer(layer, target)(x) for target in targets], dim=1)
            want[[0, 4]] = y[[0, 4]]
            batch.apply(layer, site, x, y, torch.cat([peft.base(layer, target).bias for target in targets]))
            torch.testing.assert_close(y, want, rtol=1e-4, atol=1e-4)
    adapted = [module for module in GEOMETRY.modules() if peft.layer(*module) is not peft.base(*module)]
    assert len(adapted) == len(validate_adapter(tmp_path, GEOMETRY, max_rank=16).modules) > 0
