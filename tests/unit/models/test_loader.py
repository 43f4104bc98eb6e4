"""Checkpoints are not trusted: one error lists everything that does not fit."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from fixtures.dense import logits_of
from lamina.errors import ConfigurationInvalid, UnsupportedModel
from lamina.models.config import ModelConfig
from lamina.models.interface import CausalLM
from lamina.models.loader import load_model
from lamina.models.placement import fused_shapes, placements

CPU = torch.device("cpu")
IDS = torch.tensor([5, 1, 40, 2, 2, 7])
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 41,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
Tensors = dict[str, torch.Tensor]


def tensors(config: dict[str, Any] = CONFIG) -> Tensors:
    generator = torch.Generator().manual_seed(1)
    plan = placements(ModelConfig.from_dict(config))
    return {item.source: torch.randn(item.shape, generator=generator) * 0.3 for item in plan}


def write(folder: Path, weights: Tensors | None = None, config: dict[str, Any] = CONFIG) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors() if weights is None else weights, folder / "model.safetensors")
    return folder


def shard(folder: Path, *parts: Tensors, names: dict[str, str] | None = None) -> Path:
    """Splits a written model over files with an index; `names`: entries of weight_map to change."""
    (folder / "model.safetensors").unlink(missing_ok=True)
    weight_map = {}
    for number, part in enumerate(parts):
        save_file(part, folder / f"part-{number}.safetensors")
        weight_map |= dict.fromkeys(part, f"part-{number}.safetensors")
    index = {"metadata": {}, "weight_map": weight_map | (names or {})}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def load(folder: Path, **options: Any) -> CausalLM:
    return load_model(folder, **({"dtype": torch.float32, "device": CPU} | options))


def test_every_row_of_every_fused_weight_is_filled_once() -> None:
    """The placement plan tiles each fused tensor without gap or overlap, for a model that has all kinds of tensors."""
    config = ModelConfig.from_dict(
        CONFIG | {"architectures": ["Gemma3ForCausalLM"], "head_dim": 8, "attention_bias": True}
    )
    plan = placements(config)
    rows: dict[str, int] = {}
    for item in plan:
        assert item.row == rows.get(item.target, 0)
        rows[item.target] = item.row + item.shape[0]
    assert rows == {name: shape[0] for name, shape in fused_shapes(plan).items()}
    assert len({item.source for item in plan}) == len(plan)


def test_progress_counts_all_bytes(tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    load(write(tmp_path), progress=lambda done, total: calls.append((done, total)))
    total = sum(tensor.nbytes for tensor in tensors().values())
    assert calls[0] == (0, total)
    assert calls[-1] == (total, total)
    assert calls == sorted(calls)


def test_shards_load_like_one_file(tmp_path: Path) -> None:
    folder = write(tmp_path)
    whole = logits_of(load(folder), IDS)
    items = list(tensors().items())
    shard(folder, dict(items[::2]), dict(items[1::2]))
    assert torch.equal(logits_of(load(folder), IDS), whole)


def test_harmless_extras_are_ignored(tmp_path: Path) -> None:
    """Rotary tables of old checkpoints, and the head of a model that ties it."""
    config = CONFIG | {"tie_word_embeddings": True}
    plain = tensors(config)
    extras = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2),
        "lm_head.weight": torch.zeros(41, 16),
    }
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir(), two.mkdir()
    first = logits_of(load(write(one, plain, config)), IDS)
    assert torch.equal(first, logits_of(load(write(two, plain | extras, config)), IDS))


Q = "model.layers.1.self_attn.q_proj.weight"
DOWN = "model.layers.0.mlp.down_proj.weight"


def nan_in(name: str, value: float) -> Callable[[Tensors], None]:
    def change(weights: Tensors) -> None:
        weights[name][1, 2] = value

    return change


VIOLATIONS: dict[str, tuple[Callable[[Tensors], Any], str]] = {
    "missing": (lambda w: w.pop(Q), f"{Q} is missing"),
    "missing head": (lambda w: w.pop("lm_head.weight"), "lm_head.weight is missing"),
    "unknown": (lambda w: w.update({"model.layers.2.norm": torch.ones(1)}), "layers.2.norm is unknown"),
    "bias": (lambda w: w.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(16)}), "q_proj.bias is unknown"),
    "transposed": (lambda w: w.update({DOWN: w[DOWN].mT.contiguous()}), rf"{DOWN} has .*24, 16\] instead of \[16"),
    "flat": (lambda w: w.update({Q: w[Q].flatten()}), rf"{Q} has shape \[256\]"),
    "integers": (lambda w: w.update({Q: w[Q].to(torch.int8)}), f"{Q} is stored as I8; supported: F32, F16, BF16, F64"),
    "float8": (lambda w: w.update({Q: w[Q].to(torch.float8_e4m3fn)}), f"{Q} is stored as F8_E4M3"),
    "nan": (nan_in(Q, float("nan")), f"{Q} holds NaN or infinity"),
    "infinity": (nan_in(DOWN, float("-inf")), f"{DOWN} holds NaN or infinity"),
}  # fmt: skip


@pytest.mark.parametrize("case", VIOLATIONS)
def test_weights_that_do_not_fit_are_refused(case: str, tmp_path: Path) -> None:
    change, told = VIOLATIONS[case]
    weights = tensors()
    change(weights)
    with pytest.raises(ConfigurationInvalid, match=told):
        load(write(tmp_path, weights))


def test_all_violations_are_in_one_error(tmp_path: Path) -> None:
    weights = tensors()
    del weights[Q]
    weights["extra"] = torch.ones(1)
    weights[DOWN] = torch.ones(3, 3)
    with pytest.raises(ConfigurationInvalid) as caught:
        load(write(tmp_path, weights))
    message = str(caught.value)
    assert "3 violations" in message
    assert all(part in message for part in (f"{Q} is missing", "extra is unknown", f"{DOWN} has shape [3, 3]"))


def test_a_foreign_checkpoint_gives_a_bounded_message(tmp_path: Path) -> None:
    """Thousands of violations are counted, not printed."""
    weights = {f"transformer.h.{n}.attn": torch.ones(1) for n in range(2000)}
    with pytest.raises(ConfigurationInvalid, match=r"2021 violations.*and 2001 more") as caught:
        load(write(tmp_path, weights))
    assert len(str(caught.value)) < 4000


def test_values_beyond_the_computing_dtype_are_refused(tmp_path: Path) -> None:
    """1e6 is sound in float32 and infinite in float16."""
    weights = tensors()
    weights[Q][0, 0] = 1e6
    load(write(tmp_path, weights))
    with pytest.raises(ConfigurationInvalid, match=r"as torch\.float16"):
        load(tmp_path, dtype=torch.float16)


def header(size: int, body: bytes) -> bytes:
    return struct.pack("<Q", size) + body


OVERLAP = json.dumps(
    {
        "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
        "b": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]},
    }
).encode()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x00\x01",
        header(1 << 60, b"{}"),
        header(100, b"{"),
        header(2, b"[]"),
        header(len(OVERLAP), OVERLAP + bytes(12)),
        b"\x80\x04\x95pickle",
    ],
    ids=["empty", "short", "huge header", "truncated header", "not an object", "overlap", "pickle"],
)
def test_broken_files_are_refused(content: bytes, tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ConfigurationInvalid, match="not a readable safetensors file"):
        load(tmp_path)


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(ConfigurationInvalid, match="not a readable safetensors file"):
        load(tmp_path)


def test_pickled_weights_are_not_even_looked_at(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigurationInvalid, match="only safetensors weights are loaded"):
        load(tmp_path)


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", "absent.safetensors", "config.json", ""])
def test_an_index_reaches_no_other_file(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"x": torch.ones(1)}, tmp_path / "outside.safetensors")
    shard(write(folder), tensors(), names={Q: name})
    with pytest.raises(ConfigurationInvalid, match="no safetensors file in that folder"):
        load(folder)


@pytest.mark.parametrize(
    "index", ["{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": 1}}', '{"weight_map": [1]}']
)
def test_a_broken_index_is_refused(index: str, tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ConfigurationInvalid, match="weight_map"):
        load(tmp_path)


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    everything = tensors()
    shard(write(tmp_path), everything, {Q: everything[Q].clone()})
    with pytest.raises(ConfigurationInvalid, match=f"{Q} is in more than one file"):
        load(tmp_path)


def test_nothing_is_allocated_before_the_headers_fit(tmp_path: Path) -> None:
    """A config that claims terabytes is refused by the checkpoint's own header."""
    config = CONFIG | {"hidden_size": 65536, "intermediate_size": 1 << 20, "num_hidden_layers": 512, "head_dim": 64}
    with pytest.raises(ConfigurationInvalid, match="do not fit"):
        load(write(tmp_path, config=config))


def test_an_unsupported_architecture_is_refused_before_its_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"architectures": ["FalconForCausalLM"]}))
    with pytest.raises(UnsupportedModel, match="FalconForCausalLM"):
        load(tmp_path)


def test_loaded_weights_do_not_depend_on_the_files_afterwards(tmp_path: Path) -> None:
    """The files may be replaced while the model runs."""
    model = load(write(tmp_path))
    before = logits_of(model, IDS)
    path = tmp_path / "model.safetensors"
    path.write_bytes(bytes(path.stat().st_size))
    assert torch.equal(before, logits_of(model, IDS))
