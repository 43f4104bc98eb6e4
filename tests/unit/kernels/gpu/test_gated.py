"""Gated activations, against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from lamina_kernels.gpu.gated import Activation, gated
from lamina_kernels.oracles import gated as oracle
from support.kernel_numbers import DTYPES, assert_rounded, noise

ACTIVATIONS: list[Activation] = ["silu", "gelu_tanh"]


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that a kernel forgets to write is NaN."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: empty(*args, **kwargs).fill_(torch.nan))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("tokens", "inner"), [(1, 14336), (3, 1536), (5, 40), (3, 1)])
def test_values(tokens: int, inner: int, activation: Activation, dtype: torch.dtype) -> None:
    gate_up = noise(tokens, 2 * inner, dtype=dtype) * 4
    y = gated(gate_up, activation)
    assert y.dtype == dtype
    exact = oracle.gated(gate_up.double(), activation)
    # Beside the product: far left, silu and gelu are tiny differences of large exponents.
    assert_rounded(y, exact, scale=exact.abs() + 0.1)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_far_out_values_neither_overflow_nor_vanish(activation: Activation) -> None:
    gate = torch.tensor([-1e12, -1e5, -100.0, -0.0, 0.0, 100.0, 1e5, 1e12])
    y = gated(torch.cat((gate, torch.ones(8)))[None].to(noise(1).device), activation)[0].cpu()
    assert torch.equal(y[5:], gate[5:])
    assert (y[:5].abs() < 1e-30).all()


def test_a_row_is_the_same_bits_in_every_batch() -> None:
    x = noise(5, 2 * 1100, dtype=torch.float16)
    together = gated(x, "silu")
    for row in (0, 2, 4):
        assert torch.equal(gated(x[row : row + 1], "silu")[0], together[row])
    assert torch.equal(gated(x.flip(0), "silu"), together.flip(0))


def test_strided_rows_and_none() -> None:
    x = noise(3, 200)
    assert torch.equal(gated(x[:, 20:84], "silu"), gated(x[:, 20:84].contiguous(), "silu"))
    assert gated(x[:0], "silu").shape == (0, 100)


@pytest.mark.parametrize(
    ("gate_up", "activation", "error"),
    [
        (torch.ones(2, 8, dtype=torch.float64), "silu", TypeError),
        (torch.ones(2, 7), "silu", ValueError),
        (torch.ones(2, 0), "silu", ValueError),
        (torch.ones(8), "silu", ValueError),
        (torch.ones(8, 2).t(), "silu", ValueError),
        (torch.ones(2, 8), "relu", ValueError),
    ],
)
def test_what_is_refused(gate_up: Tensor, activation: Activation, error: type[Exception]) -> None:
    with pytest.raises(error):
        gated(gate_up, activation)
