"""Which modules an adapter changes, with which rank and scaling, as PEFT would resolve its configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lamina_lora.errors import AdapterRejected
from lamina_lora.geometry import BaseGeometry
from lamina_lora.patterns import MATCH_SECONDS, Matcher, PatternTooSlow
from lamina_lora.peft_config import PeftConfig
from lamina_lora.report import Report, quoted

__all__ = ["ModuleLora", "resolve_targets"]


@dataclass(frozen=True, slots=True)
class ModuleLora:
    """One adapted module: its output changes by scaling · B · A · x, with A [rank, in] and B [out, rank].

    With DoRA the base weight's rows are rescaled too (`lamina_lora.dora`).
    """

    layer: int
    target: str
    rank: int
    scaling: float
    dora: bool = False


def resolve_targets(config: PeftConfig, geometry: BaseGeometry, *, max_rank: int) -> Mapping[str, ModuleLora]:
    """Module name -> its rank and scaling, in the model's order.

    Raises AdapterRejected with every violation: a target name that the base model lacks (embeddings and lm_head
    included), a pattern that matches no target, a layer that does not exist, a rank above `max_rank`, patterns
    that take too long to match, or no target at all.
    """
    try:
        return _Resolution(config, geometry).run(max_rank)
    except PatternTooSlow as error:
        raise AdapterRejected(
            [f"the patterns in the configuration take longer than {MATCH_SECONDS:.0f} s to match; use plain names"]
        ) from error


class _Resolution:
    def __init__(self, config: PeftConfig, geometry: BaseGeometry) -> None:
        self.config, self.geometry = config, geometry
        self.matcher = Matcher()
        self.report = Report()
        self.decisive: set[tuple[str, str]] = set()

    def run(self, max_rank: int) -> Mapping[str, ModuleLora]:
        self._check_names()
        found = {
            self.geometry.module_name(layer, target): self._module(layer, target)
            for layer, target in self.geometry.modules()
            if self._is_target(self.geometry.module_name(layer, target))
        }
        if not found and not self.report:
            self.report.add("the configuration targets no module of the base model")
        self._check_ranks(found, max_rank)
        if found:
            self._check_patterns()
        self.report.raise_if_any()
        return found

    def _check_names(self) -> None:
        names = list(self.geometry.module_names())
        targets = self.config.target_modules
        for entry in () if isinstance(targets, str) else targets:
            if not any(_is_suffix(entry, name) for name in names):
                self.report.add(f"target_modules names {quoted(entry)}, which cannot be a target here")
        for layer in self.config.layers or ():
            if layer >= self.geometry.num_layers:
                self.report.add(
                    f"layers_to_transform names layer {layer}; the base model has {self.geometry.num_layers}"
                )

    def _is_target(self, name: str) -> bool:
        if self._is_excluded(name):
            return False
        targets = self.config.target_modules
        if isinstance(targets, str):
            return targets.lower() == "all-linear" or self.matcher.full(targets, name)
        return any(_is_suffix(entry, name) for entry in targets) and self._in_layers(name)

    def _is_excluded(self, name: str) -> bool:
        excluded = self.config.exclude_modules
        if isinstance(excluded, str):
            return bool(excluded) and self.matcher.full(excluded, name)
        return any(_is_suffix(entry, name) for entry in excluded)

    def _in_layers(self, name: str) -> bool:
        if self.config.layers is None:
            return True
        if not self.config.layers_pattern:
            return self.matcher.layer(None, name) in self.config.layers
        found = (self.matcher.layer(pattern, name) for pattern in self.config.layers_pattern)
        return next((layer for layer in found if layer is not None), None) in self.config.layers

    def _module(self, layer: int, target: str) -> ModuleLora:
        name = self.geometry.module_name(layer, target)
        rank = self._first("rank_pattern", self.config.rank_pattern, name, self.config.r)
        alpha = self._first("alpha_pattern", self.config.alpha_pattern, name, self.config.lora_alpha)
        return ModuleLora(layer, target, int(rank), self.config.scaling(int(rank), alpha), self.config.use_dora)

    def _first(self, key: str, pattern: tuple[tuple[str, float], ...], name: str, default: float) -> float:
        for expression, value in pattern:
            if self.matcher.tail(expression, name):
                self.decisive.add((key, expression))
                return value
        return default

    def _check_ranks(self, found: Mapping[str, ModuleLora], max_rank: int) -> None:
        too_big = [(name, module.rank) for name, module in found.items() if module.rank > max_rank]
        if too_big:
            name, rank = max(too_big, key=lambda item: item[1])
            self.report.add(
                f"{len(too_big)} modules have a rank above the limit of {max_rank} ({name}: {rank}, for example)"
            )

    def _check_patterns(self) -> None:
        for key, pattern in (
            ("rank_pattern", self.config.rank_pattern),
            ("alpha_pattern", self.config.alpha_pattern),
        ):
            for expression, _ in pattern:
                if (key, expression) not in self.decisive:
                    self.report.add(
                        f"{key}[{quoted(expression)}] decides no targeted module (no match, or an earlier entry "
                        "matched first); remove it"
                    )


def _is_suffix(entry: str, name: str) -> bool:
    return name == entry or name.endswith(f".{entry}")
