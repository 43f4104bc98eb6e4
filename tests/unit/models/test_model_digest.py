"""The base model's identity: equal for equal content, different for any change of weights or shape."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lamina.errors import ConfigurationInvalid, UnsupportedModel
from lamina.models.digest import model_digest

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 41,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}


def folder(root: Path, name: str, weights: bytes = b"weights", **changes: Any) -> Path:
    path = root / name
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG | changes))
    (path / "model.safetensors").write_bytes(weights)
    return path


def test_equal_content_is_equal_whatever_its_spelling(tmp_path: Path) -> None:
    """Neither the folder, nor time stamps, nor the formatting of config.json count."""
    one, two = folder(tmp_path, "one"), folder(tmp_path, "two")
    (two / "config.json").write_text(json.dumps(dict(reversed(CONFIG.items())) | {"use_cache": True}, indent=3))
    os.utime(two / "model.safetensors", (1, 1))
    assert model_digest(one) == model_digest(two)
    assert len(bytes.fromhex(model_digest(one))) == 32


def test_any_change_is_another_model(tmp_path: Path) -> None:
    """A bit of a weight, a rope, a window: each would make old KV blocks wrong."""
    variants = [
        folder(tmp_path, "plain"),
        folder(tmp_path, "bit", b"weightr"),
        folder(tmp_path, "longer", b"weights\0"),
        folder(tmp_path, "theta", rope_theta=5e5),
        folder(tmp_path, "rope", rope_scaling={"rope_type": "linear", "factor": 2.0}),
        folder(tmp_path, "eps", rms_norm_eps=1e-5),
        folder(tmp_path, "kind", architectures=["MistralForCausalLM"]),
    ]
    assert len({model_digest(path) for path in variants}) == len(variants)


def test_files_cannot_trade_bytes(tmp_path: Path) -> None:
    """Each file is hashed by itself: moving the border between two changes the digest."""

    def sharded(name: str, first: bytes, second: bytes) -> Path:
        path = folder(tmp_path, name)
        (path / "model.safetensors").unlink()
        (path / "a.safetensors").write_bytes(first)
        (path / "b.safetensors").write_bytes(second)
        index = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}
        (path / "model.safetensors.index.json").write_text(json.dumps(index))
        return path

    assert model_digest(sharded("one", b"abc", b"d")) != model_digest(sharded("two", b"ab", b"cd"))


def test_what_cannot_be_identified_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationInvalid, match=r"config\.json"):
        model_digest(tmp_path)
    with pytest.raises(UnsupportedModel):
        model_digest(folder(tmp_path, "falcon", architectures=["FalconForCausalLM"]))
    empty = folder(tmp_path, "empty")
    (empty / "model.safetensors").unlink()
    with pytest.raises(ConfigurationInvalid, match="safetensors"):
        model_digest(empty)


def test_shape_and_identity_need_no_torch() -> None:
    """The gateway's side reads shapes and digests; loading torch would cost it seconds and hundreds of MB."""
    modules = "lamina.models.config, lamina.models.digest, lamina.models.placement"
    code = f"import {modules}, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
