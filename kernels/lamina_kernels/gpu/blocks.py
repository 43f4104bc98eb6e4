"""Whole blocks of the KV pool: clear, copy, gather, scatter. They move bytes and look at none.

    clear    pool[ids[i]]     = 0
    copy     pool[targets[i]] = pool[sources[i]]
    gather   out[i]           = pool[ids[i]]         scattered blocks into one piece, for one copy to the host
    scatter  pool[ids[i]]     = staged[i]            and back

A pool of any dtype is seen as int32 words [num_blocks, words]. Tiling: PROGRAMS programs share one entry and stride
over its tiles of BLOCK words; each lane has eight loads of 16 bytes in flight before it stores. Entries of -1 leave at
once and the grid depends on the number of entries alone, so a captured launch serves every shorter list.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from lamina_kernels.gpu.compile_case import CompileCase
from lamina_kernels.gpu.tuned import BLOCK_PROGRAMS, BLOCKS

__all__ = ["clear_blocks", "compile_cases", "copy_blocks", "gather_blocks", "scatter_blocks"]

_VECTOR = 16  # bytes a lane moves at once


@triton.jit
def _clear_kernel(pool, ids, WORDS: tl.constexpr, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr):
    i_block = tl.load(ids + tl.program_id(0)).to(tl.int64)
    if i_block < 0:
        return
    p_block = pool + i_block * WORDS
    for start in range(tl.program_id(1) * BLOCK, WORDS, PROGRAMS * BLOCK):
        i_word = start + tl.arange(0, BLOCK)
        tl.store(p_block + i_word, tl.zeros((BLOCK,), tl.int32), mask=i_word < WORDS)


@triton.jit
def _move_kernel(
    source,  # [entries of either, WORDS] int32
    target,
    source_ids,  # None: entry i is row i
    target_ids,
    WORDS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i_entry = tl.program_id(0)
    i_source = i_entry.to(tl.int64) if source_ids is None else tl.load(source_ids + i_entry).to(tl.int64)
    i_target = i_entry.to(tl.int64) if target_ids is None else tl.load(target_ids + i_entry).to(tl.int64)
    if (i_source < 0) | (i_target < 0):
        return
    p_source, p_target = source + i_source * WORDS, target + i_target * WORDS
    for start in range(tl.program_id(1) * BLOCK, WORDS, PROGRAMS * BLOCK):
        i_word = start + tl.arange(0, BLOCK)
        mask = i_word < WORDS
        tl.store(p_target + i_word, tl.load(p_source + i_word, mask=mask), mask=mask)


def clear_blocks(pool: Tensor, ids: Tensor) -> None:
    """Zeroes blocks of the pool [num_blocks, ...], contiguous, any dtype. ids int32 [n]; -1 is skipped.

    Raises TypeError for the dtype of ids, ValueError for shapes, strides, devices, and for blocks that are no multiple
    of 16 bytes. Here and below ids are not checked against the pool: that would wait for the device.
    """
    words = _words(pool, "pool")
    _check_ids(ids, pool)
    if ids.shape[0]:
        programs = _programs(words.shape[1])
        _clear_kernel[(ids.shape[0], programs)](
            words, ids, WORDS=words.shape[1], PROGRAMS=programs, BLOCK=BLOCKS.block, num_warps=BLOCKS.warps
        )


def copy_blocks(pool: Tensor, sources: Tensor, targets: Tensor) -> None:
    """pool[targets[i]] = pool[sources[i]]. sources and targets int32 [n]; an entry with a -1 is skipped.

    The caller guarantees that no target is among the sources or named twice: entries are copied in no order. Errors as
    `clear_blocks`.
    """
    words = _words(pool, "pool")
    _check_ids(sources, pool)
    _check_ids(targets, pool)
    if sources.shape != targets.shape:
        raise ValueError(f"{sources.shape[0]} sources for {targets.shape[0]} targets")
    _move(words, words, sources, targets, sources.shape[0])


def gather_blocks(pool: Tensor, ids: Tensor, out: Tensor) -> None:
    """out[i] = pool[ids[i]]. ids int32 [n]; where they are -1, out keeps its row.

    out [n, ...] contiguous, rows of as many bytes as a block, any dtype, not in the pool. Errors as `clear_blocks`.
    """
    words, rows = _words(pool, "pool"), _words(out, "out")
    _check_ids(ids, pool)
    _check_staging(rows, ids, words)
    _move(words, rows, ids, None, ids.shape[0])


def scatter_blocks(staged: Tensor, ids: Tensor, pool: Tensor) -> None:
    """pool[ids[i]] = staged[i]. ids int32 [n], none twice; -1 is skipped. staged as `out` of `gather_blocks`."""
    words, rows = _words(pool, "pool"), _words(staged, "staged")
    _check_ids(ids, pool)
    _check_staging(rows, ids, words)
    _move(rows, words, None, ids, ids.shape[0])


def _move(source: Tensor, target: Tensor, source_ids: Tensor | None, target_ids: Tensor | None, entries: int) -> None:
    if entries:
        programs = _programs(source.shape[1])
        _move_kernel[(entries, programs)](
            source,
            target,
            source_ids,
            target_ids,
            WORDS=source.shape[1],
            PROGRAMS=programs,
            BLOCK=BLOCKS.block,
            num_warps=BLOCKS.warps,
        )


def _programs(words: int) -> int:
    return min(BLOCK_PROGRAMS, -(-words // BLOCKS.block))


def _words(tensor: Tensor, name: str) -> Tensor:
    """The same memory as int32 [n, words]."""
    if tensor.dim() < 2 or not tensor.is_contiguous():
        raise ValueError(f"{name} is [n, ...] and contiguous, not {tuple(tensor.shape)} with strides {tensor.stride()}")
    width = math.prod(tensor.shape[1:])
    row_bytes = width * tensor.element_size()
    if row_bytes == 0 or row_bytes % _VECTOR or tensor.data_ptr() % _VECTOR:
        raise ValueError(f"{name} must start at, and each row be, a multiple of {_VECTOR} bytes; a row is {row_bytes}")
    return tensor.view(tensor.shape[0], width).view(torch.int32)


def _check_ids(ids: Tensor, pool: Tensor) -> None:
    if ids.dtype != torch.int32:
        raise TypeError(f"ids are int32, not {ids.dtype}")
    if ids.dim() != 1 or not ids.is_contiguous() or ids.device != pool.device:
        raise ValueError(f"ids are contiguous [n] beside the pool, not {tuple(ids.shape)} on {ids.device}")


def _check_staging(rows: Tensor, ids: Tensor, pool: Tensor) -> None:
    if rows.shape != (ids.shape[0], pool.shape[1]) or rows.device != pool.device:
        raise ValueError(
            f"{ids.shape[0]} blocks of {4 * pool.shape[1]} bytes do not fit {rows.shape[0]} rows of "
            f"{4 * rows.shape[1]} on {rows.device}"
        )


def compile_cases() -> list[CompileCase]:
    """Words have no dtype: one block of Llama-3-8B in 2 bytes, and one of SmolLM2, whose last tile is not full."""
    llama, smollm = 524288, 92160
    cases = [_clear_case("llama", llama)]
    for model, words in (("llama", llama), ("smollm", smollm)):
        cases += [_move_case(f"copy/{model}", words, ("source_ids", "target_ids"))]
    return [
        *cases,
        _move_case("gather/llama", llama, ("source_ids",)),
        _move_case("scatter/llama", llama, ("target_ids",)),
    ]


def _constants(words: int) -> dict[str, object]:
    return {"WORDS": words, "PROGRAMS": _programs(words), "BLOCK": BLOCKS.block}


def _clear_case(model: str, words: int) -> CompileCase:
    constants = _constants(words)
    return CompileCase(
        name=f"clear_blocks/{model}",
        kernel=_clear_kernel,
        signature={"pool": "*i32", "ids": "*i32"} | dict.fromkeys(constants, "constexpr"),
        constants=constants,
        divisible=("pool", "ids"),
        num_warps=BLOCKS.warps,
        vector_loads=False,  # it loads no more than an id
    )


def _move_case(name: str, words: int, ids: tuple[str, ...]) -> CompileCase:
    absent = {side: None for side in ("source_ids", "target_ids") if side not in ids}
    constants = _constants(words)
    sides = {side: "*i32" if side in ids else "constexpr" for side in ("source_ids", "target_ids")}
    return CompileCase(
        name=f"move_blocks/{name}",
        kernel=_move_kernel,
        signature={"source": "*i32", "target": "*i32"} | sides | dict.fromkeys(constants, "constexpr"),
        constants=constants | absent,
        divisible=("source", "target", *ids),
        num_warps=BLOCKS.warps,
    )
