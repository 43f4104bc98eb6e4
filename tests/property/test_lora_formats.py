"""Hostile adapter files never cause anything but AdapterRejected, and never a wrong acceptance."""

from __future__ import annotations

import json
import struct
import tempfile
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save

from lamina_lora.errors import AdapterRejected
from lamina_lora.patterns import Matcher, PatternTooSlow, check_pattern
from lamina_lora.peft_config import parse_peft_config
from lamina_lora.safetensors_header import read_header
from lamina_lora.targets import resolve_targets
from lamina_lora.validate import validate_adapter
from support.lora_folders import TINY, config, tensors, write

GOOD = save(tensors(), metadata={"format": "pt"})
(HEADER,) = struct.unpack("<Q", GOOD[:8])
quick = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


def read(data: bytes) -> tuple[Any, ...] | None:
    """The entries, or None if refused; any other exception fails the test."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "adapter_model.safetensors"
        path.write_bytes(data)
        try:
            return read_header(path)
        except AdapterRejected:
            return None


def agrees_with_safetensors(data: bytes) -> None:
    """What we accept, the format's own library accepts too, with the same shapes."""
    entries = read(data)
    if entries is None:
        return
    theirs = load(data)
    assert {e.name: e.shape for e in entries} == {name: tuple(value.shape) for name, value in theirs.items()}


@quick
@given(st.binary(max_size=300))
def test_any_bytes(data: bytes) -> None:
    """Random bytes are refused politely."""
    agrees_with_safetensors(data)


@quick
@given(st.integers(0, len(GOOD) - 1), st.binary(min_size=1, max_size=4))
def test_overwritten_bytes(at: int, data: bytes) -> None:
    """A few bytes changed anywhere in a good file."""
    agrees_with_safetensors(GOOD[:at] + data + GOOD[at + len(data) :])


@quick
@given(st.integers(8, 8 + HEADER), st.binary(max_size=6), st.integers(0, 6))
def test_spliced_headers(at: int, data: bytes, cut: int) -> None:
    """Bytes inserted into and cut from the header, its length kept true."""
    header = GOOD[8:at] + data + GOOD[at + cut : 8 + HEADER]
    agrees_with_safetensors(struct.pack("<Q", len(header)) + header + GOOD[8 + HEADER :])


@quick
@given(st.integers(0, len(GOOD)))
def test_truncation(length: int) -> None:
    """Every proper prefix of a good file is refused."""
    assert (read(GOOD[:length]) is None) == (length < len(GOOD))


@quick
@given(st.dictionaries(st.text(max_size=5), json_values, max_size=4), st.integers(0, 64))
def test_any_json_header(header: dict[str, Any], size: int) -> None:
    """Well-formed JSON of any shape."""
    text = json.dumps(header).encode()
    read(struct.pack("<Q", len(text)) + text + bytes(size))


@quick
@given(
    st.sampled_from(["dtype", "shape", "data_offsets"]),
    json_values | st.lists(st.integers(-(1 << 70), 1 << 70), max_size=3),
)
def test_any_field(field: str, value: Any) -> None:
    """One field of one entry replaced by anything."""
    header = json.loads(GOOD[8 : 8 + HEADER])
    header[next(iter(header.keys() - {"__metadata__"}))][field] = value
    text = json.dumps(header).encode()
    data = struct.pack("<Q", len(text)) + text + GOOD[8 + HEADER :]
    entries = read(data)
    if entries is not None:
        load(data)


def test_the_library_agrees_on_the_good_file() -> None:
    """The tests above start from something valid."""
    agrees_with_safetensors(GOOD)
    assert read(GOOD) is not None
    with pytest.raises(safetensors.SafetensorError):
        load(GOOD[:-1])


@quick
@given(
    st.dictionaries(st.sampled_from([*sorted(config()), "bias", "layers_to_transform", "rank_pattern"]), json_values)
    | st.dictionaries(st.text(max_size=8), json_values, max_size=3)
)
def test_any_configuration(changes: dict[str, Any]) -> None:
    """Whatever the configuration says, it is resolved or refused."""
    try:
        parsed = parse_peft_config(json.dumps(config(**changes)).encode())
        resolve_targets(parsed, TINY, max_rank=64)
    except AdapterRejected:
        return  # any other exception fails the test


@quick
@given(st.binary(max_size=200))
def test_any_configuration_bytes(data: bytes) -> None:
    """Also when it is not JSON."""
    with pytest.raises(AdapterRejected):
        parse_peft_config(data)


@quick
@given(st.text(alphabet="ab.*+?()[]{}|\\^$?:=!<>P#-0129,", max_size=14))
def test_any_pattern(pattern: str) -> None:
    """A pattern is refused when it is read, or can be matched in every place."""
    if check_pattern(pattern) is None:
        matcher = Matcher(0.5)
        try:
            for match in (matcher.full, matcher.tail, matcher.layer):
                match(pattern, "model.layers.1.self_attn.q_proj")
        except PatternTooSlow:
            pass


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    st.sampled_from([float("nan"), float("inf"), float("-inf")]),
    st.data(),
)
def test_one_bad_value_anywhere_is_found(dtype: torch.dtype, value: float, data: st.DataObject) -> None:
    """Every element of every tensor is looked at."""
    weights = tensors(dtype=dtype)
    tensor = weights[data.draw(st.sampled_from(sorted(weights)))]
    tensor.view(-1)[data.draw(st.integers(0, tensor.numel() - 1))] = value
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), config(), weights)
        with pytest.raises(AdapterRejected, match="1 values that are NaN or infinite"):
            validate_adapter(Path(folder), TINY, max_rank=8)
