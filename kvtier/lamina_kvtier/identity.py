"""Identity of a KV block: a hash chain over what the block's bytes depend on.

    root  = H(0x00, format version, hash name, model digest, layout..., adapter, namespace)
    block = H(0x01, parent, token ids as little-endian uint32)

The root's fields are length-prefixed; only full blocks have an identity. Two blocks have the same one only if
base model, layout, adapter, namespace and *every* token up to the end of the block agree, so a block may be
reused wherever its identity is known. Reasons and limits: docs/adr/0002-block-identity.md.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from lamina_kvtier.errors import InvalidIdentity

__all__ = ["FORMAT", "HASH_NAME", "ID_BYTES", "BlockId", "IdentityChain", "Layout", "child_id", "root_id"]

try:
    from blake3 import blake3
except ImportError:  # a bare GPU machine; the name is part of the root, so the two hashes never mix
    HASH_NAME = "blake2b-256"

    def _digest(data: bytes) -> bytes:
        return hashlib.blake2b(data, digest_size=32).digest()

else:
    HASH_NAME = "blake3"

    def _digest(data: bytes) -> bytes:
        return blake3(data).digest()


BlockId = bytes  # ID_BYTES long

FORMAT = "lamina-kv/1"  # raise it whenever the meaning of stored bytes changes in a way no field below shows
ID_BYTES = 32

_ROOT, _CHILD = b"\x00", b"\x01"  # first byte of what is hashed: a root can never be mistaken for a block
_BASE, _ADAPTER = b"\x00", b"\x01"  # ditto for "no adapter" and an adapter, whatever its digest
_TOKEN_BYTES = 4
_MAX_TOKEN = 2**32 - 1


@dataclass(frozen=True, slots=True)
class Layout:
    """What decides how a block's bytes are to be read. Any difference makes a different cache.

    `layers`, `kv_heads` and `head_dim` are those of one stored block (per rank, if heads are split over
    ranks), `block_size` is in tokens, `dtype` is the stored one ("bfloat16"), and `rope` names the position
    encoding with all its parameters in a canonical spelling. Raises InvalidIdentity.
    """

    layers: int
    kv_heads: int
    head_dim: int
    dtype: str
    block_size: int
    rope: str

    def __post_init__(self) -> None:
        for name in ("layers", "kv_heads", "head_dim", "block_size"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise InvalidIdentity(f"Layout.{name} must be an int of at least 1, not {value!r}.")
        _require_text("Layout.dtype", self.dtype)
        _require_text("Layout.rope", self.rope)

    def _fields(self) -> list[bytes]:
        numbers = (self.layers, self.kv_heads, self.head_dim, self.block_size)
        return [*(b"%d" % number for number in numbers), self.dtype.encode(), self.rope.encode()]


def root_id(*, model_digest: str, layout: Layout, adapter: str | None, namespace: str) -> BlockId:
    """Identity of the empty prefix: the parent of every first block.

    `model_digest` covers the base weights and every setting that changes the computed keys and values,
    `adapter` is the adapter's digest (None: the base model), `namespace` keeps tenants apart. None of them
    may be empty: an empty namespace would be one that tenants share by accident. Raises InvalidIdentity.
    """
    _require_text("model_digest", model_digest)
    _require_text("namespace", namespace)
    if adapter is not None:
        _require_text("adapter", adapter)
    fields = [
        FORMAT.encode(),
        HASH_NAME.encode(),
        model_digest.encode(),
        *layout._fields(),
        _BASE if adapter is None else _ADAPTER + adapter.encode(),
        namespace.encode(),
    ]
    return _digest(_ROOT + b"".join(struct.pack("<Q", len(field)) + field for field in fields))


def child_id(parent: BlockId, token_ids: Sequence[int]) -> BlockId:
    """Identity of the block that holds `token_ids` after `parent` (a block's identity, or the root).

    Raises InvalidIdentity for a parent that is no identity, no tokens, or a token id outside 0 ... 2**32 - 1.
    """
    _require_id("parent", parent)
    if len(token_ids) == 0:
        raise InvalidIdentity("A block without tokens has no identity.")
    return _digest(_CHILD + parent + _pack(token_ids))


class IdentityChain:
    """The identities of one sequence's blocks, kept up to date as tokens are appended.

    `ids` holds one identity per *full* block, in order; read it, never change it. Appending costs one hash
    per block that fills up and never looks at earlier tokens again.
    """

    __slots__ = ("_block_bytes", "_pending", "_root", "ids")

    def __init__(self, root: BlockId, block_size: int) -> None:
        """`block_size` in tokens. Raises InvalidIdentity."""
        _require_id("root", root)
        if block_size < 1:
            raise InvalidIdentity(f"block_size must be at least 1 token, not {block_size}.")
        self.ids: list[BlockId] = []
        self._root = root
        self._block_bytes = block_size * _TOKEN_BYTES
        self._pending = b""  # packed tokens of the last, partial block

    def __len__(self) -> int:
        """Tokens appended so far, those of the partial block included."""
        return (len(self.ids) * self._block_bytes + len(self._pending)) // _TOKEN_BYTES

    def extend(self, token_ids: Sequence[int]) -> None:
        """Appends tokens. Raises InvalidIdentity for an id outside 0 ... 2**32 - 1 before any is appended."""
        data = self._pending + _pack(token_ids)
        full = len(data) - len(data) % self._block_bytes
        parent = self.ids[-1] if self.ids else self._root
        for start in range(0, full, self._block_bytes):
            parent = _digest(_CHILD + parent + data[start : start + self._block_bytes])
            self.ids.append(parent)
        self._pending = data[full:]

    def copy(self) -> IdentityChain:
        """An independent chain with the same past, for a choice that shares the prompt and then parts."""
        twin = IdentityChain(self._root, self._block_bytes // _TOKEN_BYTES)
        twin.ids = self.ids.copy()
        twin._pending = self._pending
        return twin


def _pack(token_ids: Sequence[int]) -> bytes:
    try:
        return struct.pack(f"<{len(token_ids)}I", *token_ids)
    except struct.error:
        raise InvalidIdentity(f"Token ids must be whole numbers from 0 to {_MAX_TOKEN}.") from None


def _require_text(name: str, value: str) -> None:
    if not isinstance(value, str) or not value:
        raise InvalidIdentity(f"{name} must be a non-empty string, not {value!r}.")


def _require_id(name: str, value: BlockId) -> None:
    if not isinstance(value, bytes) or len(value) != ID_BYTES:
        raise InvalidIdentity(f"{name} must be {ID_BYTES} bytes, not {value!r}.")
