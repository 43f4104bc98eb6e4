"""Which layers attend through a sliding window. Torch-free."""

from __future__ import annotations

from lamina.errors import UnsupportedModel
from lamina.models.fields import Fields
from lamina.models.registry import WindowRule

__all__ = ["read_windows"]

_MAX_WINDOW = 1 << 24  # tokens
_DEFAULT_WINDOW = 4096
_DEFAULT_FULL_BELOW = 28  # Qwen's max_window_layers
_TYPES = ("full_attention", "sliding_attention")


def read_windows(fields: Fields, rule: WindowRule, layers: int) -> tuple[int | None, ...]:
    """Per layer the window in tokens, the token itself included, or None for full attention.

    Raises ConfigurationInvalid for bad values and UnsupportedModel for unknown layer types.
    """
    window = _window(fields, rule)
    sliding = _layer_types(fields, layers)
    if rule in ("never", "every_layer"):
        return _uniform(fields, window, sliding, layers)
    if sliding is None:
        sliding = _pattern(fields, rule, window, layers)
    if window is None and any(sliding):
        raise fields.invalid("sliding_window", "must be given if layer_types holds sliding_attention")
    return tuple(window if slides else None for slides in sliding)


def _window(fields: Fields, rule: WindowRule) -> int | None:
    if rule == "never" or (rule == "upper_layers" and not fields.boolean("use_sliding_window", default=False)):
        return None
    if fields.has("sliding_window") and fields.raw("sliding_window") is None:
        return None
    return fields.integer("sliding_window", high=_MAX_WINDOW, default=_DEFAULT_WINDOW)


def _layer_types(fields: Fields, layers: int) -> list[bool] | None:
    """Per layer whether it slides; None if the file leaves it to the family's pattern."""
    types = fields.texts("layer_types")
    if types is None:
        return None
    if unknown := sorted(set(types) - set(_TYPES)):
        raise UnsupportedModel(
            f"config.json: the layer types {unknown} are not supported; supported: {', '.join(_TYPES)}.",
            param="layer_types",
        )
    if len(types) != layers:
        raise fields.invalid("layer_types", f"must name {layers} layers (it names {len(types)})")
    return [kind == "sliding_attention" for kind in types]


def _uniform(fields: Fields, window: int | None, sliding: list[bool] | None, layers: int) -> tuple[int | None, ...]:
    # These architectures have one kind of layer; a file that says otherwise means another model.
    if sliding is not None and set(sliding) != {window is not None}:
        raise UnsupportedModel(
            "config.json: layer_types that mix or contradict sliding_window are not supported for this architecture.",
            param="layer_types",
        )
    return (window,) * layers


def _pattern(fields: Fields, rule: WindowRule, window: int | None, layers: int) -> list[bool]:
    if rule == "upper_layers":
        full_below = fields.integer("max_window_layers", low=0, high=1 << 16, default=_DEFAULT_FULL_BELOW)
        return [window is not None and layer >= full_below for layer in range(layers)]
    period = 2
    if rule == "five_of_six":
        # Written by some versions with the underscore, by others without.
        name = "sliding_window_pattern" if fields.raw("sliding_window_pattern") else "_sliding_window_pattern"
        period = fields.integer(name, high=1 << 16, default=6)
    return [bool((layer + 1) % period) for layer in range(layers)]
