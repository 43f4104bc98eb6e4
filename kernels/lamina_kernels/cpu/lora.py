"""The LoRA table of the C kernel (`lora.c`): one call per site for all segments of a step."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from lamina_kernels.cpu.build import build, kernel_cache
from lamina_kernels.lora import LoraSegments, LoraWeights, PreparedLora

__all__ = ["NativeLora", "NativeLoraTable"]

_FOLDER = Path(__file__).parent
_SLICES = 3  # of a site, at most
_FIELDS = 3 + 5 * _SLICES  # int64 per slot and site, as lora.c reads them
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
        *(pointer, size, pointer, size, size, pointer),  # x, its row stride, y, its row stride, in, bias
        *(pointer, pointer, ctypes.c_int),  # table, segments, their count
        *(pointer, size, pointer, ctypes.c_int),  # h, its row stride, x as float, threads
    ]
    return function  # type: ignore[no-any-return]


@dataclass(frozen=True)
class NativeLora:
    """Prepared for `NativeLoraTable`: rows of its table, and the tensors that they point to."""

    rows: Tensor  # int64 [sites, _FIELDS]
    tensors: tuple[Tensor, ...]
    widths: tuple[tuple[int, int] | None, ...]  # per site: of x, and at least of y
    max_rank: int
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors)


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
        self._widths = [(0, 0)] * sites  # of x, and at least of y; 0: no adapter changed this site yet
        self._kept: dict[int, NativeLora] = {}  # what the table points to
        self._max_rank = 1
        self._h = torch.empty(0)
        self._x = torch.empty(0)

    def prepare(self, weights: Sequence[LoraWeights | None]) -> NativeLora:
        kept: list[Tensor] = []
        rows = [_row(lora, self._dtype, self._tile, kept) for lora in weights]
        return NativeLora(
            rows=torch.tensor(rows, dtype=torch.int64).view(-1, _FIELDS),
            tensors=tuple(kept),
            widths=tuple(None if lora is None else (lora.a.shape[1], _width(lora)) for lora in weights),
            max_rank=max((lora.rank for lora in weights if lora is not None), default=1),
            dtype=self._dtype,
        )

    def put(self, slot: int, prepared: PreparedLora) -> None:
        if not isinstance(prepared, NativeLora) or prepared.dtype != self._dtype:
            raise TypeError(f"{type(prepared).__name__} was prepared for another kernel or dtype")
        self._widths = [_widest(ours, theirs) for ours, theirs in zip(self._widths, prepared.widths, strict=True)]
        self._grow(slot)
        self._table[:, slot] = prepared.rows
        self._kept[slot] = prepared
        self._max_rank = max(self._max_rank, prepared.max_rank)

    def drop(self, slot: int) -> None:
        self._table[:, slot] = 0
        self._kept.pop(slot, None)

    def apply(self, site: int, segments: LoraSegments, x: Tensor, y: Tensor, bias: Tensor | None = None) -> None:
        if not segments.slots:
            return
        self._check(site, segments, x, y, bias)
        h, xf = self._scratch(segments.stop, x.shape[1])
        self._call(
            x.data_ptr(),
            x.stride(0),
            y.data_ptr(),
            y.stride(0),
            x.shape[1],
            None if bias is None else bias.data_ptr(),
            self._table.data_ptr() + site * self._table.stride(0) * 8,
            segments.table.data_ptr(),
            len(segments.slots),
            h.data_ptr(),
            self._max_rank,
            xf.data_ptr(),
            torch.get_num_threads(),
        )

    def _check(self, site: int, segments: LoraSegments, x: Tensor, y: Tensor, bias: Tensor | None) -> None:
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
        if bias is not None and (bias.dtype != self._dtype or bias.shape != y.shape[1:] or not bias.is_contiguous()):
            raise ValueError(f"bias must be contiguous, {self._dtype} and {y.shape[1]} long")

    def _grow(self, slot: int) -> None:
        sites, slots, _ = self._table.shape
        if slot >= slots:
            wider = torch.zeros(sites, max(slot + 1, 2 * slots), _FIELDS, dtype=torch.int64)
            wider[:, :slots] = self._table
            self._table = wider

    def _scratch(self, rows: int, width: int) -> tuple[Tensor, Tensor]:
        if self._h.numel() < rows * self._max_rank:
            self._h = torch.empty(rows * self._max_rank)
        if self._dtype != torch.float32 and self._x.numel() < rows * width:
            self._x = torch.empty(rows * width)
        return self._h, self._x


def _row(lora: LoraWeights | None, dtype: torch.dtype, tile: int, kept: list[Tensor]) -> list[int]:
    """One row of the table: pointer to A, R, number of slices, then per slice B, rank, column, width and gains or 0."""
    if lora is None:
        return [0] * _FIELDS
    a = lora.a.to(dtype).contiguous()
    kept.append(a)
    row = [a.data_ptr(), lora.rank, len(lora.b)]
    for b, column, gain in zip(lora.b, lora.columns, lora.gains or (None,) * len(lora.b), strict=True):
        tiles = _tiles(b, dtype, tile)
        kept.append(tiles)
        row += [tiles.data_ptr(), b.shape[0], column, b.shape[1], 0]
        if gain is not None:
            kept.append(gain.float().contiguous())
            row[-1] = kept[-1].data_ptr()
    return row + [0] * (_FIELDS - len(row))


def _tiles(b: Tensor, dtype: torch.dtype, tile: int) -> Tensor:
    """[rank, out] as [out / tile, rank, tile], the last tile padded with zeros."""
    rank, width = b.shape
    padded = b.new_zeros(rank, -(-width // tile) * tile, dtype=dtype)
    padded[:, :width] = b
    return padded.view(rank, -1, tile).transpose(0, 1).contiguous()


def _width(lora: LoraWeights) -> int:
    return max(column + b.shape[1] for b, column in zip(lora.b, lora.columns, strict=True))


def _widest(ours: tuple[int, int], theirs: tuple[int, int] | None) -> tuple[int, int]:
    if theirs is None:
        return ours
    if ours[0] not in (0, theirs[0]):
        raise ValueError(f"A is {theirs[0]} wide, {ours[0]} is needed")
    return theirs[0], max(ours[1], theirs[1])
