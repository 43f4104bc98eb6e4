"""A block as it lies in a store: a header of 192 bytes, then the payload. Nothing is believed before it is verified.

    offset  bytes
         0      4  magic "LKVB"
         4      2  version
         6      2  length of the header
         8      8  codec of the payload: "raw", "zstd", "fp8"
        16     16  checksum: "xxh3-128", "blake3", "blake2b-256"
        32      8  bytes of the block, decoded
        40      8  bytes of the payload, as it is stored
        48     32  identity
        80     32  digest of the layout
       112     32  digest of the adapter, or zeros
       144     32  checksum of the payload as it is stored, zeros behind it
       176     16  checksum (blake2b) of the 176 bytes before

Numbers are little-endian, names ASCII with zeros behind. A reader takes any codec and checksum that it can compute,
whatever it would write itself. Checksums find accidents; who can write to the store can also forge them.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

from lamina_kvtier.identity import FORMAT, BlockId, Layout
from lamina_kvtier.payload_codecs import EXACT_CODECS, LOSSY_CODECS, Buffer, NotRepresentable, PayloadCodec, optional
from lamina_kvtier.tier import BlockKey, Outcome

__all__ = ["CHECKSUMS", "DEFAULT_CHECKSUM", "HEADER_BYTES", "BlockCodec", "Header", "layout_digest"]

_MAGIC, _VERSION = b"LKVB", 1
_FIELDS = struct.Struct("<4sHH8s16sQQ32s32s32s32s")
_CHECK_BYTES = 16
HEADER_BYTES = _FIELDS.size + _CHECK_BYTES


def layout_digest(layout: Layout, codec: str = "raw") -> bytes:
    """32 bytes for the header: blocks of another layout, or of another meaning of stored bytes, do not match.

    A lossy `codec` is another meaning; exact ones are all the same.
    """
    lossy = {"lossy": codec} if codec in LOSSY_CODECS else {}
    spelled = json.dumps({"format": FORMAT, **asdict(layout), **lossy}, sort_keys=True)
    return hashlib.blake2b(spelled.encode(), digest_size=32).digest()


@dataclass(frozen=True, slots=True)
class Header:
    """What a sound header says."""

    codec: str
    checksum: str
    block_bytes: int
    payload_bytes: int
    identity: BlockId
    layout: bytes
    adapter: bytes
    payload_checksum: bytes

    @property
    def in_place(self) -> bool:
        """The payload is the block itself: it may be received right where the block belongs."""
        return self.codec == "raw"

    def pack(self) -> bytes:
        names = self.codec.encode(), self.checksum.encode()
        digests = self.identity, self.layout, self.adapter, self.payload_checksum
        fields = _FIELDS.pack(_MAGIC, _VERSION, HEADER_BYTES, *names, self.block_bytes, self.payload_bytes, *digests)
        return fields + _check(fields)


class BlockCodec:
    """Writes and reads the blocks of one layout. Any thread may use it."""

    def __init__(
        self,
        layout: bytes,
        block_bytes: int,
        *,
        codec: str = "raw",
        checksum: str | None = None,
        codecs: Mapping[str, PayloadCodec] = EXACT_CODECS,
    ) -> None:
        """layout: `layout_digest`. codec, checksum: how to write; codecs: what can be read, see `codecs_for`.

        Raises ValueError for what is not available here.
        """
        checksum = checksum or DEFAULT_CHECKSUM
        if len(layout) != 32 or block_bytes < 1:
            raise ValueError(f"a layout digest has 32 bytes and a block at least 1, not {len(layout)}, {block_bytes}")
        if codec not in codecs or checksum not in CHECKSUMS:
            raise ValueError(f"{codec!r}, {checksum!r}: here are {sorted(codecs)} and {sorted(CHECKSUMS)}")
        self.layout, self.block_bytes, self.codec, self.checksum = layout, block_bytes, codec, checksum
        self._codecs = codecs

    def encode(self, key: BlockKey, block: memoryview) -> tuple[bytes, Buffer]:
        """Header and payload of a block; raw payload is `block` itself, and so is what its codec cannot write.

        Raises ValueError for another length.
        """
        if block.nbytes != self.block_bytes:
            raise ValueError(f"a block has {self.block_bytes} bytes, not {block.nbytes}")
        codec = self.codec
        try:
            payload = self._codecs[codec].encode(block)
        except NotRepresentable:
            codec, payload = "raw", block
        header = Header(
            codec=codec,
            checksum=self.checksum,
            block_bytes=self.block_bytes,
            payload_bytes=len(payload),
            identity=key.id,
            layout=self.layout,
            adapter=key.adapter,
            payload_checksum=CHECKSUMS[self.checksum](payload),
        )
        return header.pack(), payload

    def read_header(
        self, header: Buffer, stored_bytes: int, identity: BlockId, *, adapter: bytes | None = None
    ) -> Header | Outcome:
        """The header if its payload is worth reading, else why not.

        header: the first HEADER_BYTES of a value of `stored_bytes`. adapter: None if it is not known here; the
        identity covers it anyway.
        """
        found = _unpack(header)
        if isinstance(found, Outcome):
            return found
        if found.layout != self.layout or found.block_bytes != self.block_bytes:
            return Outcome.WRONG_LAYOUT
        if found.codec not in self._codecs or found.checksum not in CHECKSUMS:
            return Outcome.WRONG_LAYOUT
        sound = (
            found.identity == identity
            and adapter in (None, found.adapter)
            and found.payload_bytes == stored_bytes - HEADER_BYTES
            and (found.payload_bytes == found.block_bytes or not found.in_place)
        )
        return found if sound else Outcome.CORRUPT

    def finish(self, header: Header, payload: Buffer, into: memoryview) -> Outcome:
        """Verifies the payload and decodes it; OK: `into` is the block. `payload` may be `into` itself if in place."""
        if len(payload) != header.payload_bytes or into.nbytes != header.block_bytes:
            return Outcome.CORRUPT
        if CHECKSUMS[header.checksum](payload) != header.payload_checksum:
            return Outcome.CORRUPT
        if payload is into:
            return Outcome.OK
        return Outcome.OK if self._codecs[header.codec].decode(payload, into) else Outcome.CORRUPT

    def decode(self, value: Buffer, identity: BlockId, into: memoryview, *, adapter: bytes | None = None) -> Outcome:
        """A whole stored value, header and payload. Anything but OK leaves `into` undefined."""
        view = memoryview(value)
        header = self.read_header(view[:HEADER_BYTES], len(view), identity, adapter=adapter)
        return header if isinstance(header, Outcome) else self.finish(header, view[HEADER_BYTES:], into)


def _unpack(header: Buffer) -> Header | Outcome:
    if len(header) != HEADER_BYTES or bytes(header[:4]) != _MAGIC:
        return Outcome.CORRUPT
    fields, check = header[: _FIELDS.size], header[_FIELDS.size :]
    _, version, length, codec, checksum, block_bytes, payload_bytes, *digests = _FIELDS.unpack(fields)
    if (version, length) != (_VERSION, HEADER_BYTES):
        return Outcome.WRONG_LAYOUT  # of another version, so its own checksum may be anywhere
    if check != _check(fields):
        return Outcome.CORRUPT
    return Header(_name(codec), _name(checksum), block_bytes, payload_bytes, *digests)


def _name(field: bytes) -> str:
    return field.rstrip(b"\0").decode("ascii", "replace")


def _check(fields: Buffer) -> bytes:
    return hashlib.blake2b(fields, digest_size=_CHECK_BYTES).digest()


# Checksums of payloads, 32 bytes each.


def _blake2b(payload: Buffer) -> bytes:
    return hashlib.blake2b(payload, digest_size=32).digest()


def _checksums() -> dict[str, Callable[[Buffer], bytes]]:
    """What can be computed here, the best default first."""
    found: dict[str, Callable[[Buffer], bytes]] = {}
    if (xxhash := optional("xxhash")) is not None:  # a tenth of blake3's time; forgers are not its business anyway
        found["xxh3-128"] = lambda payload: bytes(xxhash.xxh3_128_digest(payload)).ljust(32, b"\0")
    if (blake3 := optional("blake3")) is not None:
        found["blake3"] = lambda payload: bytes(blake3.blake3(payload).digest())
    found["blake2b-256"] = _blake2b
    return found


CHECKSUMS: Mapping[str, Callable[[Buffer], bytes]] = _checksums()
DEFAULT_CHECKSUM = next(iter(CHECKSUMS))
