"""An adapter is understood completely, or refused with every reason."""

from __future__ import annotations

import json
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from lamina_lora.errors import MAX_VIOLATIONS, AdapterRejected
from lamina_lora.geometry import BaseGeometry
from lamina_lora.patterns import Matcher
from lamina_lora.validate import AdapterManifest, validate_adapter
from support.lora_folders import TINY, config, tensors, write, write_plain

Q0 = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
Q0_B = Q0.replace("lora_A", "lora_B")
Q0_M = Q0.replace("lora_A.weight", "lora_magnitude_vector")


def check(folder: Path, geometry: BaseGeometry = TINY, max_rank: int = 64) -> AdapterManifest:
    return validate_adapter(folder, geometry, max_rank=max_rank)


def violations(folder: Path) -> tuple[str, ...]:
    with pytest.raises(AdapterRejected) as caught:
        check(folder)
    return caught.value.violations


def test_a_good_adapter_is_described(tmp_path: Path) -> None:
    """The manifest says which modules change, with what rank and scaling."""
    manifest = check(write_plain(tmp_path, rank=4))
    module = manifest.modules["model.layers.1.mlp.down_proj"]
    assert (module.lora.layer, module.lora.target, module.lora.rank, module.lora.scaling) == (1, "down_proj", 4, 2.0)
    assert (module.a.shape, module.b.shape) == ((4, 40), (24, 4))
    assert len(manifest.modules) == 14
    assert (manifest.max_rank, manifest.has_effect) == (4, True)
    assert manifest.num_parameters == 4 * 2 * sum(i + o for i, o in TINY.targets.values())


def test_names_with_the_adapters_name_are_understood(tmp_path: Path) -> None:
    """Older tools save `lora_A.default.weight`."""
    renamed = {name.replace(".weight", ".default.weight"): value for name, value in tensors().items()}
    plain = check(write(tmp_path / "plain", config(), tensors()))
    assert check(write(tmp_path / "default", config(), renamed)).digest == plain.digest


def test_an_untrained_adapter_is_valid_but_has_no_effect(tmp_path: Path) -> None:
    """All B zero, of either sign: the caller decides what to say."""
    weights = {name: (value * -0.0 if "lora_B" in name else value) for name, value in tensors().items()}
    assert not check(write(tmp_path, config(), weights)).has_effect


def test_dora_is_described(tmp_path: Path) -> None:
    """Every targeted module has its magnitude; also with rsLoRA and patterns."""
    weights = tensors(dora=True)
    plain = check(write(tmp_path / "dora", config(use_dora=True), weights))
    assert all(m.lora.dora and m.magnitude is not None for m in plain.modules.values())
    assert plain.num_parameters == sum(value.numel() for value in weights.values())
    more = check(write(tmp_path / "more", config(use_dora=True, use_rslora=True, alpha_pattern={"q_proj": 3}), weights))
    assert {m.lora.scaling for m in more.modules.values()} == {4.0, 1.5}
    assert more.digest != plain.digest


def test_magnitudes_are_part_of_the_digest(tmp_path: Path) -> None:
    """With other magnitudes or none it is another adapter; the spelling of their names does not matter."""
    weights = tensors(dora=True)
    digest = check(write(tmp_path / "dora", config(use_dora=True), weights)).digest
    other = weights | {Q0_M: weights[Q0_M] + 1}
    assert check(write(tmp_path / "other", config(use_dora=True), other)).digest != digest
    assert check(write(tmp_path / "none", config(), tensors())).digest != digest
    for ending in (".weight", ".default.weight"):
        renamed = {name + ending * name.endswith("_vector"): value for name, value in weights.items()}
        assert check(write(tmp_path / ending, config(use_dora=True), renamed)).digest == digest


