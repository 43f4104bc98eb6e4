"""Block identity: the written format, its refusals, the fallback hash and the chain."""

from __future__ import annotations

import hashlib
import importlib.util
import struct
import subprocess
import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from blake3 import blake3

from lamina_kvtier import IdentityChain, InvalidIdentity, Layout, child_id, identity, root_id

LAYOUT = Layout(layers=30, kv_heads=3, head_dim=64, dtype="bfloat16", block_size=16, rope="theta=100000")
ROOT = root_id(model_digest="aa11", layout=LAYOUT, adapter="bb22", namespace="cc33")


def written_root(hash_name: bytes, adapter: bytes) -> bytes:
    """What the format says is hashed, spelled out by hand."""
    fields = [b"lamina-kv/1", hash_name, b"aa11", b"30", b"3", b"64", b"16", b"bfloat16", b"theta=100000"]
    fields += [adapter, b"cc33"]
    return b"\x00" + b"".join(struct.pack("<Q", len(field)) + field for field in fields)


def without_blake3(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A second copy of the identity module, as a machine without blake3 would load it."""
    monkeypatch.setitem(sys.modules, "blake3", None)
    spec = importlib.util.spec_from_file_location("identity_without_blake3", identity.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def test_root_is_the_hash_of_the_documented_bytes() -> None:
    """The root hashes version, hash name, model, layout, adapter and namespace, each length-prefixed."""
    assert blake3(written_root(b"blake3", b"\x01bb22")).digest() == ROOT


def test_root_of_the_base_model_has_no_adapter_field_content() -> None:
    """The base model is written as a lone zero byte, which no adapter digest can spell."""
    base = root_id(model_digest="aa11", layout=LAYOUT, adapter=None, namespace="cc33")
    assert base == blake3(written_root(b"blake3", b"\x00")).digest()


def test_child_is_the_hash_of_parent_and_little_endian_tokens() -> None:
    """A block hashes its parent and its token ids as little-endian uint32."""
    expected = blake3(b"\x01" + ROOT + bytes([1, 0, 0, 0, 0, 1, 0, 0, 255, 255, 255, 255])).digest()
    assert child_id(ROOT, [1, 256, 2**32 - 1]) == expected


def test_identities_are_pinned() -> None:
    """Stored blocks outlive a process: these values may change only together with FORMAT."""
    assert identity.FORMAT == "lamina-kv/1"
    assert ROOT.hex() == "d257e67ae3f994a445e00c0f573100aaf0a292033f70417dd388c959af03aa26"
    assert child_id(ROOT, range(16)).hex() == "ae22040e447ddb641e433540cc39935707169da5eae7dfbadd20543459bdbdac"


def test_without_blake3_another_hash_with_another_name_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fallback is blake2b over the same bytes, and its name in the root keeps both worlds apart."""
    fallback = without_blake3(monkeypatch)
    layout = fallback.Layout(30, 3, 64, "bfloat16", 16, "theta=100000")
    root = fallback.root_id(model_digest="aa11", layout=layout, adapter="bb22", namespace="cc33")
    message = written_root(b"blake2b-256", b"\x01bb22")
    assert (fallback.HASH_NAME, identity.HASH_NAME) == ("blake2b-256", "blake3")
    assert root == hashlib.blake2b(message, digest_size=32).digest()
    assert root != ROOT


def test_the_fallback_chain_agrees_with_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chain and single steps use the same hash on the fallback path too."""
    fallback = without_blake3(monkeypatch)
    chain = fallback.IdentityChain(ROOT, 2)
    chain.extend([5, 6, 7])
    assert chain.ids == [fallback.child_id(ROOT, [5, 6])]
    assert chain.ids != [child_id(ROOT, [5, 6])]


def test_the_package_needs_neither_torch_nor_blake3() -> None:
    """Importing the package on a bare machine works and loads no tensor library."""
    code = (
        "import sys; sys.modules['blake3'] = None; import lamina_kvtier;"
        "assert not {'torch', 'numpy', 'fastapi'} & set(sys.modules), 'heavy import'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("field", ["layers", "kv_heads", "head_dim", "block_size"])
@pytest.mark.parametrize("value", [0, -1, 16.0, True, "16", None])
def test_layout_refuses_numbers_that_are_no_positive_ints(field: str, value: Any) -> None:
    """16.0 and True would hash differently from 16 and 1, so they are refused and not converted."""
    good = {"layers": 1, "kv_heads": 1, "head_dim": 1, "dtype": "float32", "block_size": 1, "rope": "none"}
    with pytest.raises(InvalidIdentity, match=rf"Layout\.{field} must be an int"):
        Layout(**{**good, field: value})


@pytest.mark.parametrize("field", ["dtype", "rope"])
@pytest.mark.parametrize("value", ["", None, 3])
def test_layout_refuses_empty_text(field: str, value: Any) -> None:
    """dtype and rope are part of the identity and may not be left out."""
    good = {"layers": 1, "kv_heads": 1, "head_dim": 1, "dtype": "float32", "block_size": 1, "rope": "none"}
    with pytest.raises(InvalidIdentity, match=rf"Layout\.{field}"):
        Layout(**{**good, field: value})


@pytest.mark.parametrize("field", ["model_digest", "adapter", "namespace"])
def test_root_refuses_empty_fields(field: str) -> None:
    """An empty namespace would be shared by every tenant that forgot its own."""
    good = {"model_digest": "a", "adapter": "b", "namespace": "c"}
    with pytest.raises(InvalidIdentity, match=field):
        root_id(layout=LAYOUT, **{**good, field: ""})


@pytest.mark.parametrize("token", [-1, 2**32, 2**70, -(2**70), 1.0, "1", None])
def test_token_ids_outside_uint32_are_refused(token: Any) -> None:
    """No token id is ever wrapped or rounded into another one."""
    with pytest.raises(InvalidIdentity, match="4294967295"):
        child_id(ROOT, [1, token])


def test_numpy_token_ids_count_like_ints() -> None:
    """Token ids may come straight from an array."""
    assert child_id(ROOT, list(np.arange(16, dtype=np.int64))) == child_id(ROOT, range(16))


@pytest.mark.parametrize("parent", [b"", b"x" * 31, b"x" * 33, "x" * 32, None])
def test_a_parent_must_be_an_identity(parent: Any) -> None:
    """A parent of another length could shift bytes between parent and tokens."""
    with pytest.raises(InvalidIdentity, match="32 bytes"):
        child_id(parent, [1])
    with pytest.raises(InvalidIdentity, match="32 bytes"):
        IdentityChain(parent, 16)


def test_a_block_without_tokens_has_no_identity() -> None:
    """Only full blocks are ever named."""
    with pytest.raises(InvalidIdentity):
        child_id(ROOT, [])


@pytest.mark.parametrize("block_size", [0, -16])
def test_a_chain_needs_a_positive_block_size(block_size: int) -> None:
    """Zero tokens per block would never end."""
    with pytest.raises(InvalidIdentity, match="block_size"):
        IdentityChain(ROOT, block_size)


def test_chain_names_full_blocks_only() -> None:
    """The partial last block counts as tokens, but has no identity until it is full."""
    chain = IdentityChain(ROOT, 4)
    chain.extend([1, 2, 3])
    assert (len(chain), chain.ids) == (3, [])
    chain.extend([4])
    first = child_id(ROOT, [1, 2, 3, 4])
    assert (len(chain), chain.ids) == (4, [first])
    chain.extend([5, 6, 7, 8, 9])
    assert (len(chain), chain.ids) == (9, [first, child_id(first, [5, 6, 7, 8])])
    chain.extend([])
    assert len(chain) == 9


def test_a_refused_extend_changes_nothing() -> None:
    """One bad token among good ones leaves the chain as it was."""
    chain = IdentityChain(ROOT, 2)
    chain.extend([1, 2, 3])
    before = chain.ids.copy()
    with pytest.raises(InvalidIdentity):
        chain.extend([4, 5, 6, -1])
    assert (len(chain), chain.ids) == (3, before)
    chain.extend([4])
    assert chain.ids == [*before, child_id(before[0], [3, 4])]


def test_copies_of_a_chain_part_ways() -> None:
    """Two choices share the prompt's identities and the partial block, and nothing after it."""
    one = IdentityChain(ROOT, 2)
    one.extend([1, 2, 3])
    two = one.copy()
    one.extend([4, 5])
    two.extend([9])
    assert one.ids == [two.ids[0], child_id(two.ids[0], [3, 4])]
    assert two.ids[1] == child_id(two.ids[0], [3, 9])
    assert (len(one), len(two)) == (5, 4)
