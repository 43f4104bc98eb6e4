"""The shape of a base model as adapters see it. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

__all__ = ["SITES", "SITE_OF", "TARGETS", "BaseGeometry"]

SITES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "qkv": ("q_proj", "k_proj", "v_proj"),
        "o": ("o_proj",),
        "gate_up": ("gate_proj", "up_proj"),
        "down": ("down_proj",),
    }
)
"""Fused linear sites of one decoder layer and their slices, in the order of their output columns."""

TARGETS: tuple[str, ...] = tuple(target for slices in SITES.values() for target in slices)
"""The seven projections that an adapter may target."""

SITE_OF: Mapping[str, str] = MappingProxyType({t: site for site, slices in SITES.items() for t in slices})

_BLOCK: Mapping[str, str] = MappingProxyType({t: "self_attn" if SITE_OF[t] in ("qkv", "o") else "mlp" for t in TARGETS})


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseGeometry:
    """What an adapter must fit: the layer count and (in_features, out_features) of each target projection.

    Every layer has the same shapes. Slices of one fused site share their input, so they must agree on
    in_features; ValueError otherwise, as for a missing target or a size below 1.
    """

    num_layers: int
    targets: Mapping[str, tuple[int, int]]
    vocab_size: int
    hidden_size: int

    def __post_init__(self) -> None:
        if set(self.targets) != set(TARGETS):
            raise ValueError(f"targets must be exactly {sorted(TARGETS)}, got {sorted(self.targets)}")
        sizes = [self.num_layers, self.vocab_size, self.hidden_size]
        sizes += [size for shape in self.targets.values() for size in shape]
        if min(sizes) < 1:
            raise ValueError("every size of a geometry must be at least 1")
        for site, slices in SITES.items():
            if len({self.targets[target][0] for target in slices}) != 1:
                raise ValueError(f"the slices of {site} must share one in_features")

    def in_features(self, site: str) -> int:
        """Width of the site's input."""
        return self.targets[SITES[site][0]][0]

    def out_features(self, site: str) -> int:
        """Width of the site's fused output."""
        return sum(self.targets[target][1] for target in SITES[site])

    def column_of(self, target: str) -> int:
        """First output column of the target within its fused site."""
        slices = SITES[SITE_OF[target]]
        return sum(self.targets[t][1] for t in slices[: slices.index(target)])

    def modules(self) -> Iterator[tuple[int, str]]:
        """(layer, target) of every projection, in the model's order."""
        return ((layer, target) for layer in range(self.num_layers) for target in TARGETS)

    def module_names(self) -> Iterator[str]:
        """Every projection as the base model names it, e.g. `model.layers.0.self_attn.q_proj`."""
        return (self.module_name(layer, target) for layer, target in self.modules())

    @staticmethod
    def module_name(layer: int, target: str) -> str:
        return f"model.layers.{layer}.{_BLOCK[target]}.{target}"
