"""Keys as LMCache spells them. None of this needs LMCache."""

from __future__ import annotations

import pytest

from lamina_kvtier.lmcache_wire import ALONE, LmcacheNames

BLOCK = bytes(range(32))


def test_keys_are_spelled_as_lmcache_spells_them() -> None:
    """Model, rank (8 hex digits), object group (hex), hash (hex) and, where there is one, the salt."""
    assert LmcacheNames("org/model").key(BLOCK) == b"org/model@01000100@0@" + BLOCK.hex().encode()
    named = LmcacheNames("m", salt="tenant-a", kv_rank=0x02010201, group=17)
    assert named.key(BLOCK) == b"m@02010201@11@" + BLOCK.hex().encode() + b"@tenant-a"
    assert ALONE == (1 << 24) | (1 << 8)  # a world of one


def test_layouts_have_names_of_their_own() -> None:
    one, other = LmcacheNames.of_layout(b"\x01" * 32), LmcacheNames.of_layout(b"\x01" * 15 + b"\x02" * 17)
    assert one.model == "lamina-kv1-" + "01" * 16
    assert one.key(BLOCK) != other.key(BLOCK)


@pytest.mark.parametrize("salt", ["a@b", "a/b", "a\\b", "a\0b", "x" * 129])
def test_what_lmcache_would_not_take_as_a_salt_is_refused(salt: str) -> None:
    with pytest.raises(ValueError, match="salt"):
        LmcacheNames("m", salt=salt)


@pytest.mark.parametrize(
    ("model", "kv_rank", "group"), [("", ALONE, 0), ("a@b", ALONE, 0), ("m", 2**32, 0), ("m", 1, -1)]
)
def test_no_names(model: str, kv_rank: int, group: int) -> None:
    with pytest.raises(ValueError, match=r"model|rank"):
        LmcacheNames(model, kv_rank=kv_rank, group=group)
