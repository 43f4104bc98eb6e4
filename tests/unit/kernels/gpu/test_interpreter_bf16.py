"""Triton's interpreter computes bfloat16 wrongly, so no test may rely on it.

It keeps bfloat16 as 16-bit integers and multiplies those. Kernels are therefore tested in float16 and float32, and in
bfloat16 only compiled (`test_aot.py`) and on a GPU (`tests/gpu`). If a test here fails, triton has mended it: delete
this file, and give bfloat16 to the kernels' tests.
"""

from __future__ import annotations

import pytest
import torch

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

SIZE = 16

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here, not interpreted")


@triton.jit
def multiply(x, y, out, SIZE: tl.constexpr, WIDE: tl.constexpr):
    at = tl.arange(0, SIZE)
    b_x = tl.load(x + at)
    b_y = tl.load(y + at)
    if WIDE:
        b_x = b_x.to(tl.float32)
        b_y = b_y.to(tl.float32)
    tl.store(out + at, (b_x * b_y).to(tl.float32))


@triton.jit
def dot(x, y, out, SIZE: tl.constexpr, WIDE: tl.constexpr):
    at = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    b_x = tl.load(x + at)
    b_y = tl.load(y + at)
    if WIDE:
        b_x = b_x.to(tl.float32)
        b_y = b_y.to(tl.float32)
    tl.store(out + at, tl.dot(b_x, b_y, input_precision="ieee"))


def errors(dtype: torch.dtype, wide: bool) -> tuple[float, float]:
    """Largest error of a product and of a matrix product of small whole numbers, which every dtype holds exactly."""
    x = torch.arange(-8, 8).repeat(SIZE, 1).to(dtype)
    y = torch.full((SIZE, SIZE), 3).to(dtype)
    product, matrix = torch.empty(SIZE), torch.empty(SIZE, SIZE)
    multiply[(1,)](x[0], y[0], product, SIZE, wide)
    dot[(1,)](x, y, matrix, SIZE, wide)
    return (
        float((product - x[0].float() * y[0].float()).abs().max()),
        float((matrix - x.float() @ y.float()).abs().max()),
    )


def test_bf16_is_wrong() -> None:
    assert min(errors(torch.bfloat16, wide=False)) > 1.0


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_types_are_exact(dtype: torch.dtype) -> None:
    assert errors(dtype, wide=False) == (0.0, 0.0)


def test_bf16_is_exact_once_widened() -> None:
    """Loads, stores and casts are right: only arithmetic on bfloat16 itself is not."""
    assert errors(torch.bfloat16, wide=True) == (0.0, 0.0)
