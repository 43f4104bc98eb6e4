"""One correctness check: a kernel and its float64 oracle on the same arguments, and the kernel twice, bit for bit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from gpu_report import ERROR, Figure
from gpu_setup import DEVICE, ON_GPU

__all__ = ["DTYPES", "TOLERANCE", "Call", "check", "compare", "noise", "poisoned", "short"]

DTYPES: tuple[torch.dtype, ...] = (
    (torch.bfloat16, torch.float16, torch.float32) if ON_GPU else (torch.float16, torch.float32)
)
"""The interpreter computes bfloat16 wrongly, so the CPU's form leaves it out."""

TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 2e-5}
"""Largest error over the largest value: a few roundings of each type."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """`launch(*arguments, **options)` against `oracle` of the same signature.

    Compared is what they return and the arguments numbered in `written`. Those may hold NaN where nothing is written:
    it must still be there afterwards.
    """

    name: str
    launch: Callable[..., Any]
    oracle: Callable[..., Any]
    arguments: Sequence[Any]
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    written: tuple[int, ...] = ()
    tolerance: float | None = None  # None: by the dtype that is compared; 0: equal bits


def short(dtype: torch.dtype) -> str:
    return {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[dtype]


def noise(*shape: int, dtype: torch.dtype, seed: int = 0, scale: float = 1.0) -> Tensor:
    """Signed random numbers on the device, the same for a seed."""
    generator = torch.Generator(device=DEVICE).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=DEVICE, dtype=torch.float32).mul_(scale).to(dtype)


def poisoned(*shape: int, dtype: torch.dtype) -> Tensor:
    """All NaN: whatever a kernel fails to write shows."""
    return torch.full(shape, float("nan"), dtype=dtype, device=DEVICE)


def check(call: Call) -> Iterable[Figure]:
    """Raises AssertionError with the place of the largest error."""
    again, reference = _copied(call.arguments, DEVICE), _copied(call.arguments, torch.device("cpu"))
    results = _outputs(call, call.launch, call.arguments)
    # The interpreter runs programs in order, so a second run there would prove nothing.
    repeated = _outputs(call, call.launch, again) if ON_GPU else results
    expected = _outputs(call, call.oracle, reference)
    worst = 0.0
    for number, (found, second, wanted) in enumerate(zip(results, repeated, expected, strict=True)):
        assert _same_bits(found, second), f"output {number} differs between two equal launches"
        worst = max(worst, compare(found, wanted, call.tolerance, f"output {number}"))
    return [Figure(name=call.name, unit=ERROR, measured=float(f"{worst:.3g}"))]


def compare(found: Tensor, wanted: Tensor, tolerance: float | None, what: str) -> float:
    """The largest error over the largest value. Raises AssertionError if it is above the tolerance or NaNs differ."""
    assert found.shape == wanted.shape, f"{what}: shape {tuple(found.shape)}, not {tuple(wanted.shape)}"
    limit = TOLERANCE.get(found.dtype, 0.0) if tolerance is None else tolerance
    a, b = found.detach().cpu().double(), wanted.detach().cpu().double()
    if not a.numel():
        return 0.0
    missing = torch.isnan(a) != torch.isnan(b)
    assert not bool(missing.any()), f"{what}: {int(missing.sum())} elements are NaN on one side only"
    finite = torch.isfinite(b)
    assert torch.equal(a[~finite & ~torch.isnan(b)], b[~finite & ~torch.isnan(b)]), f"{what}: infinities differ"
    error = torch.where(finite, (a - b).abs(), 0.0)
    scale = float(torch.where(finite, b.abs(), 0.0).max()) or 1.0
    worst = float(error.max()) / scale
    place = int(error.argmax())
    assert worst <= limit, f"{what}: error {worst:.2e} of the largest value, at most {limit:.0e}, at element {place}"
    return worst


def _outputs(call: Call, function: Callable[..., Any], arguments: Sequence[Any]) -> list[Tensor]:
    options = call.options
    if function is call.oracle:
        options = {name: _copy(value, torch.device("cpu")) for name, value in options.items()}
    returned = function(*arguments, **options)
    return [*_tensors(returned), *(tensor for number in call.written for tensor in _tensors(arguments[number]))]


def _tensors(value: Any) -> list[Tensor]:
    """One, none, those of a sequence, or those of a dataclass, in order."""
    if value is None:
        return []
    if isinstance(value, Tensor):
        return [value]
    if dataclasses.is_dataclass(value):
        value = [getattr(value, field.name) for field in dataclasses.fields(value)]
    return [item for item in value if isinstance(item, Tensor)]


def _copied(arguments: Sequence[Any], device: torch.device) -> list[Any]:
    return [_copy(value, device) for value in arguments]


def _copy(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device, copy=True)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        tensors = {
            field.name: _copy(getattr(value, field.name), device)
            for field in dataclasses.fields(value)
            if field.init and isinstance(getattr(value, field.name), Tensor)
        }
        return dataclasses.replace(value, **tensors) if tensors else value
    return value


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
