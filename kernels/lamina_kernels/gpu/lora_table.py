"""The LoRA table of the Triton kernels: adapters in a device pool, two launches per fused site and kind of row.

    decode rows   [0, decode_rows)            16-row tiles, many splits of `in`
    prefill rows  after them, to max_tokens   64-row tiles, few splits

Nothing that `apply` launches depends on which adapters are in the slots, and its scratch memory is as large as the
capacities ask from the start, so that it can be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lamina_kernels.gpu.lora_embed import embed_shrink
from lamina_kernels.gpu.lora_expand import expand
from lamina_kernels.gpu.lora_layout import SiteShape
from lamina_kernels.gpu.lora_pack import PackedLora, PoolLayout
from lamina_kernels.gpu.lora_pool import LoraPool
from lamina_kernels.gpu.lora_shrink import shrink
from lamina_kernels.gpu.lora_tiles import LoraTiles
from lamina_kernels.gpu.tuned import (
    LORA_EXPAND_DECODE,
    LORA_EXPAND_PREFILL,
    LORA_SHRINK_DECODE,
    LORA_SHRINK_PREFILL,
    ExpandShape,
    ShrinkShape,
)
from lamina_kernels.lora import LoraWeights, PreparedLora

__all__ = ["TritonLoraTable"]

_LAYER_SITES = 4  # qkv, o, gate_up, down
_PLANE_RANKS = 16  # planes are read in whole vectors if their rows are multiples of this


@dataclass(frozen=True, slots=True)
class _Kind:
    """How one kind of row is computed; `limit` rows at most, the step's first."""

    shrink: ShrinkShape
    expand: ExpandShape
    limit: int


