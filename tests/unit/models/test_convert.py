"""GGUF to Hugging Face folder: bit-equal to transformers' reading of the same file, or refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from safetensors.torch import load_file

from fixtures.tiny_gguf import HEAD_DIM, TEMPLATE, write_tiny_gguf
from lamina.errors import UnsupportedModel
from lamina.models.gguf_convert import convert_gguf
from lamina.models.safetensors_writer import Bf16Writer, to_bf16
from lamina.models.tokenizer import Tokenizer


def convert(folder: Path, **options: Any) -> Path:
    """A tiny GGUF, converted."""
    source = write_tiny_gguf(folder / "tiny.gguf", **options)
    target = folder / "hf"
    target.mkdir()
    convert_gguf(source, target)
    return target


@pytest.mark.parametrize(("tied", "quantization"), [(True, "Q4_1"), (False, "Q8_0")])
def test_weights_equal_transformers(tmp_path: Path, tied: bool, quantization: str) -> None:
    """Every weight has the bits that transformers gets from the GGUF (q and k un-permuted, rounded to bf16)."""
    from transformers import AutoModelForCausalLM, GgufConfig

    folder = convert(tmp_path, tied=tied, quantization=quantization)
    ours = load_file(folder / "model.safetensors")
    reference = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="tiny.gguf", dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    ).state_dict()
    if tied:
        reference.pop("lm_head.weight")
    assert ours.keys() == reference.keys()
    for name, values in reference.items():
        assert torch.equal(ours[name], values), name


def test_the_folder_loads_in_transformers(tmp_path: Path) -> None:
    """Configuration, weights and tokenizer are what transformers expects of a folder."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = convert(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.bfloat16
    assert model.config.rope_parameters["rope_theta"] == 50000.0
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.chat_template) == (1, 2, TEMPLATE)
    text = "<|im_start|>abab 123 é<|im_end|>"
    assert tokenizer(text).input_ids == Tokenizer.from_folder(folder).encode(text)


def test_config(tmp_path: Path) -> None:
    """config.json has rope_theta at the top level too, plain numbers, and the sizes."""
    config = json.loads((convert(tmp_path) / "config.json").read_text())
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 50000.0
    assert config["rms_norm_eps"] == 1e-5
    assert config["head_dim"] == HEAD_DIM
    assert config["tie_word_embeddings"] is True
    assert config["architectures"] == ["LlamaForCausalLM"]


def test_digits_are_split_one_by_one(tmp_path: Path) -> None:
    """The `smollm` rule: no two digits ever share a token, even where a merge would allow it."""
    tokenizer = Tokenizer.from_folder(convert(tmp_path))
    assert [tokenizer.token_text(i) for i in tokenizer.encode("ab12")] == ["ab", "1", "2"]
    state = json.loads((tmp_path / "hf" / "tokenizer.json").read_text())
    assert [part["type"] for part in state["pre_tokenizer"]["pretokenizers"]] == ["Digits", "ByteLevel"]


def test_conversion_is_reproducible(tmp_path: Path) -> None:
    """The same GGUF gives the same bytes, so that replicas agree on the model's identity."""
    contents = []
    for run in ("one", "two"):
        (tmp_path / run).mkdir()
        folder = convert(tmp_path / run)
        contents.append({path.name: path.read_bytes() for path in folder.iterdir()})
    assert contents[0] == contents[1]


def test_progress_ends_at_the_total(tmp_path: Path) -> None:
    """Progress grows to the total, in bytes of weights."""
    seen: list[tuple[str, int, int]] = []
    source = write_tiny_gguf(tmp_path / "tiny.gguf")
    (tmp_path / "hf").mkdir()
    convert_gguf(source, tmp_path / "hf", lambda *step: seen.append(step))
    done = [step[1] for step in seen]
    assert done == sorted(done)
    assert seen[-1][1] == seen[-1][2] < (tmp_path / "hf" / "model.safetensors").stat().st_size


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"architecture": "gemma"}, "architecture 'gemma'"),
        ({"pre": "llama-bpe"}, "rule 'llama-bpe'"),
        ({"extra": "blk.0.attn_q_norm.weight"}, "attn_q_norm"),
        ({"extra": "rope_freqs.weight"}, "rope_freqs.weight"),
        ({"poison": float("nan")}, "not finite"),
        ({"poison": float("inf")}, "not finite"),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else None,
)
def test_what_is_not_understood_is_refused(tmp_path: Path, options: dict[str, Any], says: str) -> None:
    """Another architecture, tokenizer rule or tensor, or a broken weight, is refused by name."""
    with pytest.raises(UnsupportedModel, match=says):
        convert(tmp_path, **options)


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    """Rubbish is refused with the file's name."""
    (tmp_path / "x.gguf").write_bytes(b"not a GGUF file at all, but long enough to have a header" * 4)
    with pytest.raises(UnsupportedModel, match=r"x\.gguf"):
        convert_gguf(tmp_path / "x.gguf", tmp_path)


@pytest.mark.model
def test_demo_model_is_the_one_that_was_compared(demo_model: Path) -> None:
    """SmolLM2's converted files are those whose every weight was compared with transformers' reading of the GGUF,
    bit for bit, and whose tokens were compared on 3,000 texts with its tokenizer (after splitting digits).

    That takes minutes, so these hashes stand for it. If the converter changes its output on purpose, compare again.
    """
    files = json.loads((demo_model / "manifest.json").read_text())["files"]
    assert files["model.safetensors"]["sha256"].startswith("7ef915c9bf9d94d8d702")
    assert files["tokenizer.json"]["sha256"].startswith("2225e8fb36485529d3c8")
    tokenizer = Tokenizer.from_folder(demo_model)
    assert [tokenizer.token_text(i) for i in tokenizer.encode("2024")] == list("2024")


finite = st.floats(width=32, allow_nan=False, allow_infinity=False)


@given(arrays.arrays(np.float32, st.integers(0, 50), elements=finite))
def test_bf16_rounds_like_torch(values: np.ndarray[Any, np.dtype[np.float32]]) -> None:
    """Round to nearest, ties to even, subnormals and zeros' signs included."""
    values = np.where(np.abs(values) < 3.38e38, values, np.float32(1))  # beyond, bfloat16 has only infinity
    expected = torch.from_numpy(values.copy()).to(torch.bfloat16).view(torch.uint16).numpy()
    assert np.array_equal(to_bf16(values), expected)


def test_writer_output_is_plain_safetensors(tmp_path: Path) -> None:
    """Scalars, empty tensors and matrices come back from safetensors as they went in."""
    tensors = {"a": np.ones((2, 3), np.float32), "b": np.zeros((0, 4), np.float32), "c": np.full((), 2, np.float32)}
    with Bf16Writer(tmp_path / "x", {name: values.shape for name, values in tensors.items()}) as writer:
        for name, values in tensors.items():
            writer.write(name, values)
    loaded = load_file(tmp_path / "x")
    assert {name: tuple(values.shape) for name, values in loaded.items()} == {"a": (2, 3), "b": (0, 4), "c": ()}
    assert loaded["a"].eq(1).all()
    assert loaded["c"] == 2


@pytest.mark.parametrize(
    "write", [lambda w: w.write("b", np.ones(1, np.float32)), lambda w: None], ids=["order", "none"]
)
def test_writer_guards_its_contract(tmp_path: Path, write: Callable[[Bf16Writer], object]) -> None:
    """A tensor out of order, or one left out, is a bug that is noticed."""
    with pytest.raises(AssertionError), Bf16Writer(tmp_path / "x", {"a": (1,), "b": (1,)}) as writer:
        write(writer)