def test_dora_has_an_effect_even_where_b_is_zero(tmp_path: Path) -> None:
    """Magnitudes alone change the base weights."""
    weights = {name: (value * 0 if "lora_B" in name else value) for name, value in tensors(dora=True).items()}
    assert check(write(tmp_path, config(use_dora=True), weights)).has_effect


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_every_dtype_is_read(tmp_path: Path, dtype: torch.dtype) -> None:
    """F32, F16 and BF16 are what PEFT saves."""
    assert check(write(tmp_path, config(), tensors(dtype=dtype))).has_effect


def _set(name: str, value: torch.Tensor | None, *, dora: bool = False) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        weights = tensors(dora=dora) | ({name: value} if value is not None else {})
        if value is None:
            del weights[name]
        write(folder, config(use_dora=dora), weights)

    return spoil


def _configured(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: (folder / "adapter_config.json").write_text(json.dumps(config(**changes))) and None


def _raw_config(data: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / "adapter_config.json").write_bytes(data) and None


def _raw_weights(data: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / "adapter_model.safetensors").write_bytes(data) and None


def _file(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def _truncated(folder: Path) -> None:
    path = folder / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])


def _with_tail(folder: Path) -> None:
    path = folder / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes() + b"surplus")


def _zip(folder: Path) -> None:
    with zipfile.ZipFile(folder / "adapter_model.safetensors", "w") as archive:
        archive.writestr("data.pkl", b"x")


def _only_pickle(folder: Path) -> None:
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")


def _poisoned(value: float, dtype: torch.dtype) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        weights = tensors(dtype=dtype)
        weights[Q0][2, 3] = value
        write(folder, config(), weights)

    return spoil


