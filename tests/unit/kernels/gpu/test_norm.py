"""RMS norm and its fusion with the residual sum, against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from lamina_kernels.gpu.norm import MAX_DIM, add_rms_norm, rms_norm
from lamina_kernels.oracles import norm as oracle
from support.kernel_numbers import DEVICE, DTYPES, assert_rounded, noise

EPS = 1e-5
# Programs are what the interpreter is slow at; narrow rows share one, so the many tokens are narrow.
ROWS = [(1, 576), (3, 1536), (129, 64), (63, 37), (2, 4096), (1, MAX_DIM), (3, 1), (1, 8191)]
HEADS = [(1, 40, 128), (3, 12, 64), (3, 3, 96), (3, 2, 80), (1, 1, 256)]


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that a kernel forgets to write is NaN."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: empty(*args, **kwargs).fill_(torch.nan))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "dim"), ROWS)
def test_rows(rows: int, dim: int, dtype: torch.dtype) -> None:
    x, weight = noise(rows, dim, dtype=dtype), noise(dim, seed=1)
    y = rms_norm(x, weight, EPS)
    assert y.dtype == dtype
    assert_rounded(y, oracle.rms_norm(x.double(), weight, EPS))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shared", [False, True], ids=["own weights", "one weight"])
@pytest.mark.parametrize(("tokens", "heads", "dim"), HEADS)
def test_heads_inside_a_fused_projection(tokens: int, heads: int, dim: int, shared: bool, dtype: torch.dtype) -> None:
    """Query and key heads are a strided view, and may have a weight each."""
    x = noise(tokens, heads + 3, dim, dtype=dtype)[:, 1 : heads + 1]
    weight = noise(dim, seed=1) if shared else noise(heads, dim, seed=1)
    y = rms_norm(x, weight, EPS)
    assert y.is_contiguous()
    assert_rounded(y, oracle.rms_norm(x.double(), weight, EPS))


def test_one_vector_and_no_rows() -> None:
    x, weight = noise(64), noise(64, seed=1)
    assert_rounded(rms_norm(x, weight, EPS), oracle.rms_norm(x.double(), weight, EPS))
    assert rms_norm(noise(0, 64), weight, EPS).shape == (0, 64)
    assert add_rms_norm(noise(0, 64), noise(0, 64), weight, EPS).shape == (0, 64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "dim"), ROWS)
def test_the_residual_sum_is_rounded_before_the_norm(rows: int, dim: int, dtype: torch.dtype) -> None:
    """h has the same bits as after h.add_(delta), and the norm is that of these bits."""
    h, delta, weight = noise(rows, dim, dtype=dtype), noise(rows, dim, dtype=dtype, seed=1), noise(dim, seed=2)
    summed = h + delta
    y = add_rms_norm(h, delta, weight, EPS)
    assert torch.equal(h, summed)
    assert_rounded(y, oracle.rms_norm(summed.double(), weight, EPS))


def test_only_the_rows_of_a_strided_residual_change() -> None:
    buffer = noise(3, 2, 576)
    before = buffer.clone()
    delta = noise(3, 3, 576, seed=1)[:, 1]
    add_rms_norm(buffer[:, 0], delta, noise(576), EPS)
    assert torch.equal(buffer[:, 0], before[:, 0] + delta)
    assert torch.equal(buffer[:, 1], before[:, 1])


def test_large_and_empty_rows() -> None:
    """Squares beyond fp16 do not overflow; a row of zeros gives zeros; NaN stays in its own row of a shared tile."""
    x = noise(4, 64, dtype=torch.float16)
    x[0], x[1], x[2] = 60000, 0, torch.nan
    y = rms_norm(x, torch.ones(64, device=DEVICE), EPS)
    assert torch.equal(y[0], torch.ones_like(y[0]))
    assert torch.equal(y[1], torch.zeros_like(y[1]))
    assert y[2].isnan().all()
    assert y[3].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [64, 576])
def test_a_row_is_the_same_bits_in_every_batch(dim: int, dtype: torch.dtype) -> None:
    """Alone, among others, elsewhere: narrow rows share a program, which must not show."""
    rows = 2048 // dim
    x, delta, weight = noise(rows, dim, dtype=dtype), noise(rows, dim, dtype=dtype, seed=1), noise(dim, seed=2)
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    together, moved = rms_norm(x, weight, EPS), rms_norm(x[order], weight, EPS)
    fused = add_rms_norm(x.clone(), delta, weight, EPS)
    assert torch.equal(moved, together[order])
    for row in (0, rows // 2, rows - 1):
        one = slice(row, row + 1)
        assert torch.equal(rms_norm(x[one], weight, EPS), together[one])
        assert torch.equal(add_rms_norm(x[one].clone(), delta[one], weight, EPS), fused[one])


ONES = torch.ones(8)


@pytest.mark.parametrize(
    ("x", "weight", "error"),
    [
        (torch.ones(2, 8, dtype=torch.float64), ONES, TypeError),
        (torch.ones(2, 8), ONES.half(), TypeError),
        (torch.ones(2, 7), ONES, ValueError),
        (torch.ones(8, 2).t(), ONES, ValueError),
        (torch.ones(2, 8), torch.ones(16)[::2], ValueError),
        (torch.ones(2, 3, 8), torch.ones(2, 8), ValueError),
        (torch.ones(2, 8), torch.ones(2, 8), ValueError),
        (torch.ones(1, 1, 1, 8), ONES, ValueError),
        (torch.ones(()), ONES, ValueError),
        (torch.ones(2, 0), torch.ones(0), ValueError),
        (torch.ones(1, MAX_DIM + 1), torch.ones(MAX_DIM + 1), ValueError),
        (torch.ones(2, 8, device="meta"), ONES, ValueError),
    ],
)
def test_what_the_norm_refuses(x: Tensor, weight: Tensor, error: type[Exception]) -> None:
    with pytest.raises(error):
        rms_norm(x, weight, EPS)


@pytest.mark.parametrize(
    ("h", "delta", "error"),
    [
        (torch.ones(2, 8), torch.ones(2, 8).half(), TypeError),
        (torch.ones(2, 8), torch.ones(3, 8), ValueError),
        (torch.ones(1, 2, 8), torch.ones(1, 2, 8), ValueError),
        (torch.ones(2, 8), torch.ones(8, 2).t(), ValueError),
    ],
)
def test_what_the_fused_norm_refuses(h: Tensor, delta: Tensor, error: type[Exception]) -> None:
    with pytest.raises(error):
        add_rms_norm(h, delta, ONES, EPS)
