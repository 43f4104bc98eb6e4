"""How large everything is: Llama-3-8B on a GPU; on a CPU, through the interpreter, as small as proves that it runs."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from gpu_setup import ON_GPU
from shapes import PRESETS, Shape

__all__ = ["FULL", "SMALL", "Scale", "chosen"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Sizes of the timings."""

    shape: Shape
    dtype: torch.dtype
    layers: int  # timed by the LoRA sweep, then scaled to all of them: far more weights than any L2 holds
    adapters: tuple[int, ...]
    ranks: tuple[str, ...]
    decode: tuple[int, ...]  # rows
    prefill: tuple[int, ...]  # tokens
    attention: tuple[tuple[int, int], ...]  # (sequences, context)
    prompts: tuple[tuple[int, int], ...]  # (tokens, prefix)
    rows: tuple[int, ...]  # of the kernels that move rows, and of sampling
    blocks: int  # moved between tiers at once
    copy_mib: int
    fused_slots: int  # the fused plan is for few slots


FULL = Scale(
    shape=PRESETS["llama-3-8b"],
    dtype=torch.bfloat16,
    layers=8,
    adapters=(1, 8, 32, 64),
    ranks=("8", "16", "64", "mixed"),
    decode=(1, 2, 4, 8, 16, 32, 64, 128, 256),
    prefill=(512, 1024, 2048, 4096, 8192),
    attention=((1, 1024), (1, 8192), (8, 4096), (32, 2048), (64, 1024), (64, 4096), (256, 1024)),
    prompts=((512, 0), (2048, 0), (8192, 0), (512, 7680)),
    rows=(1, 64, 256, 2048),
    blocks=128,
    copy_mib=1024,
    fused_slots=8,
)

SMALL = Scale(
    shape=Shape(name="tiny", layers=1, hidden=64, inner=96, heads=4, kv_heads=2, head_dim=64, vocab=211, tied=False),
    dtype=torch.float32,
    layers=1,
    adapters=(2,),
    ranks=("8",),
    decode=(2,),
    prefill=(9,),
    attention=((1, 20),),
    prompts=((9, 3),),
    rows=(2,),
    blocks=2,
    copy_mib=1,
    fused_slots=3,
)


def chosen(*, quick: bool) -> Scale:
    """`quick` on a GPU keeps the shapes but thins the sweeps."""
    if not ON_GPU:
        return SMALL
    if not quick:
        return FULL
    return replace(FULL, adapters=(1, 32), ranks=("16",), decode=(1, 32), prefill=(2048,), rows=(64,))
