"""Stored blocks: what was stored comes back, and nothing else is ever taken for it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lamina_kvtier.block_codec import CHECKSUMS, HEADER_BYTES, BlockCodec, Header, layout_digest
from lamina_kvtier.identity import Layout
from lamina_kvtier.payload_codecs import EXACT_CODECS
from lamina_kvtier.tier import NO_ADAPTER, BlockKey, Outcome

LAYOUT = Layout(layers=30, kv_heads=3, head_dim=64, dtype="bfloat16", block_size=16, rope="default theta=100000")
DIGEST = layout_digest(LAYOUT)
KEY = BlockKey(b"\x11" * 32, "tenant", b"\x22" * 32)
BLOCK = bytes(range(256)) * 2
VERSION_FIELDS = range(4, 8)

formats = st.tuples(st.sampled_from(sorted(EXACT_CODECS)), st.sampled_from(sorted(CHECKSUMS)))
some = settings(max_examples=150, deadline=None)


def codec_for(block: bytes = BLOCK, codec: str = "raw", checksum: str | None = None) -> BlockCodec:
    return BlockCodec(DIGEST, len(block), codec=codec, checksum=checksum)


def stored(codec: BlockCodec, block: bytes = BLOCK, key: BlockKey = KEY) -> bytearray:
    header, payload = codec.encode(key, memoryview(block))
    return bytearray(header) + payload


def forged(value: bytearray, change: Callable[[Header], Header]) -> bytearray:
    """The value with another sound header: what a writer of other blocks would have written."""
    codec = codec_for()
    header = codec.read_header(value[:HEADER_BYTES], len(value), KEY.id)
    assert isinstance(header, Header)
    return bytearray(change(header).pack()) + value[HEADER_BYTES:]


@some
@given(st.binary(min_size=1, max_size=600), formats, st.binary(min_size=32, max_size=32))
def test_what_was_stored_comes_back(block: bytes, written: tuple[str, str], adapter: bytes) -> None:
    """Any reader of the layout reads any writer's codec and checksum."""
    key = BlockKey(KEY.id, "tenant", adapter)
    value = stored(codec_for(block, *written), block, key)
    into = bytearray(len(block))
    assert codec_for(block).decode(value, key.id, memoryview(into), adapter=adapter) is Outcome.OK
    assert into == block


@some
@given(formats, st.data())
def test_a_flipped_bit_is_found(written: tuple[str, str], data: st.DataObject) -> None:
    """Wherever it is: only in the version it cannot be told from another version's block."""
    codec = codec_for(BLOCK, *written)
    value = stored(codec)
    at = data.draw(st.integers(0, len(value) - 1))
    value[at] ^= 1 << data.draw(st.integers(0, 7))
    outcome = codec.decode(value, KEY.id, memoryview(bytearray(len(BLOCK))))
    assert outcome is (Outcome.WRONG_LAYOUT if at in VERSION_FIELDS else Outcome.CORRUPT)


