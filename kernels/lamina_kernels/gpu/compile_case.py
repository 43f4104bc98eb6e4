"""What to compile ahead of time: one kernel under one tuned configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["CompileCase"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileCase:
    """Everything that Triton's compiler needs in place of real arguments."""

    name: str  # unique, e.g. "lora_shrink/decode/bf16"
    kernel: Any  # a function decorated with triton.jit
    signature: Mapping[str, str]  # every argument in order: "*bf16", "i32", "fp32", "constexpr"
    constants: Mapping[str, object]  # values of the constexpr arguments
    divisible: tuple[str, ...] = ()  # pointers and integers that are multiples of 16, as at run time
    num_warps: int = 4
    num_stages: int = 3
    tensor_cores: bool = False  # the machine code must hold matrix instructions (wgmma, mma, tcgen05, mfma)
    vector_loads: bool = True  # the machine code must load 16 bytes at once
