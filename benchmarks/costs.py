"""The roofline: what each piece of a step moves and computes, and how long a chip needs for that at the least.

A piece of work takes the longer of its bytes over the memory's bandwidth and its operations over the arithmetic peak;
pieces follow each other. Activations that half the L2 holds since their last use cost no bytes. That makes a floor:
nothing measured should be faster, and the distance from there is what a measurement has to explain. Launches are
counted apart: `eager` adds one launch from the host per kernel, `graph` one node of a captured CUDA graph, `device`
none.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from chips import Chip
from shapes import Shape, Site

PLANES = 8  # of partial sums in fp32 that a shrink writes; a small share of x either way


@dataclass(frozen=True, slots=True)
class Work:
    """One piece: what it moves through memory, what it computes, how many kernels that takes."""

    name: str
    bytes: float
    flops: float = 0.0
    launches: int = 1
    itemsize: int = 2  # of the operands that are multiplied

    def seconds(self, chip: Chip) -> float:
        """On the device, without launches."""
        return max(self.bytes / chip.bytes_per_s, self.flops / chip.flops_per_s(self.itemsize))


def seconds(works: Iterable[Work], chip: Chip, how: str = "device") -> float:
    """All of it, one after the other; `how` is device, graph or eager."""
    per_launch = {"device": 0.0, "graph": chip.node_us, "eager": chip.launch_us}[how] * 1e-6
    return sum(work.seconds(chip) + work.launches * per_launch for work in works)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The rows of one step. Sequence i has `queries[i]` new tokens, the last of them seeing `contexts[i]` tokens."""

    contexts: tuple[int, ...]
    queries: tuple[int, ...]
    itemsize: int = 2  # weights and activations
    kv_itemsize: int = 2

    @property
    def rows(self) -> int:
        return sum(self.queries)

    @property
    def sequences(self) -> int:
        """Rows that are projected to logits."""
        return len(self.queries)

    @property
    def decoding(self) -> bool:
        return self.rows == self.sequences


def decode(batch: int, context: int, **sizes: int) -> Batch:
    """One new token for each of `batch` sequences of equal length."""
    return Batch(contexts=(context,) * batch, queries=(1,) * batch, **sizes)


def prefill(tokens: int, prefix: int = 0, **sizes: int) -> Batch:
    """One sequence's next `tokens` tokens behind a cached prefix."""
    return Batch(contexts=(prefix + tokens,), queries=(tokens,), **sizes)


def passing(nbytes: float, chip: Chip | None) -> float:
    """Bytes of an activation that go through memory: none if half the chip's L2 holds it from its last use."""
    return 0.0 if chip is not None and nbytes <= chip.l2_bytes / 2 else nbytes


def linear_work(name: str, rows: int, inputs: int, outputs: int, itemsize: int, chip: Chip | None = None) -> Work:
    """y [rows, out] = x [rows, in] · Wᵀ."""
    moved = float(inputs * outputs * itemsize)
    moved += passing(rows * inputs * itemsize, chip) + passing(rows * outputs * itemsize, chip)
    return Work(name, moved, 2.0 * rows * inputs * outputs, itemsize=itemsize)


def attention_work(shape: Shape, batch: Batch, chip: Chip | None = None) -> Work:
    """One layer: every key and value that is seen is read once; scores and mix cost 4 operations per head dimension."""
    read = batch.kv_itemsize * 2 * shape.kv_heads * shape.head_dim * sum(batch.contexts)
    passed = 2 * passing(batch.itemsize * shape.heads * shape.head_dim * batch.rows, chip)
    pairs = sum(q * c - q * (q - 1) / 2 for q, c in zip(batch.queries, batch.contexts, strict=True))
    flops = 4.0 * shape.heads * shape.head_dim * pairs
    launches = 2 if batch.decoding else 1  # split KV, then the reduction over splits
    return Work("attention", read + passed, flops, launches, batch.itemsize)


def pointwise_works(shape: Shape, batch: Batch, chip: Chip | None = None) -> list[Work]:
    """One layer's kernels that only move rows: norm + residual, rotary embedding + KV write, gate."""

    def row(width: int) -> float:
        return passing(batch.rows * width * batch.itemsize, chip)

    keys = shape.kv_heads * shape.head_dim
    qkv = shape.heads * shape.head_dim + 2 * keys
    written = 2.0 * batch.rows * keys * batch.kv_itemsize  # to the pool
    return [
        Work("norm", shape.norms * 4 * row(shape.hidden), launches=shape.norms),  # residual in and out, x, y
        Work("rotate + write", row(qkv) + row(shape.heads * shape.head_dim) + written),
        Work("gate", row(2 * shape.inner) + row(shape.inner)),
    ]