def test_every_bit_of_the_header_counts() -> None:
    """The same for each bit of the header, none left to chance."""
    codec, into = codec_for(), memoryview(bytearray(len(BLOCK)))
    for bit in range(8 * HEADER_BYTES):
        value = stored(codec)
        value[bit // 8] ^= 1 << bit % 8
        assert codec.decode(value, KEY.id, into) is not Outcome.OK, bit


@some
@given(formats, st.data())
def test_another_length_is_found(written: tuple[str, str], data: st.DataObject) -> None:
    """Truncated anywhere, or with something behind it."""
    codec = codec_for(BLOCK, *written)
    value = stored(codec)
    cut = data.draw(st.integers(0, len(value) - 1))
    into = memoryview(bytearray(len(BLOCK)))
    assert codec.decode(value[:cut], KEY.id, into) is Outcome.CORRUPT
    assert codec.decode(value + data.draw(st.binary(min_size=1, max_size=9)), KEY.id, into) is Outcome.CORRUPT


@some
@given(st.binary(max_size=2 * HEADER_BYTES))
def test_noise_is_no_block(noise: bytes) -> None:
    into = memoryview(bytearray(len(BLOCK)))
    assert codec_for().decode(noise, KEY.id, into) is Outcome.CORRUPT
    assert codec_for().decode(b"LKVB" + noise, KEY.id, into) is not Outcome.OK


@pytest.mark.parametrize("change", ["layers", "kv_heads", "head_dim", "block_size", "dtype", "rope"])
def test_each_field_of_the_layout_matters(change: str) -> None:
    """Same identity, same length: a block of another layout is not read."""
    value = getattr(LAYOUT, change)
    other = replace(LAYOUT, **{change: value + 1 if isinstance(value, int) else value + "x"})
    reader = BlockCodec(layout_digest(other), len(BLOCK))
    assert reader.decode(stored(codec_for()), KEY.id, memoryview(bytearray(len(BLOCK)))) is Outcome.WRONG_LAYOUT


def test_another_size_of_block_is_another_layout() -> None:
    reader = BlockCodec(DIGEST, len(BLOCK) + 1)
    into = memoryview(bytearray(len(BLOCK) + 1))
    assert reader.decode(stored(codec_for()), KEY.id, into) is Outcome.WRONG_LAYOUT


def test_another_identity_or_adapter_is_corrupt() -> None:
    """A sound block under a wrong key, and one whose adapter contradicts what its identity says."""
    codec, value, into = codec_for(), stored(codec_for()), memoryview(bytearray(len(BLOCK)))
    assert codec.decode(value, b"\x12" * 32, into) is Outcome.CORRUPT
    assert codec.decode(value, KEY.id, into, adapter=NO_ADAPTER) is Outcome.CORRUPT
    assert codec.decode(value, KEY.id, into, adapter=KEY.adapter) is Outcome.OK


@pytest.mark.parametrize("field", ["codec", "checksum"])
def test_a_codec_or_checksum_that_is_not_available_here_is_another_layout(field: str) -> None:
    """A replica with other libraries misses; it does not fail."""
    value = forged(stored(codec_for()), lambda header: replace(header, **{field: "unheard"}))
    assert codec_for().decode(value, KEY.id, memoryview(bytearray(len(BLOCK)))) is Outcome.WRONG_LAYOUT


def test_a_raw_payload_of_another_length_than_the_block_is_corrupt() -> None:
    """Even if header, checksum and length of the value agree with each other."""
    short = BLOCK[:-1]
    value = stored(codec_for(short), short)
    value = bytearray(
        replace(
            Header("raw", "blake2b-256", len(short), len(short), KEY.id, DIGEST, KEY.adapter, bytes(32)),
            block_bytes=len(BLOCK),
            payload_checksum=hashlib.blake2b(short, digest_size=32).digest(),
        ).pack()
        + value[HEADER_BYTES:]
    )
    assert codec_for().decode(value, KEY.id, memoryview(bytearray(len(BLOCK)))) is Outcome.CORRUPT


@pytest.mark.skipif("zstd" not in EXACT_CODECS, reason="zstandard is not installed")
@pytest.mark.parametrize("payload", [b"", b"no frame", BLOCK], ids=["empty", "text", "raw"])
def test_a_payload_that_is_no_frame_is_corrupt(payload: bytes) -> None:
    """A writer that said zstd and stored something else."""
    checksum = hashlib.blake2b(payload, digest_size=32).digest()
    header = Header("zstd", "blake2b-256", len(BLOCK), len(payload), KEY.id, DIGEST, KEY.adapter, checksum)
    value = header.pack() + payload
    assert codec_for().decode(value, KEY.id, memoryview(bytearray(len(BLOCK)))) is Outcome.CORRUPT


def test_a_raw_block_is_received_where_it_belongs() -> None:
    """The data plane's way: header first, payload right into its place, then verified without a copy."""
    codec, value = codec_for(), stored(codec_for())
    header = codec.read_header(memoryview(value)[:HEADER_BYTES], len(value), KEY.id)
    assert isinstance(header, Header)
    assert header.in_place
    into = memoryview(bytearray(value[HEADER_BYTES:]))
    assert codec.finish(header, into, into) is Outcome.OK
    into[7] ^= 1
    assert codec.finish(header, into, into) is Outcome.CORRUPT
    assert codec.finish(header, into[1:], into[1:]) is Outcome.CORRUPT


def test_raw_payloads_are_not_copied() -> None:
    block = memoryview(bytearray(BLOCK))
    _, payload = codec_for().encode(KEY, block)
    assert payload is block


def test_misuse() -> None:
    """Blocks of another length, digests of another length, codecs and checksums that are not there."""
    with pytest.raises(ValueError, match="512 bytes, not 3"):
        codec_for().encode(KEY, memoryview(b"abc"))
    with pytest.raises(ValueError, match="32 bytes"):
        BlockCodec(b"short", 512)
    with pytest.raises(ValueError, match="lz4"):
        BlockCodec(DIGEST, 512, codec="lz4")
    with pytest.raises(ValueError, match="crc"):
        BlockCodec(DIGEST, 512, checksum="crc")
    with pytest.raises(ValueError, match="32 bytes"):
        BlockKey(b"short", "tenant")


def test_the_format_is_what_it_was() -> None:
    """Blocks of earlier versions are in stores: if this fails, raise the version."""
    header, _ = codec_for(checksum="blake2b-256").encode(KEY, memoryview(BLOCK))
    assert hashlib.sha256(header).hexdigest() == "6c9b970c930f6609ddeb5d25c6dbf8e11f56945dfaa892ccfaebcfaf714c1141"
