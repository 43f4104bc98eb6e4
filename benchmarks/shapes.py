"""Shapes of dense decoders, as far as bytes and operations go. Needs no torch."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["MIXED", "PRESETS", "Shape", "Site", "model_shape", "ranks"]

MIXED = (8, 16, 32, 64)  # "mixed": dealt to the adapters in turn


@dataclass(frozen=True, slots=True)
class Site:
    """One fused linear site: [in] -> the concatenation of `widths`."""

    name: str
    inputs: int
    widths: tuple[int, ...]

    @property
    def outputs(self) -> int:
        return sum(self.widths)

    @property
    def per_rank(self) -> int:
        """LoRA parameters per unit of rank, all slices adapted."""
        return len(self.widths) * self.inputs + self.outputs


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A dense decoder, as far as bytes and operations go."""

    name: str
    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool
    norms: int = 2  # per layer; 4 with norms behind attention and MLP as well

    @classmethod
    def of(cls, config: Any, name: str) -> Shape:
        """From a `lamina.models.config.ModelConfig`."""
        return cls(
            name=name,
            layers=config.num_layers,
            hidden=config.hidden_size,
            inner=config.intermediate_size,
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            vocab=config.vocab_size,
            tied=config.tie_embeddings,
            norms=4 if config.post_norms else 2,
        )

    @property
    def sites(self) -> tuple[Site, ...]:
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return (
            Site("qkv", self.hidden, (q, kv, kv)),
            Site("o", q, (self.hidden,)),
            Site("gate_up", self.hidden, (self.inner, self.inner)),
            Site("down", self.inner, (self.hidden,)),
        )

    @property
    def linear_parameters(self) -> int:
        """The projections of all layers."""
        return self.layers * sum(site.inputs * site.outputs for site in self.sites)

    @property
    def parameters(self) -> int:
        """All, the norms apart."""
        return self.linear_parameters + (1 if self.tied else 2) * self.vocab * self.hidden

    @property
    def per_rank(self) -> int:
        """LoRA parameters per unit of rank with all seven projections adapted."""
        return self.layers * sum(site.per_rank for site in self.sites)

    def kv_bytes(self, itemsize: int = 2) -> int:
        """Keys and values of one token, all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * itemsize


def _preset(
    name: str, layers: int, hidden: int, inner: int, heads: tuple[int, int, int], vocab: int, tied: bool
) -> Shape:
    return Shape(
        name=name,
        layers=layers,
        hidden=hidden,
        inner=inner,
        heads=heads[0],
        kv_heads=heads[1],
        head_dim=heads[2],
        vocab=vocab,
        tied=tied,
    )


PRESETS: dict[str, Shape] = {
    shape.name: shape
    for shape in (
        _preset("llama-3-8b", 32, 4096, 14336, (32, 8, 128), 128256, False),
        _preset("qwen3-8b", 36, 4096, 12288, (32, 8, 128), 151936, False),
        _preset("smollm2-135m", 30, 576, 1536, (9, 3, 64), 49152, True),
    )
}


def ranks(adapters: int, rank: str | int) -> tuple[int, ...]:
    """One rank per adapter; "mixed" deals MIXED in turn. ValueError for anything but a number from 1 to 256."""
    if rank == "mixed":
        return tuple(MIXED[i % len(MIXED)] for i in range(adapters))
    number = int(rank)
    if not 1 <= number <= 256 or adapters < 0:
        raise ValueError(f"ranks are 1 to 256 or mixed, adapters 0 or more; not {rank!r} and {adapters}")
    return (number,) * adapters


def model_shape(name: str) -> Shape:
    """A preset, or a model folder with a `config.json`. ValueError if it is neither."""
    if name in PRESETS:
        return PRESETS[name]
    if not (Path(name) / "config.json").is_file():
        raise ValueError(f"--model is one of {', '.join(PRESETS)} or a folder with a config.json, not {name!r}")
    root = Path(__file__).resolve().parent.parent
    sys.path[:0] = [str(root / "platform"), str(root / "lora")]
    from lamina.models.config import ModelConfig

    return Shape.of(ModelConfig.from_folder(Path(name)), Path(name).name)
