"""The gated activation between the two halves of an MLP: out = activation(gate) * up.

    silu       g * sigmoid(g)
    gelu_tanh  g * sigmoid(2u),  u = sqrt(2 / pi) * (g + 0.044715 g³)      = g/2 * (1 + tanh(u)), as
                                                                           1 + tanh(u) = 2 * sigmoid(2u)

gate_up [T, 2 * inner] is the output of one fused projection: gate left, up right. Float32 inside, one rounding at the
end (eager code rounds the activation as well). It moves 3 * T * inner elements and nothing else; each program takes
BLOCK columns of one row with one 16-byte load a lane and half, so that a single decode row already spreads over the
chip.
"""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from lamina_kernels.gpu.compile_case import CompileCase
from lamina_kernels.gpu.tuned import GATED

__all__ = ["Activation", "compile_cases", "gated"]

Activation = Literal["silu", "gelu_tanh"]

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@triton.jit
def _sigmoid(x):
    small = tl.exp(-tl.abs(x))  # never overflows
    return tl.where(x < 0.0, small, 1.0) / (1.0 + small)


@triton.jit
def _silu(gate):
    return gate * _sigmoid(gate)


@triton.jit
def _gelu_tanh(gate):
    u = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)  # sqrt(2 / pi)
    return gate * _sigmoid(2.0 * u)


@triton.jit
def _gated_kernel(
    gate_up,  # [T, 2 * INNER], rows `stride` apart
    out,  # [T, INNER]
    stride,
    ACTIVATION: tl.constexpr,  # one of the two functions above
    INNER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i_row = tl.program_id(0).to(tl.int64)
    i_col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = i_col < INNER
    p_gate = gate_up + i_row * stride + i_col
    gate = tl.load(p_gate, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(p_gate + INNER, mask=mask, other=0.0).to(tl.float32)
    y = ACTIVATION(gate) * up
    tl.store(out + i_row * INNER + i_col, y.to(out.dtype.element_ty), mask=mask)


_ACTIVATIONS = {"silu": _silu, "gelu_tanh": _gelu_tanh}


def gated(gate_up: Tensor, activation: Activation) -> Tensor:
    """gate_up [T, 2 * inner] -> [T, inner], new and contiguous, of gate_up's dtype (fp16, bf16, fp32).

    Rows must be contiguous. Raises TypeError for a dtype, ValueError for a shape, a stride or an unknown activation.
    """
    if gate_up.dtype not in _DTYPES:
        raise TypeError(f"gate_up is fp16, bf16 or fp32, not {gate_up.dtype}")
    if gate_up.dim() != 2 or gate_up.shape[1] % 2 or gate_up.shape[1] == 0:
        raise ValueError(f"gate_up is [T, 2 * inner], not {tuple(gate_up.shape)}")
    if gate_up.stride(1) != 1:
        raise ValueError("the rows of gate_up must be contiguous")
    if activation not in _ACTIVATIONS:
        raise ValueError(f"no gated activation {activation!r}")
    rows, inner = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, inner), dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        _gated_kernel[(rows, triton.cdiv(inner, GATED.block))](
            gate_up,
            out,
            gate_up.stride(0),
            ACTIVATION=_ACTIVATIONS[activation],
            INNER=inner,
            BLOCK=GATED.block,
            num_warps=GATED.warps,
        )
    return out


def compile_cases() -> list[CompileCase]:
    """Llama-3-8B's MLP; Gemma's activation at the same width."""
    return [_case("silu", dtype) for dtype in ("bf16", "fp16", "fp32")] + [_case("gelu_tanh", "bf16")]


def _case(activation: Activation, dtype: str) -> CompileCase:
    constants = {"ACTIVATION": _ACTIVATIONS[activation], "INNER": 14336, "BLOCK": GATED.block}
    return CompileCase(
        name=f"gated/{activation}/{dtype}",
        kernel=_gated_kernel,
        signature={"gate_up": f"*{dtype}", "out": f"*{dtype}", "stride": "i32"} | dict.fromkeys(constants, "constexpr"),
        constants=constants,
        divisible=("gate_up", "out", "stride"),
        num_warps=GATED.warps,
    )
