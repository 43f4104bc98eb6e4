"""The parts of a layer against torch's own."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fixtures.dense import DenseAttend
from lamina.models.config import ModelConfig
from lamina.models.layers import GATED, RmsNorm, linear
from lamina.models.loader import random_model
from lamina.models.rope import Rope, inverse_frequencies
from lamina.models.rope_config import RopeConfig


def noise(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("rows", [0, 1, 2, 7, 33, 300])
@pytest.mark.parametrize(("inputs", "outputs"), [(1, 1), (16, 48), (48, 17), (65, 130)])
@pytest.mark.parametrize("with_bias", [False, True], ids=["plain", "bias"])
def test_linear_is_torchs(rows: int, inputs: int, outputs: int, with_bias: bool) -> None:
    """Whatever layout it chose; no rows at all is a legal batch."""
    weight, x = noise(outputs, inputs), noise(rows, inputs, seed=1)
    bias = noise(outputs, seed=2) if with_bias else None
    torch.testing.assert_close(linear(weight.clone(), bias)(x), F.linear(x, weight, bias), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_linear_reads_rows_with_gaps(dtype: torch.dtype) -> None:
    weight, wide = noise(24, 16, dtype=dtype), noise(5, 40, dtype=dtype, seed=1)
    x = wide[:, 8:24]
    torch.testing.assert_close(linear(weight.clone(), None)(x), F.linear(x.contiguous(), weight))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("scale", [1e-4, 1.0, 200.0])
def test_rms_norm_is_torchs(dtype: torch.dtype, scale: float) -> None:
    """Also where squares of 16-bit values would overflow or vanish."""
    x, weight = noise(5, 64, dtype=dtype) * scale, noise(64, seed=1)
    expected = F.rms_norm(x.double(), (64,), weight.double(), 1e-6)
    actual = RmsNorm(weight, 1e-6)(x)
    assert actual.dtype == dtype
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}[dtype]
    torch.testing.assert_close(actual.double(), expected, atol=tolerance, rtol=tolerance)


def test_rms_norm_leaves_its_input_alone() -> None:
    x = noise(3, 8)
    before = x.clone()
    RmsNorm(torch.full((8,), 2.0), 1e-6)(x)
    assert torch.equal(x, before)


def test_rms_norm_of_nothing_is_nothing() -> None:
    """An all-zero row stays zero: eps keeps the division sound."""
    assert torch.equal(RmsNorm(torch.ones(4), 1e-6)(torch.zeros(2, 4)), torch.zeros(2, 4))


def test_gates() -> None:
    x = noise(3, 10)
    torch.testing.assert_close(GATED["silu"](x), F.silu(x[:, :5]) * x[:, 5:])
    torch.testing.assert_close(GATED["gelu_tanh"](x), F.gelu(x[:, :5], approximate="tanh") * x[:, 5:])


def test_rotation_depends_on_distance_only() -> None:
    """q at i and k at j score alike wherever the pair stands: what makes cached keys reusable."""
    rope = Rope(RopeConfig(theta=10_000.0), 16, torch.float32, torch.device("cpu"))

    def score(i: int, j: int) -> float:
        q, k = noise(1, 1, 16, seed=1), noise(1, 1, 16, seed=2)
        rope.at(torch.tensor([i]))(q)
        rope.at(torch.tensor([j]))(k)
        return float((q * k).sum())

    assert score(9, 4) == pytest.approx(score(105, 100), abs=1e-4)
    assert score(9, 4) != pytest.approx(score(9, 5), abs=1e-2)


def test_rotation_reaches_views_of_a_fused_projection() -> None:
    """In place, the addressed heads only."""
    fused = noise(3, 5, 8)
    before = fused.clone()
    Rope(RopeConfig(theta=100.0), 8, torch.float32, torch.device("cpu")).at(torch.tensor([0, 1, 2]))(fused[:, :4])
    assert torch.equal(fused[0], before[0]), "position 0 does not rotate"
    assert torch.equal(fused[:, 4], before[:, 4])
    assert not torch.allclose(fused[1:, :4], before[1:, :4])
    torch.testing.assert_close(fused.norm(dim=-1), before.norm(dim=-1))


def test_llama3_scaling_slows_long_waves_only() -> None:
    plain = inverse_frequencies(RopeConfig(theta=500_000.0), 128)
    scaled = inverse_frequencies(RopeConfig(theta=500_000.0, kind="llama3", factor=8.0), 128)
    assert torch.equal(scaled[:10], plain[:10])
    torch.testing.assert_close(scaled[-10:], plain[-10:] / 8.0)
    assert bool((scaled.diff() < 0).all())


def test_no_rows_give_no_logits() -> None:
    """A step may hold nothing but unfinished prefill chunks: then no row asks for logits."""
    config = ModelConfig.from_dict(
        {
            "architectures": ["Gemma2ForCausalLM"],
            "vocab_size": 41,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 8,
            "max_position_embeddings": 64,
        }
    )
    model = random_model(config, 1, torch.float32, torch.device("cpu"))
    hidden = model.forward(torch.tensor([1, 2]), torch.arange(2), DenseAttend(), None)
    assert model.logits(hidden[:0]).shape == (0, 41)
