"""Block identity for all inputs: injective fields, chunking that does not matter, histories that do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from hypothesis import assume, given
from hypothesis import strategies as st

from lamina_kvtier import IdentityChain, Layout, child_id, identity, root_id

numbers = st.integers(1, 2**40)
texts = st.text(min_size=1, max_size=12)
# Few and tricky characters: digests that look like other fields, like lengths or like "no adapter".
tricky = st.text(alphabet="\x00\x01\x02a1", min_size=1, max_size=6)
layouts = st.builds(
    Layout, layers=numbers, kv_heads=numbers, head_dim=numbers, dtype=tricky, block_size=numbers, rope=tricky
)
tokens = st.integers(0, 2**32 - 1)
ROOT = bytes(32)


@dataclass(frozen=True)
class Fields:
    """Everything a root depends on."""

    model_digest: str
    layout: Layout
    adapter: str | None
    namespace: str

    def root(self) -> bytes:
        return root_id(
            model_digest=self.model_digest,
            layout=self.layout,
            adapter=self.adapter,
            namespace=self.namespace,
        )


fields = st.builds(
    Fields,
    model_digest=tricky | texts,
    layout=layouts,
    adapter=st.none() | tricky | texts,
    namespace=tricky | texts,
)

changes: dict[str, Callable[[Fields, Any], Fields]] = {
    "model_digest": lambda f, v: replace(f, model_digest=v),
    "namespace": lambda f, v: replace(f, namespace=v),
    "adapter": lambda f, v: replace(f, adapter=v),
    "dtype": lambda f, v: replace(f, layout=replace(f.layout, dtype=v)),
    "rope": lambda f, v: replace(f, layout=replace(f.layout, rope=v)),
    "layers": lambda f, v: replace(f, layout=replace(f.layout, layers=v)),
    "kv_heads": lambda f, v: replace(f, layout=replace(f.layout, kv_heads=v)),
    "head_dim": lambda f, v: replace(f, layout=replace(f.layout, head_dim=v)),
    "block_size": lambda f, v: replace(f, layout=replace(f.layout, block_size=v)),
}


@given(fields, st.sampled_from(sorted(changes)), st.data())
def test_any_changed_field_changes_every_identity(one: Fields, field: str, data: st.DataObject) -> None:
    """Another model, adapter, namespace or layout can never match, at any depth of the chain."""
    is_number = field in ("layers", "kv_heads", "head_dim", "block_size")
    other = changes[field](one, data.draw(numbers if is_number else tricky))
    assume(other != one)
    assert one.root() != other.root()
    assert child_id(one.root(), [1, 2]) != child_id(other.root(), [1, 2])


@given(fields, fields)
def test_roots_are_equal_only_for_equal_fields(one: Fields, other: Fields) -> None:
    """No two different descriptions spell the same bytes, however their fields are cut."""
    assert (one.root() == other.root()) == (one == other)


@given(tricky, tricky, st.integers(0, 12))
def test_text_cannot_move_between_neighbouring_fields(left: str, right: str, cut: int) -> None:
    """ "ab" + "c" and "a" + "bc" are different: each field carries its length."""
    joined = left + right
    assume(0 < cut < len(joined))
    layout = Layout(1, 1, 1, "d", 1, "r")
    one = root_id(model_digest="m", layout=layout, adapter=left, namespace=right)
    other = root_id(model_digest="m", layout=layout, adapter=joined[:cut], namespace=joined[cut:])
    assert (one == other) == (cut == len(left))
    spelled = {Layout(1, 1, 1, left, 1, right), Layout(1, 1, 1, joined[:cut], 1, joined[cut:])}
    roots = {root_id(model_digest="m", layout=each, adapter=None, namespace="n") for each in spelled}
    assert len(roots) == len(spelled)


@given(st.lists(tokens, max_size=64), st.integers(1, 9), st.lists(st.integers(0, 64), max_size=6))
def test_chunking_never_changes_identities(ids: list[int], block_size: int, cuts: list[int]) -> None:
    """Prefill chunks, single decode tokens or all at once: the same tokens give the same chain."""
    whole = IdentityChain(ROOT, block_size)
    whole.extend(ids)
    pieces = IdentityChain(ROOT, block_size)
    for start, stop in pairwise(sorted([0, *cuts, len(ids)])):
        pieces.extend(ids[start:stop])
    by_hand, parent = [], ROOT
    for start in range(0, len(ids) - block_size + 1, block_size):
        parent = child_id(parent, ids[start : start + block_size])
        by_hand.append(parent)
    assert whole.ids == pieces.ids == by_hand
    assert len(whole) == len(pieces) == len(ids)


@given(
    st.lists(st.integers(0, 2), max_size=24),
    st.lists(st.integers(0, 2), max_size=24),
    st.integers(1, 4),
)
def test_chains_agree_exactly_as_far_as_their_tokens(one: list[int], other: list[int], block_size: int) -> None:
    """Equal identities for common full blocks, different ones ever after, also where tokens meet again."""
    first, second = IdentityChain(ROOT, block_size), IdentityChain(ROOT, block_size)
    first.extend(one)
    second.extend(other)
    for at, (left, right) in enumerate(zip(first.ids, second.ids, strict=False)):
        stop = (at + 1) * block_size
        assert (left == right) == (one[:stop] == other[:stop])
    assert len(set(first.ids)) == len(first.ids)


@given(st.lists(tokens, min_size=1, max_size=40), st.integers(1, 5), st.integers(0, 40))
def test_a_copy_continues_like_the_original(ids: list[int], block_size: int, cut: int) -> None:
    """A fork in mid-block has the same future and does not disturb the other."""
    original = IdentityChain(ROOT, block_size)
    original.extend(ids[:cut])
    twin = original.copy()
    original.extend(ids[cut:])
    original.extend([7] * block_size)
    twin.extend(ids[cut:])
    twin.extend([7] * block_size)
    assert twin.ids == original.ids


@given(st.lists(tokens, min_size=1, max_size=8))
def test_roots_and_blocks_live_in_different_worlds(ids: list[int]) -> None:
    """An identity is 32 bytes and depends on its parent."""
    layout = Layout(1, 1, 1, "d", 1, "r")
    root = root_id(model_digest="m", layout=layout, adapter=None, namespace="n")
    assert len(root) == len(child_id(root, ids)) == identity.ID_BYTES
    assert child_id(root, ids) != child_id(child_id(root, ids), ids)