class TritonLoraTable:
    """Every adapter at every fused site, applied to up to `max_tokens` rows; only the first `decode_rows` may decode.

    `sites[i]` is the shape of site i; `embedding` is the number of the token embedding, if adapters may change it.
    `load_order` says which sites `load_layers` copies at a time, each site once; by default 4 at a time, as a layer has
    them, after those that are left at the end (embedding, head).
    Raises ValueError or TypeError for what the kernels cannot do. Not safe for concurrent use, `prepare` apart.
    """

    def __init__(
        self,
        sites: Sequence[SiteShape],
        *,
        dtype: torch.dtype,
        device: torch.device,
        capacity_bytes: int,
        max_slots: int,
        max_rank: int,
        max_tokens: int,
        decode_rows: int,
        embedding: int | None = None,
        load_order: Sequence[range] | None = None,
    ) -> None:
        if not 0 <= decode_rows <= max_tokens or max_tokens < 1:
            raise ValueError(f"there are 0 to {max_tokens} decode rows, at least 1 token, not {decode_rows}")
        self._layout = PoolLayout(tuple(sites), dtype, max_rank, embedding)
        self._pool = LoraPool(self._layout, slots=max_slots, capacity_bytes=capacity_bytes, device=device)
        self._tables = self._pool.table.unbind(0)  # per site [slots, FIELDS]
        self._decode = _Kind(LORA_SHRINK_DECODE, LORA_EXPAND_DECODE, decode_rows)
        self._prefill = _Kind(LORA_SHRINK_PREFILL, LORA_EXPAND_PREFILL, max_tokens)
        sizes = [self._planes_shape(site, kind) for site in range(len(sites)) for kind in (self._decode, self._prefill)]
        self._scratch = torch.empty(max(a * b * c for a, b, c in sizes), dtype=torch.float32, device=device)
        self._load_order = _load_order(len(sites), load_order)

    @property
    def dtype(self) -> torch.dtype:
        """Of weights, inputs and outputs."""
        return self._layout.dtype

    @property
    def max_slots(self) -> int:
        """Slots are numbered below this; the kernels trust the numbers in tiles."""
        return self._pool.slots

    @property
    def free_bytes(self) -> int:
        """What is left of the capacity; one adapter can have it all."""
        return self._pool.free_bytes

    def prepare(self, weights: Sequence[LoraWeights | None]) -> PackedLora:
        """Packs one adapter, one entry per site, into one host tensor, pinned for a CUDA device. Any thread.

        Raises ValueError if its sites, widths or ranks do not fit the table.
        """
        return self._layout.pack(weights, pin=self._pool.weights.is_cuda)

    def put(self, slot: int, prepared: PreparedLora) -> None:
        """Fills a slot by one copy of the weights and one of the table's rows; what it held is dropped.

        Raises ValueError for a slot beyond `max_slots`, TypeError for weights prepared for another kind of table, and
        OutOfPool where they do not fit; nothing has changed then.
        """
        packed = _packed(prepared)
        self._pool.begin(slot, packed)
        self._pool.copy(slot, packed, range(len(self._tables)))

    def load_layers(self, slot: int, prepared: PreparedLora) -> Iterator[range]:
        """As `put`, but copies a layer whenever the iterator is advanced, and gives that layer's sites (`load_order`).

        The room is taken, on the current stream, before this returns. The iterator may be advanced under another
        stream; an event recorded there after each layer tells when a step may use it.
        Whoever stops early drops the slot. LookupError if the slot was dropped or filled otherwise in between.
        """
        packed = _packed(prepared)
        self._pool.begin(slot, packed)

        def copies() -> Iterator[range]:
            for sites in self._load_order:
                self._pool.copy(slot, packed, sites)
                yield sites

        return copies()

    def drop(self, slot: int) -> None:
        """Forgets the slot's weights; nothing happens if it is empty. ValueError for a slot beyond `max_slots`."""
        self._pool.drop(slot)

    def compact(self) -> None:
        """Moves the adapters together, which `put` does where it must; for idle moments. Results stay as they are."""
        self._pool.compact()

    def check_integrity(self) -> None:
        """Raises PoolCorrupt if the bookkeeping contradicts itself. Waits for the device."""
        self._pool.check_integrity()

    def apply(self, site: int, tiles: LoraTiles, x: Tensor, y: Tensor, bias: Tensor | None = None) -> None:
        """Adds each tile's adapter to y [T, out] in place; x [T, in], T <= max_tokens. Rows in no tile keep their bits.

        Decode tiles lie in the first `decode_rows` rows. `bias` [out] is what the base projection added to y: DoRA does
        not scale it. Raises ValueError or TypeError for other shapes or dtypes.
        """
        self._check_input(site, x, y)
        for kind, part in ((self._decode, tiles.decode), (self._prefill, tiles.prefill)):
            if part.shape[0]:
                self._shrink(site, kind, part, x)
                self._expand(site, kind, part, self._planes(site, kind), y, bias)

    def shrink_decode(self, site: int, tiles: LoraTiles, x: Tensor) -> None:
        """The first half of `apply` for the decode tiles: perhaps beside the base projection, on another stream.

        Its result is kept until the next call of any kind, which must come after `expand_decode` in the device's order.
        """
        self._check_input(site, x, x)
        if tiles.decode.shape[0]:
            self._shrink(site, self._decode, tiles.decode, x)

    def expand_decode(self, site: int, tiles: LoraTiles, y: Tensor, bias: Tensor | None = None) -> None:
        """The second half: adds what `shrink_decode` left for this site to y [T, out]."""
        if tiles.decode.shape[0]:
            self._expand(site, self._decode, tiles.decode, self._planes(site, self._decode), y, bias)

    def apply_embedding(self, tiles: LoraTiles, token_ids: Tensor, y: Tensor) -> None:
        """Adds each tile's adapter to the embeddings y [T, hidden] of token_ids [T], in place; as `apply` otherwise.

        Raises ValueError without an embedding site.
        """
        site = self._layout.embedding
        if site is None:
            raise ValueError("the table was made without an embedding site")
        self._check_rows(token_ids, y)
        vocab = self._layout.sites[site].in_features
        for kind, part in ((self._decode, tiles.decode), (self._prefill, tiles.prefill)):
            if part.shape[0]:
                planes = self._planes(site, kind)
                embed_shrink(
                    *(token_ids[: kind.limit], self._pool.weights, self._tables[site], part, planes),
                    vocab=vocab,
                    tile_rows=kind.shrink.rows,
                )
                self._expand(site, kind, part, planes, y, None)

    def _shrink(self, site: int, kind: _Kind, tiles: Tensor, x: Tensor) -> None:
        planes = self._planes(site, kind)
        shrink(x[: kind.limit], self._pool.weights, self._tables[site], tiles, planes, kind=kind.shrink)

    def _expand(self, site: int, kind: _Kind, tiles: Tensor, planes: Tensor, y: Tensor, bias: Tensor | None) -> None:
        expand(
            *(planes, self._pool.weights, self._pool.gains, self._tables[site], tiles, y[: kind.limit], bias),
            shape=self._layout.sites[site],
            splits=planes.shape[0],
            kind=kind.expand,
        )

    def _check_input(self, site: int, x: Tensor, y: Tensor) -> None:
        in_features = self._layout.sites[site].in_features
        if x.shape[1:] != (in_features,) or site == self._layout.embedding:
            raise ValueError(f"site {site} takes x [T, {in_features}] unless it is the embedding, not {tuple(x.shape)}")
        self._check_rows(x, y)

    def _check_rows(self, given: Tensor, y: Tensor) -> None:
        if given.shape[0] != y.shape[0] or y.shape[0] > self._prefill.limit:
            raise ValueError(f"{given.shape[0]} rows in, {y.shape[0]} out; at most {self._prefill.limit} are possible")

    def _planes_shape(self, site: int, kind: _Kind) -> tuple[int, int, int]:
        """[splits, rows, ranks] for what `shrink` leaves for `expand`."""
        shape = self._layout.sites[site]
        splits = 1 if site == self._layout.embedding else kind.shrink.splits(shape.in_features)
        ranks = len(shape.widths) * self._layout.max_rank
        return splits, kind.limit, -(-ranks // _PLANE_RANKS) * _PLANE_RANKS

    def _planes(self, site: int, kind: _Kind) -> Tensor:
        # One scratch for all: kernels of one stream run one after the other.
        splits, rows, ranks = self._planes_shape(site, kind)
        return self._scratch[: splits * rows * ranks].view(splits, rows, ranks)


def _packed(prepared: PreparedLora) -> PackedLora:
    if not isinstance(prepared, PackedLora):
        raise TypeError(f"{type(prepared).__name__} was prepared for another kernel")
    return prepared


def _load_order(sites: int, given: Sequence[range] | None) -> tuple[range, ...]:
    if given is None:
        layers = sites - sites % _LAYER_SITES
        rest = [range(layers, sites)] if layers < sites else []
        return (*rest, *(range(first, first + _LAYER_SITES) for first in range(0, layers, _LAYER_SITES)))
    if sorted(site for part in given for site in part) != list(range(sites)) or any(part.step != 1 for part in given):
        raise ValueError(f"the load order has each of {sites} sites once, in ranges, not {list(given)}")
    return tuple(given)
