"""Calls of the kernels that only move rows: norms, gate, rotary embedding + KV write, block copies."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from gpu_case import Call, noise, poisoned, short
from gpu_setup import DEVICE, ON_GPU

__all__ = ["calls"]

HIDDEN, INNER, HEADS, KV_HEADS, DIM = (4096, 14336, 32, 8, 128) if ON_GPU else (72, 40, 3, 1, 64)
ROWS = (1, 3, 129) if ON_GPU else (3,)
LAYERS, BLOCKS, BLOCK_SIZE = 2, 8, 16
FP8 = torch.float8_e4m3fn


def calls(dtype: torch.dtype) -> Iterator[Call]:
    for rows in ROWS:
        yield from _norms(dtype, rows)
        yield from _gates(dtype, rows)
        yield _rotate(dtype, rows, fp8=False)
    yield _rotate(dtype, ROWS[-1], fp8=True)
    yield from _blocks(dtype)


def _norms(dtype: torch.dtype, rows: int) -> Iterator[Call]:
    from lamina_kernels.gpu import norm
    from lamina_kernels.oracles import norm as oracle

    label = f"{rows}/{short(dtype)}"
    weight = noise(HIDDEN, dtype=torch.float32, seed=1)
    yield Call(
        name=f"rms_norm/{label}",
        launch=norm.rms_norm,
        oracle=oracle.rms_norm,
        arguments=(noise(rows, HIDDEN, dtype=dtype), weight, 1e-5),
    )
    heads = noise(rows, HEADS + 2 * KV_HEADS, DIM, dtype=dtype)[:, : HEADS + KV_HEADS]
    yield Call(
        name=f"rms_norm/heads/{label}",
        launch=norm.rms_norm,
        oracle=oracle.rms_norm,
        arguments=(heads, noise(HEADS + KV_HEADS, DIM, dtype=torch.float32, seed=1), 1e-6),
    )
    yield Call(
        name=f"add_rms_norm/{label}",
        launch=norm.add_rms_norm,
        oracle=oracle.add_rms_norm,
        arguments=(noise(rows, HIDDEN, dtype=dtype), noise(rows, HIDDEN, dtype=dtype, seed=2), weight, 1e-5),
        written=(0,),
    )


def _gates(dtype: torch.dtype, rows: int) -> Iterator[Call]:
    from lamina_kernels.gpu.gated import gated
    from lamina_kernels.oracles import gated as oracle

    for activation in ("silu", "gelu_tanh"):
        yield Call(
            name=f"gated/{activation}/{rows}/{short(dtype)}",
            launch=gated,
            oracle=oracle.gated,
            arguments=(noise(rows, 2 * INNER, dtype=dtype, scale=3), activation),
        )


def _rotate(dtype: torch.dtype, rows: int, *, fp8: bool) -> Call:
    from lamina_kernels.gpu.rotate_write import rotate_write
    from lamina_kernels.oracles import rotate_write as oracle

    qkv = noise(rows, HEADS + 2 * KV_HEADS, DIM, dtype=dtype)
    q, k, v = qkv.split((HEADS, KV_HEADS, KV_HEADS), 1)
    angles = torch.rand(rows, 1, DIM, device=DEVICE) * 6
    pool = torch.zeros(-(-rows // BLOCK_SIZE) + 1, 2, LAYERS, BLOCK_SIZE, KV_HEADS, DIM, device=DEVICE)
    slots = torch.randperm(pool.shape[0] * BLOCK_SIZE, generator=torch.Generator().manual_seed(0))[:rows].to(DEVICE)
    if rows > 2:
        slots[1] = -1  # a padding row writes nothing
    scales = torch.tensor([[0.02, 0.03]] * LAYERS, device=DEVICE) if fp8 else None
    return Call(
        name=f"rotate_write/{'fp8/' if fp8 else ''}{rows}/{short(dtype)}",
        launch=rotate_write,
        oracle=oracle.rotate_write,
        arguments=(
            q,
            k,
            v,
            angles.cos().to(dtype),
            angles.sin().to(dtype),
            pool.to(FP8 if fp8 else dtype),
            1,
            slots,
            scales,
        ),
        written=(0, 5),
        tolerance=0.07 if fp8 else None,  # fp8 has three mantissa bits: half a step is 6 %
    )


def _blocks(dtype: torch.dtype) -> Iterator[Call]:
    from lamina_kernels.gpu import blocks
    from lamina_kernels.oracles import blocks as oracle

    shape = (BLOCKS, 2, LAYERS, BLOCK_SIZE, KV_HEADS, DIM)
    pool, staged = noise(*shape, dtype=dtype), noise(3, *shape[1:], dtype=dtype, seed=1)
    ids = torch.tensor([6, -1, 2], dtype=torch.int32, device=DEVICE)
    targets = torch.tensor([1, 3, 0], dtype=torch.int32, device=DEVICE)
    empty = poisoned(3, *shape[1:], dtype=dtype)
    every = {
        "clear_blocks": ((pool, ids), (0,)),
        "copy_blocks": ((pool, ids, targets), (0,)),
        "gather_blocks": ((pool, ids, empty), (2,)),
        "scatter_blocks": ((staged, ids, pool), (2,)),
    }
    for name, (arguments, written) in every.items():
        yield Call(
            name=f"{name}/{short(dtype)}",
            launch=getattr(blocks, name),
            oracle=getattr(oracle, name),
            arguments=tuple(x.clone() for x in arguments),
            written=written,
            tolerance=0.0,
        )
