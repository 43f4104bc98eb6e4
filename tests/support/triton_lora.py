"""A small model's sites, random adapters for them, and what they do to rows, for tests of the Triton LoRA table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lamina_kernels.gpu.lora_layout import SiteShape
from lamina_kernels.gpu.lora_tiles import DECODE_ROWS, PREFILL_ROWS, LoraTiles, build_tiles
from lamina_kernels.lora import LoraWeights, expand, shrink

__all__ = ["EMBEDDING", "SITES", "adapter", "changed", "tiles"]

Segment = tuple[int, int, int]  # slot, first row, row after the last
VOCAB, HIDDEN = 29, 37  # no multiple of anything

_LAYER = (SiteShape(HIDDEN, (40, 17, 9)), SiteShape(72, (HIDDEN,)))
SITES = (*_LAYER, *_LAYER, SiteShape(VOCAB, (HIDDEN,)), SiteShape(HIDDEN, (VOCAB,)))
EMBEDDING = 4


def adapter(
    seed: int, ranks: tuple[int, ...] = (3, 1, 5), *, dora: bool = False, sites: Sequence[SiteShape] = SITES
) -> list[LoraWeights | None]:
    """At every site, rank `ranks[s]` for slice s (0: unchanged), float16 values; `dora` scales every other slice."""
    generator = torch.Generator().manual_seed(seed)

    def random(*size: int) -> Tensor:
        return (torch.randn(size, generator=generator) / size[-1] ** 0.25).half().float()

    def at(shape: SiteShape) -> LoraWeights | None:
        chosen = [(r, w, c) for r, w, c in zip(ranks, shape.widths, shape.columns, strict=False) if r]
        if not chosen:
            return None
        gains = tuple(random(w).abs() + 0.5 if dora and i % 2 == 0 else None for i, (_, w, _) in enumerate(chosen))
        return LoraWeights(
            a=random(sum(r for r, _, _ in chosen), shape.in_features),
            b=tuple(random(r, w) for r, w, _ in chosen),
            columns=tuple(c for _, _, c in chosen),
            gains=gains if dora else None,
        )

    return [at(shape) for shape in sites]


def tiles(decode: Sequence[Segment], prefill: Sequence[Segment] = (), padding: int = 1) -> LoraTiles:
    """Tiles of these segments, then `padding` unused ones of each kind that has any."""

    def build(segments: Sequence[Segment], rows: int) -> Tensor:
        used = build_tiles(segments, rows)
        return torch.from_numpy(build_tiles(segments, rows, len(used) + padding) if len(used) else used)

    return LoraTiles(build(decode, DECODE_ROWS), build(prefill, PREFILL_ROWS))


def changed(
    loaded: Mapping[int, LoraWeights | None],
    segments: Sequence[Segment],
    x: Tensor,
    y: Tensor,
    bias: Tensor | None = None,
) -> Tensor:
    """y with each segment's adapter, float64, by torch's own products; `loaded` is one site by slot."""
    x, out = x.double(), y.double()
    bias = None if bias is None else bias.double()
    for slot, start, stop in segments:
        lora = loaded.get(slot)
        if lora is not None:
            wide = LoraWeights(lora.a.double(), tuple(b.double() for b in lora.b), lora.columns, lora.gains)
            h = x.new_empty(len(x), lora.rank)
            shrink(x, [wide], [(start, stop)], h)
            expand(h, [wide], [(start, stop)], out, bias)
    return out
