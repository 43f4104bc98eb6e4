"""The LoRA table of the C kernel (`lora.c`): one call per site for all segments of a step."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lamina_kernels.cpu.build import build, kernel_cache
from lamina_kernels.lora import LoraSegments, LoraWeights

__all__ = ["NativeLoraTable"]

_FOLDER = Path(__file__).parent
_FIELDS = 16  # int64 per slot and site, as lora.c reads them
_FUNCTIONS = {torch.float32: "lamina_lora_f32", torch.bfloat16: "lamina_lora_bf16", torch.float16: "lamina_lora_f16"}


@cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL(str(build(_FOLDER / "lora.c", (_FOLDER / "lora_kernel.h",), kernel_cache())))


def _function(dtype: torch.dtype) -> Callable[..., None]:
    name = _FUNCTIONS.get(dtype)
    if name is None or not hasattr(_library(), name):
        raise TypeError(f"the C kernel does not compute in {dtype}")
    function = getattr(_library(), name)
    pointer, size = ctypes.c_void_p, ctypes.c_int64
    function.restype = None
    function.argtypes = [
        *(pointer, size, pointer, size, size),  # x, its row stride, y, its row stride, in
        *(pointer, pointer, ctypes.c_int),  # table, segments, their count
        *(pointer, size, pointer, ctypes.c_int),  # h, its row stride, x as float, threads
    ]
    return function  # type: ignore[no-any-return]


class NativeLoraTable:
    """A LoraTable for float32, bfloat16 and float16 on the CPU; sums are float32 throughout.

    B is kept in tiles as wide as two vector registers, so that a step reads every weight once and in order. A row's
    result depends on its own input and adapter alone, to the last bit: not on the batch, nor on the thread count.
    Raises BuildFailed without a compiler and TypeError for another dtype.
    """

    def __init__(self, sites: int, dtype: torch.dtype) -> None:
        self._call = _function(dtype)
        self._tile = int(_library().lamina_lora_tile())
        self._dtype = dtype
        self._table = torch.zeros(sites, 0, _FIELDS, dtype=torch.int64)
        self._widths = [(0, 0)] * sites  # of x, and at least of y; 0: no adapter changes this site yet
        self._kept: dict[int, list[Tensor]] = {}  # what the table points to
        self._max_rank = 1
        self._h = torch.empty(0)
        self._x = torch.empty(0)

    def put(self, slot: int, weights: Sequence[LoraWeights | None]) -> None:
        self._grow(slot)
        kept: list[Tensor] = []
        rows = [self._entry(site, lora, kept) for site, lora in enumerate(weights)]
        self._table[:, slot] = torch.tensor(rows, dtype=torch.int64)
        self._kept[slot] = kept
        for site, lora in enumerate(weights):
            if lora is not None:
                self._max_rank = max(self._max_rank, lora.rank)
                self._widths[site] = (lora.a.shape[1], max(self._widths[site][1], _width(lora)))

    def drop(self, slot: int) -> None:
        self._table[:, slot] = 0
        self._kept.pop(slot, None)

    def apply(self, site: int, segments: LoraSegments, x: Tensor, y: Tensor) -> None:
        if not segments.slots:
            return
        self._check(site, segments, x, y)
        h, xf = self._scratch(segments.stop, x.shape[1])
        self._call(
            x.data_ptr(),
            x.stride(0),
            y.data_ptr(),
            y.stride(0),
            x.shape[1],
            self._table.data_ptr() + site * self._table.stride(0) * 8,
            segments.table.data_ptr(),
            len(segments.slots),
            h.data_ptr(),
            self._max_rank,
            xf.data_ptr(),
            torch.get_num_threads(),
        )

    def _check(self, site: int, segments: LoraSegments, x: Tensor, y: Tensor) -> None:
        """The kernel trusts its pointers; this is what keeps them inside the tensors."""
        width_in, width_out = self._widths[site]
        if x.dtype != self._dtype or y.dtype != self._dtype:
            raise TypeError(f"x and y must be {self._dtype}, got {x.dtype} and {y.dtype}")
        if x.stride(1) != 1 or y.stride(1) != 1:
            raise ValueError("the last dimension of x and y must be contiguous")
        if segments.stop > min(x.shape[0], y.shape[0]):
            raise ValueError(f"segments end at row {segments.stop}, x and y have {x.shape[0]} and {y.shape[0]}")
        if segments.last_slot >= self._table.shape[1]:
            raise ValueError(f"slot {segments.last_slot} was never filled")
        if width_in and (x.shape[1] != width_in or y.shape[1] < width_out):
            raise ValueError(f"x and y are {x.shape[1]} and {y.shape[1]} wide, {width_in} and {width_out} are needed")

    def _grow(self, slot: int) -> None:
        sites, slots, _ = self._table.shape
        if slot >= slots:
            wider = torch.zeros(sites, max(slot + 1, 2 * slots), _FIELDS, dtype=torch.int64)
            wider[:, :slots] = self._table
            self._table = wider

    def _entry(self, site: int, lora: LoraWeights | None, kept: list[Tensor]) -> list[int]:
        """One row of the table: pointer to A, R, number of slices, then per slice pointer, rank, column, width."""
        if lora is None:
            return [0] * _FIELDS
        if self._widths[site][0] not in (0, lora.a.shape[1]):
            raise ValueError(f"A is {lora.a.shape[1]} wide at site {site}, {self._widths[site][0]} is needed")
        a = lora.a.to(self._dtype).contiguous()
        kept.append(a)
        entry: list[Any] = [a.data_ptr(), lora.rank, len(lora.b)]
        for b, column in zip(lora.b, lora.columns, strict=True):
            tiles = self._tiles(b)
            kept.append(tiles)
            entry += [tiles.data_ptr(), b.shape[0], column, b.shape[1]]
        return entry + [0] * (_FIELDS - len(entry))

    def _tiles(self, b: Tensor) -> Tensor:
        """[rank, out] as [out / tile, rank, tile], the last tile padded with zeros."""
        rank, width = b.shape
        padded = b.new_zeros(rank, -(-width // self._tile) * self._tile, dtype=self._dtype)
        padded[:, :width] = b
        return padded.view(rank, -1, self._tile).transpose(0, 1).contiguous()

    def _scratch(self, rows: int, width: int) -> tuple[Tensor, Tensor]:
        if self._h.numel() < rows * self._max_rank:
            self._h = torch.empty(rows * self._max_rank)
        if self._dtype != torch.float32 and self._x.numel() < rows * width:
            self._x = torch.empty(rows * width)
        return self._h, self._x


def _width(lora: LoraWeights) -> int:
    return max(column + b.shape[1] for b, column in zip(lora.b, lora.columns, strict=True))