def base_works(shape: Shape, batch: Batch, chip: Chip | None = None) -> list[Work]:
    """A whole step without adapters. The embedding is a lookup of its rows, not a read of the table."""
    size, rows, last = batch.itemsize, batch.rows, batch.sequences
    layer = [linear_work(site.name, rows, site.inputs, site.outputs, size, chip) for site in shape.sites]
    layer += [attention_work(shape, batch, chip), *pointwise_works(shape, batch, chip)]
    return [
        Work("embedding", rows * shape.hidden * size + passing(rows * shape.hidden * size, chip)),
        *layer * shape.layers,
        Work("norm", 4 * passing(rows * shape.hidden * size, chip)),
        linear_work("head", last, shape.hidden, shape.vocab, size, chip),
        sampling_work(shape, last, chip),
    ]


def sampling_work(shape: Shape, rows: int, chip: Chip | None = None) -> Work:
    """Two passes over float32 logits: one for the maximum and the sum, one for the choice."""
    return Work("sampling", 2 * passing(4.0 * rows * shape.vocab, chip), launches=2)


@dataclass(frozen=True)
class Lora:
    """Adapters on all seven projections. `ranks`: one per resident adapter; the first ones have rows in the batch."""

    ranks: tuple[int, ...]
    rows: int
    itemsize: int = 2

    @property
    def active(self) -> int:
        return min(len(self.ranks), self.rows)

    @cached_property
    def dealt(self) -> tuple[tuple[int, int], ...]:
        """(rank, rows) of each active adapter, rows dealt evenly."""
        each, more = divmod(self.rows, self.active) if self.active else (0, 0)
        return tuple((self.ranks[i], each + (i < more)) for i in range(self.active))

    @property
    def active_rank(self) -> int:
        return sum(rank for rank, _ in self.dealt)

    @property
    def rank_rows(self) -> int:
        """Sum over rows of the row's rank."""
        return sum(rank * rows for rank, rows in self.dealt)


def _shrink(site: Site, lora: Lora, chip: Chip | None) -> Work:
    slices, size = len(site.widths), lora.itemsize
    weights = slices * lora.active_rank * site.inputs * size
    partial = 4.0 * PLANES * slices * lora.rank_rows
    x = passing(float(lora.rows * site.inputs * size), chip)
    return Work("shrink", weights + x + passing(partial, chip), 2.0 * slices * lora.rank_rows * site.inputs, 1, size)


def _expand(site: Site, lora: Lora, chip: Chip | None) -> Work:
    size = lora.itemsize
    weights = lora.active_rank * site.outputs * size
    y = 2 * passing(float(lora.rows * site.outputs * size), chip)
    return Work("expand", weights + y, 2.0 * lora.rank_rows * site.outputs, 1, size)


def two_launch_works(shape: Shape, lora: Lora, chip: Chip | None = None) -> list[Work]:
    """Shrink and expand at every site of every layer. With a chip, activations that its L2 keeps cost no bytes."""
    if not lora.active:
        return []
    layer = [work(site, lora, chip) for site in shape.sites for work in (_shrink, _expand)]
    return layer * shape.layers


def _fused(site: Site, lora: Lora, chip: Chip | None) -> Work:
    columns = len(site.widths) * sum(lora.ranks)
    h = 2 * passing(float(lora.rows * columns * lora.itemsize), chip)  # written, then read by expand
    moved = columns * site.inputs * lora.itemsize + h
    return Work("fused shrink", moved, 2.0 * lora.rows * columns * site.inputs, 0, lora.itemsize)


def fused_works(shape: Shape, lora: Lora, chip: Chip | None = None) -> list[Work]:
    """What [W; A of every slot] adds to the base GEMMs, then the expands. No row of the GEMM is left out."""
    if not lora.active:
        return []
    return [work(site, lora, chip) for site in shape.sites for work in (_fused, _expand)] * shape.layers


def fused_seconds(shape: Shape, lora: Lora, chip: Chip, how: str = "device") -> float:
    """The fused plan's cost over the base step. The widened GEMM takes the longer of its two sums: operations added to
    a GEMM that waits for memory are free."""
    if not lora.active:
        return 0.0
    layer = 0.0
    for site in shape.sites:
        base = linear_work(site.name, lora.rows, site.inputs, site.outputs, lora.itemsize, chip)
        more = _fused(site, lora, chip)
        wide = replace(base, bytes=base.bytes + more.bytes, flops=base.flops + more.flops)
        layer += wide.seconds(chip) - base.seconds(chip) + seconds([_expand(site, lora, chip)], chip, how)
    return layer * shape.layers


def two_launch_seconds(shape: Shape, lora: Lora, chip: Chip, how: str = "device") -> float:
    """The two-launch plan's cost over the base step."""
    return seconds(two_launch_works(shape, lora, chip), chip, how)


def tier_seconds(nbytes: float, chip: Chip) -> float:
    """A copy between the device and pinned host memory."""
    return nbytes / (chip.link_gb_s * 1e9)
