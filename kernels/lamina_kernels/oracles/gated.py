"""Gated activations by their formulas, in float64."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

__all__ = ["gated"]


def gated(gate_up: Tensor, activation: Literal["silu", "gelu_tanh"]) -> Tensor:
    """As `lamina_kernels.gpu.gated.gated`."""
    gate, up = gate_up.double().chunk(2, dim=-1)
    if activation == "silu":
        active = gate * torch.sigmoid(gate)
    else:
        active = 0.5 * gate * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (gate + 0.044715 * gate**3)))
    return (active * up).to(gate_up.dtype)
