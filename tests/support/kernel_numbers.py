"""Where kernels are tested, and how exact they must be: on the GPU if there is one, else interpreted on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["DEVICE", "DTYPES", "assert_rounded", "noise"]

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float16, torch.float32]
if DEVICE.type == "cuda":
    DTYPES.append(torch.bfloat16)  # which the interpreter computes wrongly


def noise(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Normal numbers of both signs, the same on every device."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def assert_rounded(actual: Tensor, exact: Tensor, *, scale: Tensor | None = None) -> None:
    """actual is `exact` (float64) after float32 arithmetic and one rounding.

    scale: the size of the terms that were added, where they may cancel each other.
    """
    assert exact.dtype == torch.float64
    size = exact.abs() if scale is None else scale.double()
    smallest = torch.finfo(actual.dtype).smallest_normal * torch.finfo(actual.dtype).eps
    bound = 0.5 * torch.finfo(actual.dtype).eps * exact.abs() + 2e-6 * size + smallest
    error = (actual.double() - exact).abs()
    assert bool((error <= bound).all()), f"off by {(error / bound).max():.2f} of what is allowed"
