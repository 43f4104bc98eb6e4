"""Rotary position settings as `config.json` gives them, in the spelling of transformers 4 and of 5. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lamina.errors import ConfigurationInvalid, UnsupportedModel
from lamina.models.fields import Fields

__all__ = ["ROPE_KINDS", "RopeConfig", "read_rope", "read_rope_pair"]

RopeKind = Literal["default", "linear", "llama3"]
ROPE_KINDS: tuple[RopeKind, ...] = ("default", "linear", "llama3")

_MAX_THETA = 1e12
_MAX_FACTOR = 1e6
_MAX_POSITIONS = 1 << 24
_KNOWN = frozenset(
    {
        "rope_theta",
        "rope_type",
        "type",
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
        "partial_rotary_factor",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """How positions turn into angles. Fields past `factor` matter for `llama3` only."""

    theta: float
    kind: RopeKind = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_context: int = 8192  # tokens


def read_rope(config: Fields, *, default_theta: float, max_context: int) -> RopeConfig:
    """The one rope of a model. Raises UnsupportedModel for an unknown kind, ConfigurationInvalid for bad values."""
    theta = _theta(config, "rope_theta", default_theta)
    scaling = config.object("rope_scaling") or config.object("rope_parameters")
    _refuse_partial(config)
    return _parse(scaling, theta, max_context)


def read_rope_pair(
    config: Fields, *, default_theta: float, default_local_theta: float, max_context: int
) -> tuple[RopeConfig, RopeConfig]:
    """(rope of the full-attention layers, rope of the sliding ones), as Gemma 3 has them. Raises as `read_rope`."""
    _refuse_partial(config)
    theta = _theta(config, "rope_theta", default_theta)
    local_theta = _theta(config, "rope_local_base_freq", default_local_theta)
    nested = config.object("rope_parameters")
    if nested is None:
        return _parse(config.object("rope_scaling"), theta, max_context), RopeConfig(theta=local_theta)
    stray = nested.names() - {"full_attention", "sliding_attention"}
    if stray:
        raise ConfigurationInvalid(
            f"config.json: rope_parameters must hold full_attention and sliding_attention, not {sorted(stray)}.",
            param="rope_parameters",
        )
    full = config.object("rope_scaling") or nested.object("full_attention")
    return _parse(full, theta, max_context), _parse(nested.object("sliding_attention"), local_theta, max_context)


def _parse(scaling: Fields | None, theta: float, max_context: int) -> RopeConfig:
    if scaling is None:
        return RopeConfig(theta=theta)
    _refuse_partial(scaling)
    if stray := scaling.names() - _KNOWN:
        raise UnsupportedModel(
            f"config.json: the rope settings {sorted(stray)} are not supported; supported: {sorted(_KNOWN)}.",
            param="rope_parameters",
        )
    theta = _theta(scaling, "rope_theta", theta)
    kind = scaling.text("rope_type", default=None) or scaling.text("type", default="default")
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(theta=theta, kind="linear", factor=_factor(scaling))
    if kind == "llama3":
        return _llama3(scaling, theta, max_context)
    raise UnsupportedModel(
        f"config.json: the rope type {kind!r} is not supported; supported: {', '.join(ROPE_KINDS)}.",
        param="rope_type",
    )


def _llama3(scaling: Fields, theta: float, max_context: int) -> RopeConfig:
    low = scaling.number("low_freq_factor", low=1e-6, high=_MAX_FACTOR)
    high = scaling.number("high_freq_factor", low=1e-6, high=_MAX_FACTOR)
    if high <= low:
        raise scaling.invalid("high_freq_factor", f"must be greater than low_freq_factor ({low:g})")
    return RopeConfig(
        theta=theta,
        kind="llama3",
        factor=_factor(scaling),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_context=scaling.integer(
            "original_max_position_embeddings", high=_MAX_POSITIONS, default=max_context
        ),
    )


def _theta(fields: Fields, name: str, default: float) -> float:
    return fields.number(name, low=1.0, high=_MAX_THETA, default=default)


def _factor(scaling: Fields) -> float:
    return scaling.number("factor", low=1.0, high=_MAX_FACTOR)


def _refuse_partial(fields: Fields) -> None:
    if fields.number("partial_rotary_factor", low=0.0, high=1.0, default=1.0) != 1.0:
        raise UnsupportedModel(
            "config.json: partial_rotary_factor below 1 is not supported; the whole head must rotate.",
            param="partial_rotary_factor",
        )
