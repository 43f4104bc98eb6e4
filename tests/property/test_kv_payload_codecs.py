"""FP8 payloads: close to what was written, and never mistaken for exact ones."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lamina_kvtier.block_codec import HEADER_BYTES, BlockCodec, Header, layout_digest
from lamina_kvtier.identity import Layout
from lamina_kvtier.payload_codecs import codecs_for
from lamina_kvtier.tier import BlockKey, Outcome

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
HEAD_DIM = 16
KEY = BlockKey(b"\x11" * 32, "tenant", b"\x22" * 32)
some = settings(max_examples=60, deadline=None)


def layout_of(dtype: str) -> Layout:
    return Layout(layers=2, kv_heads=3, head_dim=HEAD_DIM, dtype=dtype, block_size=4, rope="none")


def codec_of(layout: Layout, block_bytes: int, name: str = "fp8") -> BlockCodec:
    return BlockCodec(layout_digest(layout, name), block_bytes, codec=name, codecs=codecs_for(layout))


def block_of(seed: int, dtype: str, spread: float = 1.0) -> torch.Tensor:
    """[2, layers, tokens, heads, dim], vectors of very different lengths."""
    random = np.random.default_rng(seed)
    size = np.exp(spread * random.standard_normal((2, 2, 4, 3, 1)))
    return torch.from_numpy(random.standard_normal((2, 2, 4, 3, HEAD_DIM)) * size).to(DTYPES[dtype])


def bytes_of(block: torch.Tensor) -> memoryview:
    return memoryview(bytearray(block.contiguous().view(torch.uint8).numpy().tobytes()))


def read(value: bytes | memoryview, dtype: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(value), dtype=DTYPES[dtype]).view(2, 2, 4, 3, HEAD_DIM)


@some
@given(st.integers(0, 2**32), st.sampled_from(sorted(DTYPES)), st.floats(0, 3))
def test_it_comes_back_as_torch_would_round_it(seed: int, dtype: str, spread: float) -> None:
    """Against torch's float8_e4m3fn with the same scales: equal but for ties, where a neighbour is as near."""
    block = block_of(seed, dtype, spread)
    value = bytes_of(block)
    payload = codecs_for(layout_of(dtype))["fp8"].encode(value)
    into = memoryview(bytearray(len(value)))
    assert codecs_for(layout_of(dtype))["fp8"].decode(payload, into)
    wide = block.double()
    scales = wide.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 448
    oracle = (wide / scales).float().to(torch.float8_e4m3fn).double() * scales
    got = read(into, dtype).double()
    worst = (wide - oracle).abs() + wide.abs() * (2**-7 if dtype == "bfloat16" else 2**-9) + scales * 2**-9
    assert bool(((wide - got).abs() <= worst).all())
    assert len(payload) == block.numel() + 4 * block.numel() // HEAD_DIM


@some
@given(st.integers(0, 2**32), st.sampled_from(sorted(DTYPES)))
def test_writing_again_what_was_read_changes_nothing_more(seed: int, dtype: str) -> None:
    """A block that goes up and down many times does not drift: its numbers are those that FP8 has."""
    fp8 = codecs_for(layout_of(dtype))["fp8"]
    value = bytes_of(block_of(seed, dtype))
    once, twice = memoryview(bytearray(len(value))), memoryview(bytearray(len(value)))
    assert fp8.decode(fp8.encode(value), once)
    assert fp8.decode(fp8.encode(once), twice)
    first, second = read(once, dtype).double(), read(twice, dtype).double()
    assert bool(((first - second).abs() <= first.abs() * 2**-7 + 1e-30).all())


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_zeros_and_tiny_numbers(dtype: str) -> None:
    fp8 = codecs_for(layout_of(dtype))["fp8"]
    block = torch.zeros(2, 2, 4, 3, HEAD_DIM, dtype=DTYPES[dtype])
    block[0, 0, 0, 0, 0] = torch.finfo(DTYPES[dtype]).tiny
    into = memoryview(bytearray(block.numel() * block.element_size()))
    assert fp8.decode(fp8.encode(bytes_of(block)), into)
    assert float((read(into, dtype) - block).abs().max()) <= torch.finfo(DTYPES[dtype]).tiny


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_block_that_has_no_such_form_is_stored_as_it_is(bad: float) -> None:
    block = block_of(1, "float32")
    block[1, 0, 2, 1, 3] = bad
    value = bytes_of(block)
    codec = codec_of(layout_of("float32"), len(value))
    header, payload = codec.encode(KEY, value)
    into = memoryview(bytearray(len(value)))
    assert codec.decode(header + bytes(payload), KEY.id, into) is Outcome.OK
    assert into == value


def test_who_wants_exact_blocks_never_takes_a_lossy_one() -> None:
    layout, value = layout_of("float32"), bytes_of(block_of(2, "float32"))
    lossy, exact = codec_of(layout, len(value)), codec_of(layout, len(value), "raw")
    into = memoryview(bytearray(len(value)))
    for writer, reader in ((lossy, exact), (exact, lossy)):
        header, payload = writer.encode(KEY, value)
        assert reader.decode(header + bytes(payload), KEY.id, into) is Outcome.WRONG_LAYOUT
    if "zstd" in codecs_for(layout):
        header, payload = codec_of(layout, len(value), "zstd").encode(KEY, value)
        assert exact.decode(header + bytes(payload), KEY.id, into) is Outcome.OK
        assert into == value


@some
@given(st.binary(max_size=2 * 2 * 4 * 3 * (HEAD_DIM + 4) + 9))
def test_any_payload_is_a_block_or_corrupt(payload: bytes) -> None:
    """A writer that said fp8 and stored something else."""
    layout = layout_of("float32")
    size = 2 * 2 * 4 * 3 * HEAD_DIM * 4
    header = Header(
        codec="fp8",
        checksum="blake2b-256",
        block_bytes=size,
        payload_bytes=len(payload),
        identity=KEY.id,
        layout=layout_digest(layout, "fp8"),
        adapter=KEY.adapter,
        payload_checksum=hashlib.blake2b(payload, digest_size=32).digest(),
    )
    outcome = codec_of(layout, size).decode(header.pack() + payload, KEY.id, memoryview(bytearray(size)))
    assert outcome is (Outcome.OK if len(payload) == size // 4 + size // HEAD_DIM else Outcome.CORRUPT) or (
        outcome is Outcome.CORRUPT and not np.isfinite(np.frombuffer(payload[: size // HEAD_DIM], "<f4")).all()
    )
    assert len(header.pack()) == HEADER_BYTES
