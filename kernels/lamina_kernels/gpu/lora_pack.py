"""One adapter as one piece of host memory, laid out as it will lie in the device's pool (`lora_layout`).

    host   | site 0: A, then per slice B and gains | site 1 | site 2 | ...      each part padded to ALIGN elements

Sites follow each other as the model uses them, so the whole adapter, or any run of layers, is one copy. Rows for the
table come with it, their offsets counted from the adapter's first element. DoRA's float32 gains lie between the
weights: the float32 pool that kernels read them from is the same memory under another type.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lamina_kernels.gpu.lora_layout import ALIGN, FIELDS, MAX_SLICES, SLICE_FIELDS, SLICE_START, SiteShape, padded
from lamina_kernels.lora import LoraWeights

__all__ = ["PackedLora", "Placement", "PoolLayout", "slice_numbers"]

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_RANK = 1
_SLICES = [SLICE_START + SLICE_FIELDS * number for number in range(MAX_SLICES)]
_WEIGHTS = [0, *_SLICES]  # A and the Bs
_GAINS = [first + 3 for first in _SLICES]
_EMPTY_ROW = [-1 if at in _GAINS else 0 for at in range(FIELDS)]


@dataclass(frozen=True)
class PoolLayout:
    """What adapters are packed for; a pool only takes those of an equal layout.

    `embedding` is the site, if any, whose input is a token: its A lies transposed, [vocab, padded(r)] (`lora_embed`).
    Raises ValueError or TypeError for what the kernels cannot do.
    """

    sites: tuple[SiteShape, ...]
    dtype: torch.dtype
    max_rank: int  # of one slice
    embedding: int | None = None

    def __post_init__(self) -> None:
        if self.dtype not in _DTYPES:
            raise TypeError(f"adapters are kept in one of {_DTYPES}, not {self.dtype}")
        if self.max_rank < 1 or not self.sites:
            raise ValueError(f"{len(self.sites)} sites and ranks up to {self.max_rank}: both must be at least 1")
        if self.embedding is not None and not 0 <= self.embedding < len(self.sites):
            raise ValueError(f"the embedding is site {self.embedding}, there are {len(self.sites)}")
        if self.embedding is not None and len(self.sites[self.embedding].widths) != 1:
            raise ValueError(f"the embedding has one slice, not {self.sites[self.embedding].widths}")

    def pack(self, weights: Sequence[LoraWeights | None], *, pin: bool = False) -> PackedLora:
        """Copies an adapter, one entry per site, into one host tensor; `pin` it for copies that overlap with work.

        Raises ValueError for another number of sites, other widths or a rank above `max_rank`.
        """
        if len(weights) != len(self.sites):
            raise ValueError(f"the adapter has {len(weights)} sites, the model {len(self.sites)}")
        plan = _Plan(self.dtype)
        rows, starts = [], [0]
        for number, lora in enumerate(weights):
            rows.append(_EMPTY_ROW if lora is None else self._row(number, lora, plan))
            starts.append(plan.end)
        host = torch.zeros(plan.end, dtype=self.dtype, pin_memory=pin)
        for start, part in plan.parts:
            count, width = part.shape
            host[start : start + count * padded(width)].view(count, -1)[:, :width].copy_(part)
        placement = Placement(torch.tensor(rows, dtype=torch.int64), tuple(starts), self.dtype.itemsize)
        return PackedLora(self, host, placement)

    def _row(self, number: int, lora: LoraWeights, plan: _Plan) -> list[int]:
        """One row of the table."""
        try:
            slices = slice_numbers(self.sites[number], lora, self.max_rank)
        except ValueError as error:
            raise ValueError(f"site {number}: {error}") from None
        row = list(_EMPTY_ROW)
        row[0], row[_RANK] = plan.add(lora.a.t() if number == self.embedding else lora.a), lora.rank
        first = 0
        for slice_, b, gain in zip(slices, lora.b, lora.gains or (None,) * len(lora.b), strict=True):
            at = _SLICES[slice_]
            row[at : at + SLICE_FIELDS] = plan.add(b), b.shape[0], first, plan.add_gain(gain)
            first += b.shape[0]
        return row


@dataclass(frozen=True, eq=False)
class Placement:
    """Where an adapter's parts lie, counted in elements from its first; what is left to know once it is in the pool."""

    rows: Tensor  # int64 [sites, FIELDS]
    starts: tuple[int, ...]  # of each site's part; the last is the end of all
    itemsize: int

    @property
    def elements(self) -> int:
        """A multiple of ALIGN; 0 for an adapter that changes nothing."""
        return self.starts[-1]

    @property
    def nbytes(self) -> int:
        return self.elements * self.itemsize

    def rows_at(self, start: int, sites: slice = slice(None)) -> Tensor:
        """Rows for the table when the adapter lies at element `start`, a multiple of ALIGN; a new tensor."""
        rows = self.rows[sites].clone()
        rows[:, _WEIGHTS] += start * (rows[:, _RANK, None] > 0)
        gains = rows[:, _GAINS]
        rows[:, _GAINS] = torch.where(gains < 0, -1, gains + start * self.itemsize // 4)
        return rows


@dataclass(frozen=True, eq=False)
class PackedLora:
    """One adapter ready to be copied into a pool; a `PreparedLora`. Nobody may change it any more."""

    layout: PoolLayout
    host: Tensor  # flat, of the layout's dtype
    placement: Placement

    @property
    def nbytes(self) -> int:
        """What it takes from a pool, padding included."""
        return self.placement.nbytes


def slice_numbers(shape: SiteShape, lora: LoraWeights, max_rank: int) -> list[int]:
    """Which slice of the site each B belongs to. Raises ValueError unless all shapes and ranks fit the site."""
    if lora.a.dim() != 2 or lora.a.shape[1] != shape.in_features:
        raise ValueError(f"A is {tuple(lora.a.shape)}, the input is {shape.in_features} wide")
    if len(set(lora.columns)) != len(lora.columns):
        raise ValueError(f"two slices begin at the same column: {lora.columns}")
    return [_slice_number(shape, b, column, max_rank) for b, column in zip(lora.b, lora.columns, strict=True)]


def _slice_number(shape: SiteShape, b: Tensor, column: int, max_rank: int) -> int:
    rank, width = b.shape
    if column not in shape.columns:
        raise ValueError(f"no slice begins at column {column}, only at {shape.columns}")
    number = shape.columns.index(column)
    if width != shape.widths[number]:
        raise ValueError(f"B is {width} wide, the slice at column {column} is {shape.widths[number]}")
    if not 1 <= rank <= max_rank:
        raise ValueError(f"the rank at column {column} is {rank}, not from 1 to {max_rank}")
    return number


@dataclass
class _Plan:
    """What will lie where: parts [rows, width], one after the other, each row padded."""

    dtype: torch.dtype
    parts: list[tuple[int, Tensor]] = field(default_factory=list)
    end: int = 0

    def add(self, part: Tensor) -> int:
        """The part's first element."""
        start = self.end
        self.parts.append((start, part))
        self.end += part.shape[0] * padded(part.shape[1])
        assert self.end % ALIGN == 0
        return start

    def add_gain(self, gain: Tensor | None) -> int:
        """The first float32 of a slice's gains, or -1 for none."""
        if gain is None:
            return -1
        bits = gain.to("cpu", torch.float32).contiguous().view(self.dtype)
        return self.add(bits[None]) * self.dtype.itemsize // 4
