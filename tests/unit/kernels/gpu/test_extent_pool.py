"""What the pool of extents promises at its edges."""

from __future__ import annotations

import pytest

from lamina_kernels.gpu.extent_pool import ExtentPool, Move, PoolCorrupt
from lamina_kernels.gpu.lora_layout import ALIGN


def test_the_smallest_hole_that_fits_is_taken() -> None:
    pool = ExtentPool(10 * ALIGN)
    first, _, third, _ = (pool.allocate(n * ALIGN) for n in (3, 1, 2, 1))
    assert (first, third) == (0, 4 * ALIGN)
    pool.free(0)
    pool.free(4 * ALIGN)
    assert pool.allocate(2 * ALIGN) == 4 * ALIGN
    assert pool.allocate(1) == 0


def test_neighbouring_holes_are_one() -> None:
    pool = ExtentPool(4 * ALIGN)
    for _ in range(4):
        pool.allocate(ALIGN)
    pool.free(ALIGN)
    pool.free(2 * ALIGN)
    assert pool.allocate(2 * ALIGN) == ALIGN


def test_full_and_empty_pools() -> None:
    assert ExtentPool(0).allocate(1) is None
    assert ExtentPool(ALIGN - 1).allocate(1) is None
    pool = ExtentPool(ALIGN)
    assert pool.allocate(ALIGN) == 0
    assert pool.allocate(1) is None
    assert pool.compaction() == []


@pytest.mark.parametrize("elements", [0, -1])
def test_an_extent_has_elements(elements: int) -> None:
    with pytest.raises(ValueError, match="at least 1 element"):
        ExtentPool(ALIGN).allocate(elements)


def test_a_negative_capacity_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot be negative"):
        ExtentPool(-1)


def test_only_what_was_allocated_can_be_freed() -> None:
    pool = ExtentPool(4 * ALIGN)
    pool.allocate(2 * ALIGN)
    with pytest.raises(KeyError):
        pool.free(ALIGN)
    pool.free(0)
    with pytest.raises(KeyError):
        pool.free(0)


def test_moves_in_pieces() -> None:
    """Pieces cover the move; one shorter than the distance does not overlap itself."""
    move = Move(source=10, target=6, length=11)
    assert move.overlaps
    assert list(move.pieces(4)) == [Move(10, 6, 4), Move(14, 10, 4), Move(18, 14, 3)]
    assert not any(piece.overlaps for piece in move.pieces(4))
    assert all(piece.overlaps for piece in move.pieces(5) if piece.length == 5)


def test_corruption_is_found() -> None:
    pool = ExtentPool(4 * ALIGN)
    pool.allocate(2 * ALIGN)
    pool._lengths[0] = 5 * ALIGN
    with pytest.raises(PoolCorrupt, match="extents end"):
        pool.check_integrity()