def _entry(start: int, stop: int, shape: list[Any] | None = None, dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": [2] if shape is None else shape, "data_offsets": [start, stop]}


BAD: dict[str, tuple[Callable[[Path], None], str]] = {
    "no config": (lambda f: (f / "adapter_config.json").unlink(), "adapter_config.json is missing"),
    "config is a folder": (
        lambda f: (f / "adapter_config.json").unlink() or (f / "adapter_config.json").mkdir(),
        "adapter_config.json is missing",
    ),
    "no weights": (lambda f: (f / "adapter_model.safetensors").unlink(), "safetensors is missing"),
    "only a pickle": (_only_pickle, "adapter_model.bin is a pickle"),
    "pickle": (_raw_weights(pickle.dumps({"a": 1}, protocol=2)), "Python pickle"),
    "zip": (_zip, "zip archive"),
    "lfs pointer": (_raw_weights(b"version https://git-lfs.github.com/spec/v1\n"), "git lfs pull"),
    "empty file": (_raw_weights(b""), "truncated: 0 bytes"),
    "huge header": (_raw_weights(struct.pack("<Q", 1 << 40) + b"{}"), "the limit is 8388608"),
    "header beyond the file": (_raw_weights(struct.pack("<Q", 1000) + b"{}"), "truncated: its header needs 1008"),
    "header is not JSON": (_raw_weights(_file(b"{nope}")), "bad header: it is not JSON"),
    "header is not UTF-8": (_raw_weights(_file(b'{"\xff": 1}')), "not UTF-8"),
    "header is a list": (_raw_weights(_file([])), "not a JSON object"),
    "header is nested too deep": (_raw_weights(_file(b'{"a":' + b"[" * 200_000)), "bad header"),
    "header says NaN": (_raw_weights(_file(b'{"a": NaN}')), "NaN is not a JSON number"),
    "the same tensor twice": (_raw_weights(_file(b'{"a": 1, "a": 2}')), "'a' is given twice"),
    "metadata is no text": (_raw_weights(_file({"__metadata__": {"a": 1}})), "__metadata__ must map strings"),
    "entry without dtype": (_raw_weights(_file({"a": {"shape": [2]}})), "exactly dtype, shape and data_offsets"),
    "unknown dtype": (_raw_weights(_file({"a": _entry(0, 8, dtype="I64")}, bytes(8))), "dtype 'I64'"),
    "dtype is a list": (_raw_weights(_file({"a": _entry(0, 8, dtype=["F32"])}, bytes(8))), "allowed are F32"),
    "dimension 0": (_raw_weights(_file({"a": _entry(0, 0, [0, 2])})), "dimensions of 1 to"),
    "negative dimension": (_raw_weights(_file({"a": _entry(0, 8, [-2])}, bytes(8))), "dimensions of 1 to"),
    "boolean dimension": (_raw_weights(_file({"a": _entry(0, 8, [True, 2])}, bytes(8))), "dimensions of 1 to"),
    "giant dimension": (_raw_weights(_file({"a": _entry(0, 8, [1 << 60, 1 << 60])}, bytes(8))), "dimensions of 1 to"),
    "too many dimensions": (_raw_weights(_file({"a": _entry(0, 4, [1] * 5)}, bytes(4))), "at most 4 dimensions"),
    "negative offset": (_raw_weights(_file({"a": _entry(-8, 0)}, bytes(8))), "two byte offsets"),
    "reversed offsets": (_raw_weights(_file({"a": _entry(8, 0)}, bytes(8))), "span -8"),
    "offsets too wide": (_raw_weights(_file({"a": _entry(0, 16)}, bytes(16))), "needs 8 bytes for its shape"),
    "overlap": (_raw_weights(_file({"a": _entry(0, 8), "b": _entry(4, 12)}, bytes(12))), "overlaps"),
    "gap": (_raw_weights(_file({"a": _entry(0, 8), "b": _entry(12, 20)}, bytes(20))), "4 bytes before tensor 'b'"),
    "truncated": (_truncated, "truncated: its tensors need"),
    "tail": (_with_tail, "7 bytes after its last tensor"),
    "NaN": (_poisoned(float("nan"), torch.float32), "1 values that are NaN or infinite"),
    "infinity": (_poisoned(float("-inf"), torch.float32), "1 values that are NaN or infinite"),
    "NaN in bf16": (_poisoned(float("nan"), torch.bfloat16), "1 values that are NaN or infinite"),
    "infinity in fp16": (_poisoned(float("inf"), torch.float16), "1 values that are NaN or infinite"),
    "A too narrow": (_set(Q0, torch.ones(4, 23)), r"lora_A has shape \[4, 23\], \[4, 24\] is needed"),
    "B transposed": (_set(Q0_B, torch.ones(4, 24)), r"lora_B has shape \[4, 24\], \[24, 4\] is needed"),
    "another rank than configured": (_set(Q0, torch.ones(5, 24)), r"\[4, 24\] is needed"),
    "A without B": (_set(Q0_B, None), "lora_A only"),
    "B without A": (_set(Q0, None), "lora_B only"),
    "tensor that is no LoRA weight": (_set("base_model.model.lm_head.weight", torch.ones(2)), "not understood"),
    "bias of B": (_set(Q0_B.replace("weight", "bias"), torch.ones(24)), "not understood"),
    "magnitude without DoRA": (_set(Q0_M, torch.ones(24)), "has a lora_magnitude_vector, but use_dora is not set"),
    "DoRA without a magnitude": (_set(Q0_M, None, dora=True), "q_proj is .* its lora_magnitude_vector is missing"),
    "DoRA's magnitude too long": (_set(Q0_M, torch.ones(25), dora=True), r"vector has shape \[25\], \[24\] is needed"),
    "DoRA's magnitude as a matrix": (_set(Q0_M, torch.ones(1, 24), dora=True), r"shape \[1, 24\], \[24\] is needed"),
    "NaN magnitude": (_set(Q0_M, torch.full((24,), torch.nan), dora=True), "24 values that are NaN or infinite"),
    "magnitude of a module that is not targeted": (
        _set(Q0_M.replace("q_proj", "o_proj"), torch.ones(24), dora=True),
        "no targeted module",
    ),
    "the same magnitude under two names": (_set(f"{Q0_M}.weight", torch.ones(24), dora=True), "twice"),
    "DoRA of an embedding": (
        _set("base_model.model.model.embed_tokens.lora_magnitude_vector", torch.ones(24), dora=True),
        "no targeted module",
    ),
    "embedding": (
        _set("base_model.model.model.embed_tokens.lora_embedding_A", torch.ones(4, 24)),
        "not understood",
    ),
    "module that is not targeted": (_set(Q0.replace("q_proj", "o_proj"), torch.ones(4, 24)), "no targeted module"),
    "layer that does not exist": (_set(Q0.replace("layers.0", "layers.9"), torch.ones(4, 24)), "no targeted module"),
    "name without PEFT's prefix": (_set("model.layers.0.self_attn.q_proj.lora_A.weight", torch.ones(1)), "not underst"),
    "the same weight under two names": (_set(Q0.replace(".weight", ".default.weight"), torch.ones(4, 24)), "twice"),
    "targeted module without weights": (_configured(target_modules=["q_proj", "v_proj", "o_proj"]), "are missing"),
    "rank 0": (_configured(r=0), "r is 0; a whole number from 1"),
    "negative rank": (_configured(r=-4), "r is -4"),
    "rank true": (_configured(r=True), "r is True"),
    "no rank": (_configured(r=None), "r is None"),
    "rank above the limit": (_configured(r=65), "rank above the limit of 64"),
    "rank in a pattern above the limit": (_configured(rank_pattern={"v_proj": 900}), "v_proj: 900"),
    "rank 0 in a pattern": (_configured(rank_pattern={"v_proj": 0}), r"rank_pattern\['v_proj'\] is 0"),
    "infinite alpha": (_raw_config(json.dumps(config()).replace(": 8", ": 1e999").encode()), "lora_alpha is inf"),
    "NaN alpha": (_raw_config(json.dumps(config()).replace(": 8", ": NaN").encode()), "NaN is not a JSON number"),
    "alpha 0": (_configured(lora_alpha=0), "lora_alpha is 0"),
    "alpha as text": (_configured(lora_alpha="16"), "lora_alpha is '16'"),
    "alpha pattern of text": (_configured(alpha_pattern={"q_proj": "x"}), "alpha_pattern"),
    "config is not JSON": (_raw_config(b"{"), "adapter_config.json is invalid: it is not JSON"),
    "config is a list": (_raw_config(b"[]"), "not a JSON object"),
    "config is too large": (_raw_config(b" " * (1 << 20) + b"{}"), "larger than the limit of 1048576"),
    "the same key twice": (_raw_config(b'{"r": 4, "r": 8}'), "'r' is given twice"),
    "a number of many digits": (_raw_config(b'{"r": ' + b"9" * 5000 + b"}"), "invalid"),
    "unknown key": (_configured(use_magic=True), "'use_magic' = True is not a known key"),
    "another method": (_configured(peft_type="IA3"), "peft_type is 'IA3'"),
    "another task": (_configured(task_type="SEQ_CLS"), "task_type is 'SEQ_CLS'"),
    "DoRA without magnitudes": (_configured(use_dora=True), "v_proj is .* its lora_magnitude_vector is missing"),
    "DoRA as text": (_configured(use_dora="yes"), "use_dora is 'yes'"),
    "bias": (_configured(bias="lora_only"), "bias is 'lora_only'"),
    "lora_bias": (_configured(lora_bias=True), "lora_bias is not supported"),
    "modules_to_save": (_configured(modules_to_save=["lm_head"]), "modules_to_save is not supported"),
    "PiSSA": (_configured(init_lora_weights="pissa_niter_4"), "path_initial_model_for_weight_conversion"),
    "aLoRA": (_configured(alora_invocation_tokens=[1, 2]), "alora_invocation_tokens is not supported"),
    "layer replication": (_configured(layer_replication=[[0, 2], [1, 2]]), "layer_replication is not supported"),
    "trainable tokens": (_configured(trainable_token_indices=[5]), "trainable_token_indices is not supported"),
    "fan_in_fan_out": (_configured(fan_in_fan_out=True), "fan_in_fan_out is not supported"),
    "target parameters": (_configured(target_parameters=["x"]), "target_parameters is not supported"),
    "no targets": (_configured(target_modules=None), "target_modules is missing or empty"),
    "targets are numbers": (_configured(target_modules=[1]), "names are needed"),
    "embeddings as target": (_configured(target_modules=["q_proj", "embed_tokens"]), "names 'embed_tokens'"),
    "lm_head as target": (_configured(target_modules=["q_proj", "lm_head"]), "names 'lm_head'"),
    "a target pattern that matches nothing": (_configured(target_modules="q_proj"), "targets no module"),
    "everything excluded": (_configured(exclude_modules=["self_attn.q_proj", "v_proj"]), "targets no module"),
    "broken pattern": (_configured(rank_pattern={"(": 4}), "is not a regular expression"),
    "pattern that breaks out": (_configured(rank_pattern={"(?x)q_proj#": 4}), "is not a regular expression"),
    "pattern that matches nothing": (_configured(alpha_pattern={"w1": 4}), "decides no targeted module"),
    "too many expressions": (
        _configured(rank_pattern={f"layers.*{i}.q_proj": 4 for i in range(65)}),
        "more than 64 patterns are regular expressions",
    ),
    "shadowed pattern": (_configured(alpha_pattern={".*_proj": 4, "q_proj": 8}), "'q_proj'.*decides no targeted"),
    "layer beyond the model": (_configured(layers_to_transform=[0, 2]), "names layer 2; the base model has 2"),
    "layers as text": (_configured(layers_to_transform=["0"]), "layer numbers from 0"),
    "layers with a pattern target": (
        _configured(target_modules=".*q_proj", layers_to_transform=[0]),
        "a list of names",
    ),
    "layers_pattern alone": (_configured(layers_pattern="layers"), "needs layers_to_transform"),
    "rsLoRA as text": (_configured(use_rslora="yes"), "use_rslora is 'yes'"),
}


@pytest.mark.parametrize(("spoil", "reason"), BAD.values(), ids=BAD)
def test_a_bad_adapter_is_refused(tmp_path: Path, spoil: Callable[[Path], None], reason: str) -> None:
    """Each defect alone is enough, and the message names it."""
    write(tmp_path, config(), tensors())
    spoil(tmp_path)
    with pytest.raises(AdapterRejected, match=reason):
        check(tmp_path)


def test_all_violations_come_in_one_report(tmp_path: Path) -> None:
    """Configuration, names, shapes and values are all looked at, whatever else is wrong."""
    weights = tensors()
    weights[Q0][0, 0] = torch.nan
    weights[Q0_B] = torch.ones(24, 3)
    weights["surprise"] = torch.ones(1)
    write(tmp_path, config(use_dora=1, bias="all", r=0, unknown=1), weights)
    found = " | ".join(violations(tmp_path))
    for reason in ("use_dora", "bias", "r is 0", "'unknown'", "'surprise'", "NaN"):
        assert reason in found
    write(tmp_path, config(), weights)
    found = " | ".join(violations(tmp_path))
    for reason in ("'surprise'", "lora_B has shape", "NaN"):
        assert reason in found


def test_every_violation_of_dora_is_named(tmp_path: Path) -> None:
    """Missing, misshapen and broken magnitudes, each by its module."""
    weights = tensors(dora=True)
    del weights[Q0_M]
    weights[Q0_M.replace("q_proj", "v_proj")] = torch.ones(13)
    weights[Q0_M.replace("layers.0", "layers.1")][3] = torch.inf
    found = violations(write(tmp_path, config(use_dora=True), weights))
    assert [("q_proj" in f or "v_proj" in f) and "lora_magnitude_vector" in f for f in found] == [True] * 3


def test_a_report_is_bounded(tmp_path: Path) -> None:
    """A hostile file cannot make a message without end; the rest is counted."""
    write(tmp_path, config(), tensors() | {f"t{i}": torch.ones(1) for i in range(500)})
    found = violations(tmp_path)
    assert len(found) == MAX_VIOLATIONS + 1
    assert found[-1] == "and 300 more violations"


def test_a_hostile_pattern_costs_bounded_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exponential patterns are given up, not waited for."""
    monkeypatch.setattr("lamina_lora.targets.Matcher", lambda: Matcher(0.2))
    write(tmp_path, config(target_modules=r"(.|.|.)*[!-+]"), tensors())
    assert "to match; use plain names" in violations(tmp_path)[0]


def test_deep_nesting_is_refused_at_any_depth(tmp_path: Path) -> None:
    """Just below the parser's limit too, where showing the value would exceed it."""
    write(tmp_path, config(), tensors())
    for depth in range(700, 1100, 3):
        nested = b"[" * depth + b"]" * depth
        (tmp_path / "adapter_config.json").write_bytes(b'{"unknown": ' + nested + b"}")
        with pytest.raises(AdapterRejected):
            check(tmp_path)


def test_many_plain_patterns_are_quick(tmp_path: Path) -> None:
    """Tools that choose a rank per module write one name per module."""
    pattern = {TINY.module_name(layer, target): 4 for layer in range(2) for target in ("q_proj", "v_proj")}
    assert check(write(tmp_path, config(r=9, rank_pattern=pattern), tensors())).max_rank == 4


def test_names_in_messages_are_harmless(tmp_path: Path) -> None:
    """Control characters and lone surrogates from a file are escaped and cut."""
    data = _file(b'{"\\ud800\\u001b[31m' + b"x" * 1000 + b'": 1}')
    write(tmp_path, config(), tensors())
    (tmp_path / "adapter_model.safetensors").write_bytes(data)
    (message,) = violations(tmp_path)
    assert message.isascii()
    assert message.isprintable()
    assert len(message) < 300


def test_the_digest_ignores_what_has_no_effect(tmp_path: Path) -> None:
    """Metadata, tensor order, formatting, harmless keys and equal ways to say a scaling are not identity."""
    reference = check(write(tmp_path / "a", config(), tensors())).digest
    folder = write(tmp_path / "b", config(lora_dropout=0.5, base_model_name_or_path="x"), tensors())
    save_file(dict(reversed(tensors().items())), folder / "adapter_model.safetensors", metadata={"by": "me"})
    assert check(folder).digest == reference
    same = config(lora_alpha=4, use_rslora=True)  # 4 / sqrt(4) = 8 / 4
    assert check(write(tmp_path / "c", same, tensors())).digest == reference


@pytest.mark.parametrize(
    ("settings", "weights"),
    [
        (config(lora_alpha=9), tensors()),
        (config(alpha_pattern={"layers.1.self_attn.v_proj": 9}), tensors()),
        (config(use_rslora=True), tensors()),
        (config(), tensors(seed=1)),
        (config(), tensors(dtype=torch.bfloat16)),
        (config(target_modules=["q_proj", "k_proj"]), tensors(targets=("q_proj", "k_proj"))),
        (config(r=2, lora_alpha=4), tensors(rank=2)),
    ],
    ids=["alpha", "alpha of one module", "rsLoRA", "weights", "dtype", "targets", "rank"],
)
def test_the_digest_covers_what_has_an_effect(
    tmp_path: Path, settings: dict[str, Any], weights: dict[str, torch.Tensor]
) -> None:
    """Another effect is another adapter."""
    reference = check(write(tmp_path / "a", config(), tensors())).digest
    assert check(write(tmp_path / "b", settings, weights)).digest != reference
