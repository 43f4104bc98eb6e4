"""Blocks move whole and exact, whatever they hold."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from lamina_kernels.gpu import blocks
from lamina_kernels.oracles import blocks as oracle
from support.kernel_numbers import DEVICE

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn]
SHAPES = [(7, 2, 1, 16, 1, 64), (5, 2, 3, 16, 3, 80), (4, 16)]  # one tile, or more and not full, or 16 bytes of fp8


def random_pool(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Any bits, NaN with payloads among them."""
    size = torch.empty(shape, dtype=dtype).view(torch.uint8).shape
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, size, dtype=torch.uint8, generator=generator).view(dtype).to(DEVICE)


def ids(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=DEVICE)


def assert_same_bits(ours: Tensor, theirs: Tensor) -> None:
    assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


each_pool = pytest.mark.parametrize(
    ("shape", "dtype"), [(shape, dtype) for shape in SHAPES[:2] for dtype in DTYPES] + [(SHAPES[2], DTYPES[3])], ids=str
)


@each_pool
def test_clear(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    pool = random_pool(shape, dtype)
    expected = pool.clone()
    blocks.clear_blocks(pool, ids(shape[0] - 1, -1, 0))
    oracle.clear_blocks(expected, ids(shape[0] - 1, -1, 0))
    assert_same_bits(pool, expected)
    assert not pool[0].view(torch.uint8).any()


@each_pool
def test_copy(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """One source may have several targets; an entry with -1 on either side is none."""
    pool = random_pool(shape, dtype)
    expected = pool.clone()
    last = shape[0] - 1
    blocks.copy_blocks(pool, ids(last, -1, last, 0), ids(1, 2, 0, -1))
    oracle.copy_blocks(expected, ids(last, -1, last, 0), ids(1, 2, 0, -1))
    assert_same_bits(pool, expected)
    assert_same_bits(pool[0], pool[last])


@each_pool
def test_gather_and_scatter(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    pool, other = random_pool(shape, dtype), random_pool(shape, dtype).flip(0).contiguous()
    chosen = ids(shape[0] - 1, -1, 1)
    out = torch.full((3, pool[0].numel()), torch.nan).to(dtype).to(DEVICE)
    expected = out.clone()
    blocks.gather_blocks(pool, chosen, out)
    oracle.gather_blocks(pool, chosen, expected)
    assert_same_bits(out, expected)
    target = other.clone()
    blocks.scatter_blocks(out, chosen, target)
    oracle.scatter_blocks(out, chosen, other)
    assert_same_bits(target, other)
    assert_same_bits(target[1], pool[1])


def test_staging_may_be_bytes() -> None:
    pool = random_pool(SHAPES[0], torch.float16)
    out = torch.zeros(1, pool[0].numel() * 2, dtype=torch.uint8, device=DEVICE)
    blocks.gather_blocks(pool, ids(3), out)
    assert_same_bits(out, pool[3].view(1, -1))


def test_nothing_to_do() -> None:
    pool = random_pool(SHAPES[0], torch.float16)
    expected = pool.clone()
    blocks.clear_blocks(pool, ids())
    blocks.clear_blocks(pool, ids(-1, -1))
    blocks.copy_blocks(pool, ids(), ids())
    blocks.gather_blocks(pool, ids(), pool[:0].view(0, 2048))
    assert_same_bits(pool, expected)


def test_pools_of_more_than_two_to_the_31_words() -> None:
    """Offsets are 64 bits wide. On a CPU the pool takes only the pages that are touched."""
    words = 2**16
    pool = torch.empty((2**31 // words + 2, words * 4), dtype=torch.uint8, device=DEVICE)
    last = len(pool) - 1
    pool[last], pool[1] = 7, 0
    blocks.copy_blocks(pool, ids(last), ids(1))
    assert (pool[1] == 7).all()


POOL = torch.zeros(4, 32, device=DEVICE)
ODD = torch.zeros(4, 3, device=DEVICE)


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: blocks.clear_blocks(POOL, ids(0).long()), TypeError),
        (lambda: blocks.clear_blocks(POOL, ids(0)[None]), ValueError),
        (lambda: blocks.clear_blocks(POOL, ids(0, 1, 2)[::2]), ValueError),
        (lambda: blocks.clear_blocks(POOL, ids(0).to("meta")), ValueError),
        (lambda: blocks.clear_blocks(POOL[:, ::2], ids(0)), ValueError),
        (lambda: blocks.clear_blocks(POOL[0], ids(0)), ValueError),
        (lambda: blocks.clear_blocks(ODD, ids(0)), ValueError),
        (lambda: blocks.clear_blocks(POOL.view(-1)[1:125].view(31, 4), ids(0)), ValueError),
        (lambda: blocks.copy_blocks(POOL, ids(0), ids(1, 2)), ValueError),
        (lambda: blocks.gather_blocks(POOL, ids(0), POOL.new_zeros(2, 32)), ValueError),
        (lambda: blocks.gather_blocks(POOL, ids(0), POOL.new_zeros(1, 16)), ValueError),
        (lambda: blocks.scatter_blocks(POOL.new_zeros(1, 32).to("meta"), ids(0), POOL), ValueError),
    ],
)
def test_what_is_refused(call: Callable[[], None], error: type[Exception]) -> None:
    with pytest.raises(error):
        call()
