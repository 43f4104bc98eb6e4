"""The array beside a block table."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lamina.engine.request import BlockTable

CHANGES = st.lists(
    st.one_of(
        st.tuples(st.just("extend"), st.lists(st.integers(0, 99), max_size=40)),
        st.tuples(st.just("replace"), st.tuples(st.integers(0, 200), st.integers(0, 99))),
        st.tuples(st.just("read"), st.none()),
    )
)


@given(st.lists(st.integers(0, 99), max_size=20), CHANGES)
def test_the_array_follows_the_list(first: list[int], changes: list[tuple[str, object]]) -> None:
    """Whatever is appended or replaced, and whenever it is read."""
    table, plain = BlockTable(first), list(first)
    for kind, what in changes:
        if kind == "extend":
            assert isinstance(what, list)
            table += what
            plain += what
        elif kind == "replace" and plain:
            assert isinstance(what, tuple)
            table.replace(what[0] % len(plain), what[1])
            plain[what[0] % len(plain)] = what[1]
        else:
            assert table.array().tolist() == plain
    assert table == plain
    assert table.array().tolist() == plain
