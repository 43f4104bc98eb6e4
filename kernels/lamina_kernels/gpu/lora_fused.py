"""The fused plan: the base projection's own product computes every slot's shrink, so decode needs no shrink launch.

    matrix [out + slots * R, in]        y_ext = x matrixᵀ    [T, out + slots * R]
    | W                |                | y          | h of slot 0 | h of slot 1 | ...
    | A of slot 0      |  R rows          ^ expand adds each row's own h . B, in place
    | A of slot 1      |  R rows
    | ...              |

W is rows of the matrix, not a copy; whoever loads the model writes there. Each slot has room for R ranks (all slices
of an adapter together); what it lacks is zero. The columns after y serve `expand` as one plane of partial sums, where
h_s of slot i begins at i * R. h is rounded to the type of y_ext, as `expand` would round the sum of planes.

A hot swap writes the slot's rows of the matrix, its B's, and one row of the table. All slots are multiplied with all
rows, so this is for decode and few slots: `lora_plan` compares both plans.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lamina_kernels.gpu.compile_case import CompileCase
from lamina_kernels.gpu.lora_checks import check_rows
from lamina_kernels.gpu.lora_expand import _constants, _expand_kernel
from lamina_kernels.gpu.lora_layout import ALIGN, FIELDS, MAX_SLICES, SLICE_FIELDS, SLICE_START, SiteShape, padded
from lamina_kernels.gpu.lora_pack import PackedLora, PoolLayout
from lamina_kernels.gpu.tuned import LORA_EXPAND_DECODE
from lamina_kernels.lora import LoraWeights

__all__ = ["FusedSite", "compile_cases"]

_FIRST_RANKS = [SLICE_START + SLICE_FIELDS * number + 2 for number in range(MAX_SLICES)]  # h_s of each slice


class FusedSite:
    """One fused linear site with `slots` adapters of up to `ranks` ranks, a multiple of ALIGN, in its own matrix.

    `weight` [out, in] and `bias` [out], if any, are the base layer's, for the model's loader to fill. Raises ValueError
    or TypeError for sizes or dtypes that no kernel takes. Not safe for concurrent use, `prepare` apart; everything else
    belongs on the stream that runs the kernels.
    """

    def __init__(
        self, shape: SiteShape, *, slots: int, ranks: int, dtype: torch.dtype, device: torch.device, bias: bool = False
    ) -> None:
        if slots < 1 or ranks < 1 or ranks % ALIGN:
            raise ValueError(f"{slots} slots of {ranks} ranks: at least 1, ranks a multiple of {ALIGN}")
        self.shape, self.slots, self.ranks = shape, slots, ranks
        self._layout = PoolLayout((shape,), dtype, max_rank=ranks)
        rows, out = shape.out_features + slots * ranks, shape.out_features
        self._matrix = torch.zeros(rows, shape.in_features, dtype=dtype, device=device)
        self._bias = torch.zeros(rows, dtype=dtype, device=device) if bias else None  # zero for all h
        self.weight = self._matrix[:out]
        self.bias = None if self._bias is None else self._bias[:out]
        # Per slot what B's and gains need at most: all ranks on the widest slice, gains on every slice.
        gains = sum(padded(width * 4 // dtype.itemsize) for width in shape.widths)
        self._room = ranks * max(map(padded, shape.widths)) + gains
        self._pool = torch.zeros(slots * self._room, dtype=dtype, device=device)
        self._table = torch.zeros(slots, FIELDS, dtype=torch.int64, device=device)

    def prepare(self, lora: LoraWeights) -> PackedLora:
        """Packs one adapter, pinned for a CUDA device; any thread. Raises ValueError if it does not fit the site."""
        if lora.rank > self.ranks:
            raise ValueError(f"the adapter has {lora.rank} ranks on all slices, a slot has room for {self.ranks}")
        return self._layout.pack([lora], pin=self._matrix.is_cuda)

    def put(self, slot: int, packed: PackedLora) -> None:
        """Fills a slot. Raises ValueError for one that does not exist, TypeError for an adapter of another site."""
        if packed.layout != self._layout:
            raise TypeError("the adapter was packed for another site, dtype or limit of ranks")
        self.drop(slot)
        rank, inputs = int(packed.placement.rows[0, 1]), self.shape.in_features
        end = rank * padded(inputs)  # of A in the packed adapter; B's and gains follow
        a = packed.host[:end].view(rank, -1)[:, :inputs]
        self._rows(slot)[:rank].copy_(a, non_blocking=True)
        start = slot * self._room
        self._pool[start : start + packed.host.numel() - end].copy_(packed.host[end:], non_blocking=True)
        row = packed.placement.rows_at(start - end)[0]
        row[0] = 0  # A is in the matrix, where no kernel looks for it
        row[_FIRST_RANKS] += slot * self.ranks
        self._table[slot].copy_(row.pin_memory() if self._table.is_cuda else row, non_blocking=True)

    def drop(self, slot: int) -> None:
        """Empties the slot; its h is zero from now on. Raises ValueError for one that does not exist."""
        if not 0 <= slot < self.slots:
            raise ValueError(f"there is no slot {slot}, only 0 to {self.slots - 1}")
        self._table[slot].zero_()
        self._rows(slot).zero_()

    def forward(self, x: Tensor) -> Tensor:
        """y_ext [T, out + slots * ranks] = x matrixᵀ + bias: the base projection of x [T, in], then every slot's h."""
        check_rows("x", x, self._matrix.dtype)
        return F.linear(x, self._matrix, self._bias)

    def expand_selected(self, y_ext: Tensor, tiles: Tensor) -> Tensor:
        """Adds each decode tile's adapter to y_ext from `forward`, in place; gives y [T, out], its first columns.

        tiles int32 [n, 3] (`lora_tiles`), their slots below `slots`. Rows in no tile keep their bits.
        """
        out = self.shape.out_features
        check_rows("y_ext", y_ext, self._matrix.dtype)
        if y_ext.shape[1] != self._matrix.shape[0]:
            raise ValueError(f"y_ext has {y_ext.shape[1]} columns, not {self._matrix.shape[0]}")
        if tiles.dtype != torch.int32 or tiles.dim() != 2 or tiles.shape[1] != 3 or not tiles.is_contiguous():
            raise ValueError(f"tiles are contiguous int32 [n, 3], not {tiles.dtype} {tuple(tiles.shape)}")
        if tiles.shape[0]:
            self._launch(y_ext[:, out:], y_ext[:, :out], tiles)
        return y_ext[:, :out]

    def project(self, x: Tensor, tiles: Tensor) -> Tensor:
        """y [T, out], rows `out + slots * ranks` apart: the base projection with each tile's adapter."""
        return self.expand_selected(self.forward(x), tiles)

    def _rows(self, slot: int) -> Tensor:
        first = self.shape.out_features + slot * self.ranks
        return self._matrix[first : first + self.ranks]

    def _launch(self, h: Tensor, y: Tensor, tiles: Tensor) -> None:
        # Not through `expand`, which takes planes of float32 alone.
        kind = LORA_EXPAND_DECODE
        constants = _constants(kind, 1, y.element_size())
        blocks = sum(-(-width // constants["BLOCK_COLUMNS"]) for width in self.shape.widths)
        _expand_kernel[(tiles.shape[0], blocks)](
            h,
            self._pool,
            self._pool.view(torch.float32),
            self._table,
            tiles,
            y,
            self.bias,
            *self.shape.widths,
            *(0,) * (MAX_SLICES - len(self.shape.widths)),
            y.stride(0),
            0,  # one plane
            h.stride(0),
            h.shape[1],
            **constants,
            num_warps=kind.num_warps,
            num_stages=kind.num_stages,
        )


def compile_cases() -> list[CompileCase]:
    """The expand kernel on a plane of the computing type, at the qkv projection of Llama-3-8B."""
    return [_case(dtype) for dtype in ("bf16", "fp16", "fp32")]


def _case(dtype: str) -> CompileCase:
    kind = LORA_EXPAND_DECODE
    pointers = dict.fromkeys(("planes", "pool", "gains", "table", "tiles", "y"), f"*{dtype}")
    pointers |= {"gains": "*fp32", "table": "*i64", "tiles": "*i32"}
    numbers = ("width_0", "width_1", "width_2", "y_stride", "plane_stride", "row_stride", "ranks")
    constants = _constants(kind, 1, 4 if dtype == "fp32" else 2)
    return CompileCase(
        name=f"lora_fused/expand/{dtype}",
        kernel=_expand_kernel,
        signature={
            **pointers,
            "bias": "constexpr",
            **dict.fromkeys(numbers, "i32"),
            **dict.fromkeys(constants, "constexpr"),
        },
        constants={**constants, "bias": None},
        divisible=(*pointers, *numbers),
        num_warps=kind.num_warps,
        num_stages=kind.num_stages,
        tensor_cores=dtype != "fp32",
    )
